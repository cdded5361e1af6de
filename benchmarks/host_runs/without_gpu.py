"""What the code for a GPU launches and allocates, counted where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from benchmarks.host_runs import generated
from benchmarks.host_runs.generated import Counts
from benchmarks.host_runs.measuring import CONTENDERS, Step, compiled_by, gradients
from benchmarks.launches.driver import Driver
from benchmarks.measure.trace import our_kernels
from benchmarks.subjects.small_graphs import SmallGraph
from fusion_backend.compat.pretended_cuda import code_for_cuda
from fusion_backend.compat.triton import set_driver
from fusion_backend.decide import gate
from fusion_backend.ops import operator


def counted(
    graph: SmallGraph, train: bool, contenders: tuple[str, ...] = CONTENDERS[:2]
) -> tuple[dict[str, Counts], dict[str, list[str]]]:
    """The counts and the code of each contender. Kernels may not be interpreted."""
    inputs, codes = graph.inputs(torch.device("cpu"), train), {}
    with cpu_tensors_pass(), torch.no_grad() if not train else contextlib.nullcontext():
        grads = gradients(graph, inputs) if train else None
        for who in contenders:
            with code_for_cuda() as codes[who]:
                Step(compiled_by(who, graph.fn), inputs, grads)()
    ours = our_kernels()
    counts = {
        who: sum((generated.counted(text, ours) for text in code), Counts())
        for who, code in codes.items()
    }
    return counts, codes


@contextlib.contextmanager
def cpu_tensors_pass() -> Iterator[None]:
    """CPU tensors pass for CUDA's, and Triton compiles for sm_90."""
    set_driver(Driver())
    with (
        mock.patch.object(gate, "on_gpu", lambda tensor: True),
        mock.patch.object(operator, "on_gpu", lambda tensor: True),
    ):
        yield
