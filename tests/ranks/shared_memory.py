"""What two processes compute with the kernels that sum over ranks, in Triton's interpreter: their
memory is a file that both have mapped. For test_all_reduce.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusion_backend.compat.symmetric_memory import Shared
from fusion_backend.kernels.collective import norm as norms
from fusion_backend.kernels.collective.norm import fresh, start
from fusion_backend.kernels.collective.workspace import DATA, Workspace, laid_out
from fusion_backend.kernels.norm.operands import Norm

from ..selection import covering

CAPACITY = 1 << 16


class Call(NamedTuple):
    """One call: the shape of x, its dtype, the kernel, the kind of norm, and with a residual?"""

    rows: int
    n: int
    dtype: torch.dtype
    two_shot: bool
    centred: bool
    residual: bool


KINDS = [
    (torch.float32, True, True),
    (torch.bfloat16, False, False),
    (torch.float16, False, True),
]
# The interpreter runs one program after another: after the first call there are fewer. Of 11 rows
# some have two, and others one.
PROGRAMS = 8
SHAPES = [(1, 33), (7, 100), (11, 8)]
SHOTS = (False, True)
CALLS = [
    Call(*shape, dtype, two_shot, centred, residual)
    for shape, two_shot, (dtype, centred, residual) in itertools.product(SHAPES, SHOTS, KINDS)
]
# Enough for every two of them together.
FEW = {
    Call(*shape, dtype, two_shot, centred, residual)
    for shape, two_shot, (dtype, centred, residual) in covering(SHAPES, SHOTS, KINDS)
}


def workspace(folder: Path) -> Workspace:
    """This rank's memory, and where it has mapped that of the others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = DATA.value + 2 * CAPACITY
    if rank == 0:
        for other in range(world):
            (folder / f"memory{other}").write_bytes(bytes(size))
    dist.barrier()
    parts = [
        torch.from_file(str(folder / f"memory{other}"), shared=True, size=size, dtype=torch.uint8)
        for other in range(world)
    ]
    shared = Shared(parts[rank], [p.data_ptr() for p in parts], rank, parts)
    return laid_out(shared, CAPACITY)


def drawn(call: Call, rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(call.rows, call.n, generator=generator).to(call.dtype)


def arguments(call: Call, number: int) -> tuple[list[Tensor], Tensor | None, Norm]:
    """The x of every rank, and what all have in common."""
    xs = [drawn(call, rank, number) for rank in range(dist.get_world_size())]
    residual = drawn(call, 50, number) if call.residual else None
    weight, bias = drawn(call, 51, number)[0], drawn(call, 52, number)[0]
    if call.centred:
        return xs, residual, Norm(weight, bias, None, 1e-5, True)
    return xs, residual, Norm(weight, None, 1.0, 1e-6, False)


def exact(xs: list[Tensor], residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """y and h in fp64."""
    h = sum(x.double() for x in xs) + (0 if residual is None else residual.double())
    weight = norm.weight.double() + (norm.offset or 0.0)
    if norm.centred:
        return F.layer_norm(h, h.shape[-1:], weight, norm.bias.double(), norm.eps), h
    return F.rms_norm(h, h.shape[-1:], weight, norm.eps), h


def observe(folder: Path, calls: list[Call]) -> dict[str, dict]:
    """Of each call, by its words, one after another in the same memory: the distances of y and h
    from fp64, and the results.
    """
    place, found = workspace(folder), {}
    for number, call in enumerate(calls):
        xs, residual, norm = arguments(call, number)
        results = fresh(xs[0], norm, save=True)
        programs = norms.PROGRAMS if number == 0 else PROGRAMS
        with mock.patch.object(norms, "PROGRAMS", programs):
            start(xs[dist.get_rank()], residual, norm, results, place, call.two_shot)
        wanted = exact(xs, residual, norm)
        far = [
            (have.double() - want).abs().max().item()
            for have, want in zip(results[:2], wanted, strict=True)
        ]
        found[str(call)] = {"far": far, "results": results, "scale": wanted[0].abs().max().item()}
    return found
