"""A model class under eager and under this backend: right, wrong, failed, or skipped."""

from __future__ import annotations

import collections
import contextlib
import signal
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.compiler.regions import disagreements
from benchmarks.compiler.tiny_classes import AGREE, SECONDS, built, inputs
from benchmarks.measure.distance import floats, joint_distance
from benchmarks.measure.failures import said
from fusion_backend.compat.torch import many_recompiles
from fusion_backend.frontends.explain import Collector

KINDS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
}


class Skipped(BaseException):
    """The reason why a class says nothing about the backend. Nobody on the way takes it for an
    error of a model.
    """


@contextlib.contextmanager
def skipped_where(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Skipped(f"{what}: {said(error)}") from None


def result_and_gradients(step, model: torch.nn.Module, kwargs: dict) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    out = step(**kwargs)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return {"": out.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def surveyed(
    model: torch.nn.Module, kwargs: dict, dynamic: bool, backend=None
) -> tuple[str, Collector]:
    """What is wrong, "" for nothing, and what was fused. Skipped where torch alone fails."""
    collector = backend or Collector({"fusion.gate": "always"})

    def step(**kwargs):
        return floats(dict(model(**kwargs)))[0]

    with skipped_where("eager"):
        want = result_and_gradients(step, model, kwargs)
    torch.compiler.reset()
    with many_recompiles():
        try:
            got = result_and_gradients(
                torch.compile(step, backend=collector, dynamic=dynamic), model, kwargs
            )
        except Exception as error:
            torch.compiler.reset()
            with skipped_where("torch.compile"):
                result_and_gradients(
                    torch.compile(step, backend="aot_eager", dynamic=dynamic), model, kwargs
                )
            return f"FAILED: {said(error)}", collector
    if errors := [graph.error for graph in collector.report.graphs if graph.error]:
        return f"FAILED: {errors[0]}", collector
    if got.keys() != want.keys():
        return (
            f"WRONG: gradients of other parameters, {sorted(got.keys() ^ want.keys())[:3]}",
            collector,
        )
    largest = max(g.norm() for g in want.values())
    for name, exact in want.items():  # a gradient that is zero but for rounding is no measure
        off = joint_distance({name: got[name]}, {name: exact})
        if off > AGREE and (
            exact.norm() > 1e-5 * largest or (got[name] - exact).norm() > 1e-5 * largest
        ):
            return (
                f"WRONG: {name and 'the gradient of '}{name or 'the output'} is {off:.1e} off",
                collector,
            )
    return "", collector


def compared(model: torch.nn.Module, kwargs: dict, dynamic: bool) -> str:
    """Whether the sites agree with their regions. Skipped where torch alone fails."""
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in kwargs.items() if name not in names}

    def step(*tensors):
        return floats(dict(model(**dict(zip(names, tensors, strict=True)), **rest)))[0]

    tensors = [kwargs[name] for name in names]
    try:
        wrong = disagreements(step, *tensors, dynamic=dynamic)
    except Exception as error:
        torch.compiler.reset()
        with skipped_where("torch.compile"):
            torch.compile(step, backend="eager", dynamic=dynamic)(*tensors)
        return f"FAILED: {said(error)}"
    return f"WRONG: {'; '.join(wrong)}" if wrong else "ok"


def stop(*_):
    raise Skipped(f"it takes longer than {SECONDS} s")


def one(transformers, kind: str, config: type, name: str, args) -> str:
    """The line of a class."""
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with skipped_where("it cannot be built"):
            model = built(transformers, config, name, args.attention)
        if args.regions:
            return compared(model, inputs(kind, model), args.dynamic)
        wrong, collector = surveyed(model, inputs(kind, model), args.dynamic)
    except Skipped as reason:
        return f"skipped: {reason}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    fused = collections.Counter(site.pattern for site in collector.report.fused)
    return wrong or "ok, " + (
        ", ".join(f"{n} {pattern}" for pattern, n in sorted(fused.items())) or "nothing to fuse"
    )
