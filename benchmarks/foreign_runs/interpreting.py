"""A foreign graph with the kernels that it would have on an H200, in Triton's interpreter, against
eager code and fp64.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.foreign_code.problems import TRAIN, Graph
from benchmarks.foreign_runs.steps import Step, entry
from benchmarks.measure.distance import distance
from benchmarks.measure.failures import said
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.kernels.common.target import as_on, gpu
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord

CPU = torch.device("cpu")
RIGHT, WRONG, FAILED, SKIPPED = "right", "WRONG", "FAILED", "skipped"
# Distances from fp64, relative to its norm: ours may be so many times eager's, and beside it the
# coarsest dtype of the graph allows for roundings in another order. Eager's is the largest of
# several runs, with inputs and weights that differ by a rounding: one may turn a ReLU over.
FACTOR, RUNS = 10.0, 5
ALLOWED = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}
UNKNOWN = 0.1  # where eager code is as far off, a result says nothing


Results = list[Tensor | None]  # and gradients


class Outcome(NamedTuple):
    status: str
    sites: collections.Counter[str]  # fused, by pattern
    words: str = ""


def some_gradients(step: Step) -> None:
    """Every other parameter and activation gets no gradient."""
    for i, t in enumerate(step.wanted(step.inputs)):
        t.requires_grad_(i % 2 == 0)
    step.parameters = [p for p in step.parameters if p.requires_grad]


def strides(step: Step) -> None:
    """Floating inputs lie in memory in the opposite order of their dimensions."""
    step.inputs = [reversed_in_memory(x) for x in step.inputs]


def reversed_in_memory(x):
    if not is_float(x):
        return x
    order = range(x.dim() - 1, -1, -1)
    y = x.detach().permute(*order).contiguous().permute(*order)
    return y.requires_grad_(x.requires_grad)


VARIATIONS: dict[str, Callable[[Step], None]] = {
    "as-listed": lambda step: None,
    "some-gradients": some_gradients,
    "strides": strides,
    "dynamic": lambda step: None,  # of sizes
}


def checked(graph: Graph, variation: str) -> Outcome:
    """Are results and gradients of the graph right with our kernels? Graphs in bf16 are built in
    fp16, because Triton's interpreter rounds to bf16 by cutting off.
    """
    if graph.dtype == "bf16":
        graph = dataclasses.replace(graph, dtype="f16")
    if graph.random:
        return Outcome(SKIPPED, collections.Counter(), "it draws random numbers")
    backend = Deciding()
    with torch.set_grad_enabled(graph.mode == TRAIN), sdpa_kernel(SDPBackend.MATH):
        try:
            plain, exact = results(graph, variation)
        except Exception as error:
            return Outcome(SKIPPED, backend.sites, f"eager code fails: {said(error)}")
        torch.compiler.reset()
        step = varied(graph, variation)
        compiled = torch.compile(
            entry(step.module, "checked"), backend=backend, dynamic=variation == "dynamic"
        )
        try:
            ours = step(compiled, step.inputs)
        except Exception as error:
            return Outcome(FAILED, backend.sites, said(error))
    if backend.errors:
        return Outcome(FAILED, backend.sites, "; ".join(backend.errors))
    words = differences(ours, plain, exact, backend.allowed)
    return Outcome(WRONG if words else RIGHT, backend.sites, words)


def results(graph: Graph, variation: str) -> tuple[list[Results], Results]:
    """Those of eager code, the first with the numbers as they are; and those in fp64."""
    exact = varied(graph, variation).exact(torch.float64)
    plain = []
    for run in range(RUNS):
        step = varied(graph, variation)
        torch.manual_seed(run)
        for t in filter(is_float, (*step.module.parameters(), *step.inputs) if run else ()):
            t.data *= 1 + torch.randn_like(t).sign() * torch.finfo(t.dtype).eps / 2
        plain.append(step(step.module, step.inputs))
    return plain, exact


def is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def varied(graph: Graph, variation: str) -> Step:
    step = Step(graph, "tiny", CPU)
    VARIATIONS[variation](step)
    if step.train:  # gradients for the results that still have one
        torch.manual_seed(1)
        outs = step(step.module, step.inputs)[: step.outputs] if step.wanted(step.inputs) else []
        step.dys = [torch.randn_like(out) for out in outs if out.requires_grad]
    return step


class Deciding:
    """A backend that decides as on an H200, and runs the rewritten graphs operator by operator."""

    def __init__(self) -> None:
        self.sites: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self.allowed = ALLOWED[torch.float32]

    def __call__(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        record = GraphRecord(len(gm.graph.nodes))
        values = [n.meta.get("example_value") for n in gm.graph.nodes]
        dtypes = {v.dtype for v in values if isinstance(v, Tensor)}
        self.allowed = max([self.allowed, *(ALLOWED.get(dtype, 0.0) for dtype in dtypes)])
        with as_on(gpu("H200")):
            new, _ = fuse_graph(gm, Options(gate="always"), record, usable(patterns()))
        self.errors += [*filter(None, [record.error]), *record.faults]
        self.sites.update(site.pattern for site in record.sites if site.fused)
        return new.forward


def differences(ours: Results, plain: list[Results], exact: Results, allowed: float) -> str:
    """Which results differ, in words."""
    found = []
    for i, (a, e, *plains) in enumerate(zip(ours, exact, *plain, strict=True)):
        if (a is None) != (e is None):
            found.append(f"{i}: {'no' if a is None else 'a'} gradient")
        elif a is not None and (words := different(a, plains, e, allowed)):
            found.append(f"{i}: {words}")
    return "; ".join(found)


def different(ours: Tensor, plains: list[Tensor], exact: Tensor, allowed: float) -> str:
    first = plains[0]
    if ours.dtype != first.dtype or ours.shape != first.shape:
        return f"{ours.dtype} {tuple(ours.shape)}, not {first.dtype} {tuple(first.shape)}"
    if not ours.is_floating_point():
        return "" if torch.equal(ours, first) else "other numbers"
    finite = torch.stack([t.isfinite() for t in (exact, *plains)]).all(0)
    far, *others = (distance(t[finite], exact[finite]) for t in (ours, *plains))
    near = max(others)
    if near > UNKNOWN or far <= FACTOR * near + allowed:
        return ""
    return f"{far:.2g} from fp64, where eager code is {near:.2g}"
