"""What benchmarks.demo does with a model: report, errors and step times."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

import fusion_backend
from benchmarks.measure.distance import distance, joint_distance
from benchmarks.measure.memory import peak_bytes
from benchmarks.measure.wall_time import interleaved
from benchmarks.subjects import demo_models
from benchmarks.subjects.demo_models import SENTENCES

WITHOUT_GPU = """\
Triton kernels need a GPU. On this CPU every match is rewritten all the same (fusion.gate=always),
with the pattern's plain torch code in the kernel's place: the whole pipeline runs; expect no
speed-up."""


@contextlib.contextmanager
def progress(what: str):
    """One line on stderr: seconds ticking on a terminal; elsewhere the line is written once, at the
    end.
    """
    start, done = time.perf_counter(), threading.Event()

    def tick():
        while not done.wait(0.5):
            print(
                f"\r  {what} ... {time.perf_counter() - start:.0f} s",
                end="",
                file=sys.stderr,
                flush=True,
            )

    ticker = threading.Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        ticker.start()
    try:
        yield
    finally:
        done.set()
        if ticker.ident:
            ticker.join()
        begin = "\r" if sys.stderr.isatty() else ""
        print(
            f"{begin}  {what} ... {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True
        )


def infer(model, subject):
    """One inference: the compared result."""
    with torch.no_grad():
        return subject.result(model(**subject.inputs))


def train(model, subject):
    """Forward and backward of one training step: the compared result, and the gradients by name."""
    model.zero_grad(set_to_none=True)
    output = model(**subject.inputs)
    subject.loss(output).backward()
    gradients = {
        name.removeprefix("_orig_mod."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return subject.result(output).detach(), gradients


def exact(subject):
    """The same model and inputs in fp64."""
    inputs = {
        name: x.double() if x.is_floating_point() else x for name, x in subject.inputs.items()
    }
    return type(subject)(
        subject.title, copy.deepcopy(subject.model).double(), inputs, subject.result, subject.loss
    )


def errors(models: dict, subject) -> dict[str, dict[str, float]]:
    """The distance of every model's result (and gradients) from fp64, and of the backend's from
    eager's.
    """
    truth = exact(subject)
    found = {"inference output": (distance, lambda model, s: infer(model, s))}
    if subject.loss:
        found["training output"] = distance, lambda model, s: train(model, s)[0]
        found["gradients"] = joint_distance, lambda model, s: train(model, s)[1]
    table = {}
    for row, (measure, run) in found.items():
        want, results = (
            run(truth.model, truth),
            {name: run(model, subject) for name, model in models.items()},
        )
        table[row] = {name: measure(got, want) for name, got in results.items()}
        table[row]["fusion to eager"] = measure(results["fusion"], results["eager"])
    subject.model.zero_grad(set_to_none=True)
    return table


def times(models: dict, subject) -> dict[str, dict[str, float]]:
    """Milliseconds a step, and on a GPU the peak memory of a step in MB, of every model."""
    device = next(iter(subject.inputs.values())).device
    table = {}
    for kind, step in [("inference", infer), ("training", train)][: 2 if subject.loss else 1]:
        steps = {name: lambda m=model, s=step: s(m, subject) for name, model in models.items()}
        table[f"{kind} ms"] = interleaved(steps, device)
        if device.type == "cuda":
            table[f"{kind} MB"] = {}
            for name, run in steps.items():
                # the last step's gradients are not this one's
                subject.model.zero_grad(set_to_none=True)
                table[f"{kind} MB"][name] = peak_bytes(run, device) / 1e6
    return table


def show(table: dict[str, dict[str, float]], head: str, form: str) -> None:
    """Print a table: a row a quantity, a column a model."""
    columns = list(next(iter(table.values())))
    print(f"  {head:<24}" + "".join(f"{name:>18}" for name in columns))
    for row, values in table.items():
        print(f"    {row:<22}" + "".join(f"{values[name]:>18{form}}" for name in columns))


def study(subject, options: dict, also=lambda models, subject: True) -> dict:
    """Compile a subject with the backend and with plain Inductor; print report, errors, times.
    Return the figures.
    """
    print(f"\n{subject.title}")
    fusion_backend.reset()
    compiled = {
        "eager": subject.model,
        "inductor": torch.compile(subject.model, backend="inductor"),
        "fusion": torch.compile(subject.model, backend="fusion", options=options),
    }
    steps = {"inference": infer} | ({"training": train} if subject.loss else {})
    for kind, step in steps.items():
        for name in ("fusion", "inductor"):
            with progress(f"compiling for {kind} with backend={name!r}"):
                step(compiled[name], subject)
    print(textwrap.indent(fusion_backend.report().text(width=98), "  "))
    found = errors(compiled, subject)
    show(found, "error against fp64", ".1e")
    measured = times(compiled, subject)
    show(measured, "a step", ".3f")
    worse = [
        row for row, e in found.items() if e["fusion"] > 2 * max(e["eager"], e["inductor"]) + 1e-7
    ]
    for row in worse:
        print(f"  FAILED: {row}: the error is more than twice that of eager and of plain Inductor")
    ok = also(compiled, subject) and not worse
    sites = fusion_backend.report().sites
    fused = sum(site.fused for site in sites)
    return dict(
        title=subject.title,
        sites=sum(site.counted for site in sites),
        fused=fused,
        errors=found,
        steps=measured,
        ok=ok,
    )


def similar(models: dict, subject) -> bool:
    """Print the two most similar sentences as the backend sees them; for eager they must be so too,
    to two digits.
    """
    scores = {}
    for name in ("eager", "fusion"):
        embeddings = infer(models[name], subject)[: len(SENTENCES)].float()
        scores[name] = (embeddings @ embeddings.T).fill_diagonal_(-1)
    first, second = divmod(scores["fusion"].argmax().item(), len(SENTENCES))
    fusion, eager = scores["fusion"][first, second].item(), scores["eager"][first, second].item()
    scored = f"{fusion:.3f} with fusion, {eager:.3f} eager"
    print(f"  most similar of the {len(SENTENCES)} sentences ({scored}):")
    print(f"    {SENTENCES[first]}\n    {SENTENCES[second]}")
    same = scores["eager"].max().item() - eager < 0.01
    if not same:
        print("  FAILED: eager finds two others")
    return same


def kernels() -> dict:
    """Run every pattern's Triton kernel on small CPU tensors in a process of its own, in Triton's
    interpreter.
    """
    print("\nThe Triton kernels themselves, in Triton's interpreter on small CPU tensors")
    command = [sys.executable, "-m", "benchmarks.interpreted"]
    with progress("interpreting"):
        done = subprocess.run(
            command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
    print(done.stdout, end="")
    if done.returncode:
        print(f"  FAILED: {' '.join(command)}\n{done.stderr[-2000:]}")
    return dict(title="kernels", ok=done.returncode == 0, output=done.stdout)


def run(parts: Sequence[str], encoder: Path | None) -> dict:
    """Show the parts and return their figures. `encoder` is the directory of another sentence
    encoder.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"fusion.gate": "auto" if device.type == "cuda" else "always"}
    name = f"CPU, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {name}")
    if device.type == "cpu":
        print(WITHOUT_GPU)
    results = []
    if "sentences" in parts:
        results.append(study(demo_models.sentences(device, encoder), options, also=similar))
    if "llama" in parts:
        results.append(study(demo_models.llama(device), options))
    if "gated" in parts:
        results += [study(demo_models.gated(device, inplace), options) for inplace in (True, False)]
    if "kernels" in parts and device.type == "cpu":
        results.append(kernels())
    return dict(device=name, torch=torch.__version__, results=results)
