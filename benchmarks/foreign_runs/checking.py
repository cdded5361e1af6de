"""How far a contender's results are from exact ones, and when ours are worse than Inductor's."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from benchmarks.measure.accuracy import DIFFERING, pieces

FACTOR = 2  # of Inductor's own distance
# eps of the dtype that are allowed besides: fp32 sums of millions of terms, in another order, are
# that many apart, and a loss is one of them; bf16 results are rounded once.
SLACK = {torch.float32: 16, torch.bfloat16: 0.5}
# A gradient that is this much smaller than the largest is zero but for rounding, which is no
# measure: that of a bias in front of a batch norm, for example.
NOTHING = 1e-4


@dataclasses.dataclass
class Distance:
    """Of one result: Euclidean norms of got - exact and of exact; of integers the share that
    differs, and 1. unlike: how it is another kind of result altogether.
    """

    off: float
    size: float
    unlike: str = ""
    integer: bool = False

    @property
    def relative(self) -> float:
        return self.off / (self.size or 1.0)


def distance(got: Tensor | None, exact: Tensor | None, dtype: torch.dtype | None) -> Distance:
    """Both may be missing: the gradient of what nothing depends on. dtype: that of eager's."""
    if got is None or exact is None:
        return Distance(0.0, 0.0, "" if got is exact else "one of two gradients is missing")
    if got.shape != exact.shape or got.dtype != dtype:
        return Distance(
            0.0, 0.0, f"{tuple(got.shape)} {got.dtype}, not {tuple(exact.shape)} {dtype}"
        )
    if not got.is_floating_point():
        share = (got != exact).double().mean().item() if got.numel() else 0.0
        return Distance(share, 1.0, integer=True)
    off = size = 0.0
    for part, true in pieces(got, exact):
        if not torch.equal(part.isfinite(), true.isfinite()):
            return Distance(0.0, 0.0, "not finite where the exact result is")
        part, true = part.nan_to_num(0.0, 0.0, 0.0), true.nan_to_num(0.0, 0.0, 0.0)
        off += (part - true).square().sum().item()
        size += true.square().sum().item()
    return Distance(off**0.5, size**0.5)


def worse(mine: list[Distance], other: list[Distance], dtype: torch.dtype, outputs: int) -> str:
    """What is worse in `mine` than in `other`, of one list of results, the first of which are
    outputs, the rest gradients; "" for nothing.
    """
    for i, (m, o) in enumerate(zip(mine, other, strict=True)):
        alike = other[:outputs] if i < outputs else other[outputs:]
        what = f"output {i}" if i < outputs else f"gradient {i - outputs}"
        if m.unlike != o.unlike:
            return f"{what}: {m.unlike or 'fine'}; Inductor's: {o.unlike or 'fine'}"
        least = NOTHING * max(d.size for d in alike)
        slack = SLACK[dtype] * torch.finfo(dtype).eps * max(m.size, least)
        slack = DIFFERING if m.integer else slack
        if not m.off <= FACTOR * o.off + slack:
            scale = max(m.size, least) or 1.0
            return f"{what} is {m.off / scale:.1e} off, Inductor's {o.off / scale:.1e}"
    return ""
