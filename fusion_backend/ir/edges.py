"""The gradient of operators with a bound where their argument is exactly that bound.

There relu and hardtanh have none, maximum and minimum halve it, and clamp passes it on, except in
newer releases of torch. It matters where many values are exactly a bound: all results of a layer
are zero if its weights begin as zeros, and in 16 bits many are exactly six.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.bounds import clamp_passes_at_bounds
from fusion_backend.ir.expr import Expr

STRICT = {f"aten::{name}" for name in ("relu", "relu6", "hardtanh", "hardswish", "hardsigmoid")}
CLAMPS = {f"aten::{name}" for name in ("clamp", "clamp_min", "clamp_max")}
HALVING = {f"aten::{name}" for name in ("maximum", "minimum", "max", "min")}  # of two tensors
WITH_BOUNDS = STRICT | CLAMPS
BOUNDS = {"maximum", "minimum"}  # the expressions of all of these


def is_strict(n: fx.Node) -> bool:
    """Has it no gradient at a bound?"""
    return name_of(n) in STRICT or (name_of(n) in CLAMPS and not clamp_passes_at_bounds())


def bounded(nodes: Iterable[fx.Node], of: Mapping[fx.Node, Expr]) -> list[fx.Node]:
    """Those of the nodes that have a bound."""
    found = []
    for n in filter(is_lowered, nodes):
        name = name_of(n)
        of_two = name in HALVING and n in of and of[n].op in BOUNDS
        if name in WITH_BOUNDS or of_two:
            found.append(n)
    return found
