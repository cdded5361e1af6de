"""The scale of each row and what is rounded, for symmetric int8: the formulas of the patterns."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

By = Literal["scale", "reciprocal", "inverse"]


def scaled(x: Tensor, eps: float | None, by: By) -> tuple[Tensor, Tensor]:
    """x in units of the scale, and the scale `[..., 1]`, of rows `[..., n]`.

    by "scale": x / scale of max(abs(x)) / 127, which is at least eps. "reciprocal": x · (1 / scale)
    of the same scale; the inverse is rounded, and gives other integers. "inverse": x · scale of 127
    / max(abs(x)), whose divisor is at least eps. eps None: no lower bound.
    """
    top = x.abs().amax(-1, keepdim=True)
    if by == "inverse":
        scale = 127 / (top if eps is None else top.clamp(min=eps))
        return x * scale, scale
    scale = top / 127
    scale = scale if eps is None else scale.clamp(min=eps)
    return x / scale if by == "scale" else x * scale.reciprocal(), scale
