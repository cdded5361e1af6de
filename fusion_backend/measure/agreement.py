"""Do two compilations of one graph compute the same, but for rounding?"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fusion_backend.compat.torch import pytree

PART = 1 << 24  # elements that are compared at a time, in fp64
# The largest error exceeds the typical error by a larger factor than the largest value does.
OUTLIER = 4.0
# Our error may be this many times that of another order of the same operators.
FACTOR = 4.0


class Distance(NamedTuple):
    """The distance of two tensors: the norm of their difference and its largest element, and the
    same of the second tensor.
    """

    norm: float
    largest: float
    norm_of: float = 0.0
    largest_of: float = 0.0

    def within(self, part: float) -> bool:
        """Is the difference at most this part of the second tensor?"""
        return self.norm <= part * self.norm_of and self.largest <= OUTLIER * part * self.largest_of


class Value(NamedTuple):
    """A value that a run computes, and its name in a sentence. None is a gradient of zeros."""

    name: str
    value: Tensor | None


def disagreement(
    ours: list[Value], plain: list[Value], eager: Callable[[], list[Value]], eps: float
) -> str:
    """What differs by more than rounding explains, in words; "" if nothing does.

    eps: of the coarsest dtype that the graph computes in. Half of its digits may be lost: a
    difference of at most √eps of the tensor passes. A larger one passes if `eager`, the same graph
    run operator by operator, is as far from plain Inductor as well: for example, if a gradient of
    zeros is nothing but rounding. NaN must be in the same places.
    """
    if [v.name for v in ours] != [v.name for v in plain]:
        return "it returns other values"
    doubtful = []
    for i, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        if wrong := unlike(mine.value, theirs.value):
            return f"{mine.name} is {wrong}"
        far = distance(mine.value, theirs.value)
        if not far.within(eps**0.5):
            doubtful.append((i, far))
    if not doubtful:
        return ""
    try:
        again = eager()
    except Exception as error:
        i, far = doubtful[0]
        why = f"{type(error).__name__} when it runs operator by operator"
        return f"{said(plain[i], far)}, and nothing tells how much of that is rounding: {why}"
    for i, far in doubtful:
        rounding = distance(again[i].value, plain[i].value)
        if not (far.norm <= FACTOR * rounding.norm and far.largest <= FACTOR * rounding.largest):
            return said(plain[i], far)
    return ""


def said(v: Value, far: Distance) -> str:
    part = far.norm / far.norm_of if far.norm_of else float("inf")
    return f"{v.name} differs by {part:.2g} of its norm"


def unlike(mine: Tensor | None, theirs: Tensor | None) -> str:
    """How shape or dtype differ, in words."""
    if mine is None or theirs is None or (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
        return ""
    shapes = tuple(mine.shape), tuple(theirs.shape)
    return f"{mine.dtype} {shapes[0]} instead of {theirs.dtype} {shapes[1]}"


def distance(mine: Tensor | None, theirs: Tensor | None) -> Distance:
    """NaN in only one of them counts as an infinite difference, equal infinities as none."""
    if mine is None and theirs is None:
        return Distance(0.0, 0.0)
    mine = torch.zeros_like(theirs) if mine is None else mine
    theirs = torch.zeros_like(mine) if theirs is None else theirs
    if not mine.numel():
        return Distance(0.0, 0.0)
    squares, largest = [], []
    for a, b in zip(parts(mine), parts(theirs), strict=True):
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, 0.0, a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        size = torch.where(b.isfinite(), b, 0.0).abs()
        squares.append(torch.stack([apart.square().sum(), size.square().sum()]))
        largest.append(torch.stack([apart.max(), size.max()]))
    norms, most = torch.stack(squares).sum(0).sqrt(), torch.stack(largest).amax(0)
    norm, norm_of, far, far_of = torch.cat([norms, most]).tolist()
    return Distance(norm, far, norm_of, far_of)


def parts(t: Tensor) -> tuple[Tensor, ...]:
    real = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return real.reshape(-1).split(PART)


def coarsest(gm: fx.GraphModule) -> float:
    """The largest eps of the floating dtypes that a Dynamo graph and its bodies compute in."""
    found = [torch.finfo(torch.float64).eps]
    for body in gm.modules():
        for n in body.graph.nodes if isinstance(body, fx.GraphModule) else ():
            for v in pytree.tree_leaves(n.meta.get("example_value")):
                if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()):
                    found.append(torch.finfo(v.dtype).eps)
    return max(found)
