"""A sum over ranks with the residual sum and the RMS norm behind it, on one rank: by the kernels
over symmetric memory, in one shot and in two, and by NCCL with Inductor's kernel.

Every contender is a function that Inductor has compiled, as in a model. `graph` is the time of a
call in a CUDA graph of several, so without the host; `call` that of a call by the host, which
queues several. Both are the longest of all ranks, one sample a turn. x lies in the L2 where it fits
there, as behind a matrix product.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rank_runs.running import started
from benchmarks.rank_runs.timing import CAPTURED, captured, in_turn, longest
from benchmarks.records.rows import Spread
from benchmarks.records.runs import Run
from fusion_backend.compat.sums_over_ranks import summed
from fusion_backend.kernels.collective import operators
from fusion_backend.kernels.collective.reach import out_of_reach, unsupported

EPS = 1e-6
PLAIN, AGAIN = "nccl", "nccl-again"
SHOTS = {"one-shot": False, "two-shot": True}
# A result of ours may be as far from fp64 as twice what NCCL's and Inductor's is.
TOLERATED = 2.0


class Sums(NamedTuple):
    """What every rank is given. Rank 0 adds a row for each case to `run`, and saves it as `out`."""

    cases: list[tuple[int, int]]  # rows, columns
    dtype: torch.dtype
    rounds: int
    ranks: int
    port: int
    device: str
    run: Run
    out: Path


class Case(NamedTuple):
    x: Tensor
    residual: Tensor
    weight: Tensor
    group: str


def plain(case: Case) -> tuple[Tensor, Tensor]:
    h = summed(case.x, case.group) + case.residual
    return F.rms_norm(h, h.shape[-1:], case.weight, EPS), h


def ours(case: Case) -> tuple[Tensor, Tensor]:
    given = (case.x, case.residual, case.weight, None, 0.0, EPS, False, False, case.group)
    return operators.norm_of_sum(*given)[:2]


def stand_in(case: Case) -> tuple[Tensor, Tensor]:
    """In place of the kernels, where there is no GPU."""
    return plain(case)


def contenders(device: torch.device) -> dict[str, Callable]:
    """Each compiled for itself."""
    mine = ours if device.type == "cuda" else stand_in
    torch.compiler.reset()
    nccl = torch.compile(plain, dynamic=False)
    found = {PLAIN: nccl}
    for name, two_shot in SHOTS.items():
        compiled = torch.compile(mine, dynamic=False)
        found[name] = functools.partial(with_shots, two_shot, compiled)
    return found | {AGAIN: nccl}


def with_shots(two_shot: bool, compiled: Callable, case: Case):
    with mock.patch.object(operators, "takes_two_shots", lambda world, size: two_shot):
        return compiled(case)


def work(rank: int, mine: Sums) -> None:
    warnings.simplefilter("ignore")
    with started(rank, mine.ranks, mine.port, mine.device) as device:
        group = dist.group.WORLD.group_name
        if device.type == "cuda" and (why := unsupported(group) or out_of_reach(group)):
            raise SystemExit(f"no kernel can sum over these ranks: {why}")
        for rows, n in mine.cases:
            row = row_of(rows, n, mine, device, group)
            if rank == 0:
                mine.run.rows.append(row)
                mine.run.save(mine.out)
                print(line(row), flush=True)


@torch.no_grad()
def row_of(rows: int, n: int, mine: Sums, device: torch.device, group: str) -> dict:
    """A row, the same on every rank."""
    case = drawn(rows, n, mine.dtype, device, group)
    calls = {name: functools.partial(fn, case) for name, fn in contenders(device).items()}
    exact = in_fp64(case)
    found = {}
    for name, call in calls.items():
        results = call()
        far = [distance(have, want) for have, want in zip(results, exact, strict=True)]
        found[name] = {"name": name, "far": longest(far, device), "same": same_bits(results)}
    del exact
    graphs = {name: captured(call, device) for name, call in calls.items()}
    if all(graphs.values()):
        for name, times in in_turn(graphs, mine.rounds, CAPTURED, device).items():
            found[name]["graph"] = dataclasses.asdict(Spread.of(times))
    for name, times in in_turn(calls, mine.rounds, 1, device).items():
        found[name]["call"] = dataclasses.asdict(Spread.of(times))
    size = case.x.numel() * case.x.element_size()
    about = {"world": mine.ranks, "rows": rows, "n": n, "bytes": size}
    about["dtype"] = str(mine.dtype).removeprefix("torch.")
    return {**about, "contenders": [*found.values()]}


def drawn(rows: int, n: int, dtype: torch.dtype, device: torch.device, group: str) -> Case:
    """x differs from rank to rank; the rest is the same on all."""
    own = torch.Generator(device).manual_seed(1 + dist.get_rank())
    x = torch.randn(rows, n, device=device, generator=own).to(dtype)
    common = torch.Generator(device).manual_seed(0)
    residual = torch.randn(rows, n, device=device, generator=common).to(dtype)
    weight = torch.randn(n, device=device, generator=common).to(dtype)
    return Case(x, residual, weight, group)


def in_fp64(case: Case) -> tuple[Tensor, Tensor]:
    parts = [torch.empty_like(case.x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, case.x)
    h = case.residual.double()
    for part in parts:
        h += part
    return F.rms_norm(h, h.shape[-1:], case.weight.double(), EPS), h


def distance(have: Tensor, want: Tensor) -> float:
    """The mean distance from fp64, of the mean size."""
    return ((have.double() - want).abs().mean() / want.abs().mean()).item()


def same_bits(results: tuple[Tensor, ...]) -> bool:
    """Has every rank the results of rank 0?"""
    differ = []
    for mine in results:
        first = mine.clone()
        dist.broadcast(first, 0)
        differ.append(float(not torch.equal(first, mine)))
    return not any(longest(differ, results[0].device))


# What the rows say.


def median(row: dict, name: str, how: str) -> float | None:
    one = next(c for c in row["contenders"] if c["name"] == name)
    return one[how]["median"] if how in one else None


def wrong(row: dict) -> list[str]:
    """What is wrong in a row, in sentences."""
    by_name = {c["name"]: c for c in row["contenders"]}
    told = []
    for name in SHOTS:
        for what, far, allowed in zip(
            "yh", by_name[name]["far"], by_name[PLAIN]["far"], strict=True
        ):
            if far is None or not far <= TOLERATED * (allowed or 0.0):  # None: it was NaN
                told.append(f"{title(row)}: {what} by {name} is {far} from fp64: {allowed}")
        if not by_name[name]["same"]:
            told.append(f"{title(row)}: ranks have other bits by {name}")
    return told


def title(row: dict) -> str:
    return f"{row['world']} ranks, {row['rows']} x {row['n']} {row['dtype']}"


def line(row: dict) -> str:
    """Microseconds by each contender in a CUDA graph, and by the host."""
    parts = []
    for how in ("graph", "call"):
        times = {c["name"]: median(row, c["name"], how) for c in row["contenders"]}
        if None not in times.values():
            shown = ", ".join(f"{name} {ms * 1e3:.1f}" for name, ms in times.items())
            parts.append(f"{how} us: {shown}")
    return f"{title(row)}, {row['bytes']} bytes: {'; '.join(parts)}"
