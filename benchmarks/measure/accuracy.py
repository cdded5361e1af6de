"""How far results are from fp64, and from when on they are wrong."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from benchmarks.records.rows import Errors

CHUNK = 1 << 26  # elements looked at in one go
SAMPLE = 1 << 22  # elements whose percentiles are taken, of larger results
PERCENTILES = (50, 99, 99.9)
# A result may be this many times as far from fp64 as eager's, or this many units in the last place
# of its largest value: a kernel that sums in another order is within; one that forgets a term is
# not.
FACTOR, ULPS = 4, 8
DIFFERING = 1e-3  # share of integers that may round the other way, by one


def pieces(got: Tensor, exact: Tensor):
    """Flat chunks of both in fp64."""
    for g, e in zip(
        got.detach().flatten().split(CHUNK), exact.detach().flatten().split(CHUNK), strict=True
    ):
        if g.numel():
            yield g.double(), e.double()


def errors(got: list[Tensor], exact: list[Tensor]) -> Errors:
    """Distances of all results together; percentiles of a sample of 2^22 each. A zero has no
    relative error.
    """
    absolute, relative, distances = [], [], []
    largest = [0.0, 0.0]
    for g, e in zip(got, exact, strict=True):
        squares = [0.0, 0.0]
        for part, true in pieces(g, e):
            off = (part - true).abs()
            squares = [
                squares[0] + off.square().sum().item(),
                squares[1] + true.square().sum().item(),
            ]
            for i, values in enumerate((off, torch.where(true != 0, off / true.abs(), 0.0))):
                largest[i] = max(largest[i], values.max().item(), key=nan_first)
        if e.is_floating_point():
            distances.append((squares[0] / (squares[1] or 1.0)) ** 0.5)
        else:
            distances.append((g != e).double().mean().item())
        part, true = sample(g), sample(e)
        off = (part - true).abs()
        absolute.append(off)
        relative.append((off / true.abs())[true != 0])
    return Errors(
        percentiles(absolute) | {"max": largest[0]},
        percentiles(relative) | {"max": largest[1]},
        max(distances, key=nan_first),
    )


def nan_first(value: float) -> float:
    """For max(): NaN is the largest."""
    return float("inf") if value != value else value


def sample(t: Tensor) -> Tensor:
    """At most SAMPLE elements in fp64, the same ones of every tensor of a size."""
    flat = t.detach().flatten()
    return (flat[places(flat.numel(), flat.device)] if flat.numel() > SAMPLE else flat).double()


@functools.lru_cache(4)
def places(size: int, device: torch.device) -> Tensor:
    return torch.randint(size, (SAMPLE,), generator=torch.Generator().manual_seed(0)).to(device)


def percentiles(values: list[Tensor]) -> dict[str, float]:
    ordered = torch.cat(values).sort().values  # NaN comes last
    last = ordered.numel() - 1
    return {
        f"{p:g}": ordered[round(last * p / 100)].item() if last >= 0 else 0.0 for p in PERCENTILES
    }


def wrong(got: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> str:
    """Empty when `got` may be called right, given eager's results `plain`; else what is wrong."""
    for i, (g, p, e) in enumerate(zip(got, plain, exact, strict=True)):
        if g.shape != e.shape or g.dtype != p.dtype:
            return f"result {i} is {tuple(g.shape)} {g.dtype}, not {tuple(e.shape)} {p.dtype}"
        if not g.is_floating_point():
            mine, theirs = ((t != e).double().mean().item() for t in (g, p))
            most = (g.long() - e.long()).abs().max().item() if g.numel() else 0
            if mine > max(2 * theirs, DIFFERING) or most > max(
                1, (p.long() - e.long()).abs().max().item()
            ):
                return f"result {i}: {mine:.2%} of the integers differ, by up to {most}"
            continue
        mine = theirs = size = 0.0
        for (part, true), (base, _) in zip(pieces(g, e), pieces(p, e), strict=True):
            if not any(torch.equal(part.isfinite(), t.isfinite()) for t in (true, base)):
                return f"result {i} is not finite where fp64 is, or the other way round"
            off, allowed = (
                (t - true).abs().nan_to_num(0.0, 0.0).max().item() for t in (part, base)
            )
            mine, theirs = max(mine, off), max(theirs, allowed)
            size = max(size, true.abs().nan_to_num(0.0, 0.0).max().item())
        if mine > max(FACTOR * theirs, ULPS * torch.finfo(g.dtype).eps * size):
            return f"result {i} is {mine:.2g} from fp64, eager's {theirs:.2g}"
    return ""
