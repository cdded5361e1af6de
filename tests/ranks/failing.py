"""Two processes, of which one cannot compile a graph with a sum over ranks, for
test_all_reduce.py: as if they had GPUs that reach each other's memory, and with plain torch for the
kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fusion_backend.patterns.all_reduce_norm import all_reduce_norm
from torch import Tensor

import fusion_backend
from fusion_backend.decide import gate
from fusion_backend.frontends import dynamo, together
from fusion_backend.kernels.collective.norm import fresh
from fusion_backend.kernels.norm.operands import Norm

from ..eager_kernels import eager_kernels
from ..sums_over_ranks import within_reach
from .all_reduces import OPTIONS, rms, summed

FAILS = 1  # the rank that does


def root_mean_square(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return rms(summed(x) + r, w)


def layer_norm(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(summed(x) + r, (16,), w, w, 1e-5)


def kernel(x, residual, weight, bias, offset, eps, kind, group, save):
    results = all_reduce_norm.reference(x, residual, weight, bias, offset, eps, kind, group)
    of = Norm(weight, bias, offset or 0.0, eps, kind == "layer")
    return *results, *fresh(x, of, save)[2:]


def refuse(*given) -> Callable:
    raise RuntimeError("no compiler here")


class Refusing:
    """Plain Inductor, if that cannot compile the graph either."""

    config: dict = {}

    def __call__(self, *given) -> Callable:
        return refuse()


@contextlib.contextmanager
def job(name: str) -> Iterator[None]:
    """Inside, the ranks have told each other nothing yet."""
    store, rank = together.default_store()
    told = dist.PrefixStore(name, store), rank
    with mock.patch.multiple(together, default_store=lambda: told, WAIT_S=30.0):
        yield


def call(fn: Callable, fails: bool = False, rows: int = 16) -> dict:
    """What a rank gets of a function, and what eager mode computes."""
    torch._dynamo.reset()
    fusion_backend.reset()
    drawn = torch.Generator().manual_seed(2 + dist.get_rank())
    given = [torch.randn(rows, 16, generator=drawn) for _ in range(2)]
    given.append(torch.ones(16))
    compiled = torch.compile(fn, backend="fusion", options=OPTIONS, dynamic=False)
    plain_kernel = mock.patch.object(all_reduce_norm, "kernel_fn", kernel)
    on_gpus = mock.patch.object(gate, "on_gpu", lambda t: True)
    failing = mock.patch.object(dynamo, "inductor_of_ours", refuse)
    with torch.no_grad(), eager_kernels(), within_reach(), plain_kernel, on_gpus:
        with failing if fails else contextlib.nullcontext():
            result = compiled(*given)
        (graph,) = fusion_backend.report().graphs
        fused = [s.pattern for s in graph.sites if s.fused]
        return dict(result=result, eager=fn(*given), fused=fused, error=graph.error)


def again() -> str:
    """The error of a rank that cannot compile what both have compiled before. It does not run the
    graph without the other rank.
    """
    plain = mock.patch.object(dynamo, "inductor", lambda mode, options: Refusing())
    try:
        with plain:
            call(root_mean_square, fails=True)
    except Exception as error:
        return str(error)
    return ""


def observe() -> dict:
    fails = dist.get_rank() == FAILS
    with job("one fails"):
        found = {"at first": call(root_mean_square, fails), "later": call(layer_norm)}
    with job("both compile"):
        found["both"] = call(root_mean_square)
        found["other rows"] = call(functools.partial(root_mean_square), rows=8)
        found["again"] = again() if fails else ""
    dist.barrier()  # the first rank holds the store
    return found
