"""The scale of each row and what is rounded, for symmetric int8: the formulas of the patterns."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

By = Literal["scale", "reciprocal", "inverse"]
Bound = Literal["scale", "largest"]


def largest(x: Tensor) -> Tensor:
    """max(abs(x)) of each row, `[..., 1]`."""
    return x.abs().amax(-1, keepdim=True)


def scaled(
    x: Tensor, top: Tensor, eps: float | None, by: By, bound: Bound
) -> tuple[Tensor, Tensor]:
    """x `[..., n]` in units of the scale, and the scale `[..., 1]`, of rows whose largest is top.

    by "scale": x / scale of top / 127. "reciprocal": x · (1 / scale) of the same scale; the inverse
    is rounded, and gives other integers. "inverse": x · scale of 127 / top. eps: the lower bound of
    the scale or of the largest, or None. ValueError where there is no such form: an inverse and a
    missing eps have no bound of the scale.
    """
    if bound == "scale" and (eps is None or by == "inverse"):
        raise ValueError(f"eps {eps} is no bound of the scale, by {by!r}")
    if bound == "largest" and eps is not None:
        top = top.clamp(min=eps)
    if by == "inverse":
        scale = 127 / top
        return x * scale, scale
    scale = top / 127
    if bound == "scale":
        scale = scale.clamp(min=eps)
    return x / scale if by == "scale" else x * scale.reciprocal(), scale
