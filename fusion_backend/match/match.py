"""The results of matching: a match, or how far matching came and why it failed."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import fx

from fusion_backend.ir.argument_views import Viewed
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import FREE, peel
from fusion_backend.match.templates import Template
from fusion_backend.ops.rule import Rule


@dataclasses.dataclass
class Match:
    """An occurrence of a pattern in a view."""

    pattern: Rule
    template: Template
    roots: list[fx.Node]  # the nodes whose values the pattern computes
    arguments: dict[str, object]  # argument -> node, Viewed, number or None
    interior: list[fx.Node]  # nodes between arguments and roots, in graph order

    @functools.cached_property
    def tensors(self) -> dict[str, fx.Node | Viewed]:
        return {k: v for k, v in self.arguments.items() if isinstance(v, (fx.Node, Viewed))}

    @property
    def nodes_read(self) -> list[fx.Node]:
        """The nodes that the arguments are, or are views of."""
        return [v.node if isinstance(v, Viewed) else v for v in self.tensors.values()]

    def bytes_inside(self, canon: Canon) -> int | None:
        """The bytes that eager writes and reads again for values inside the match; None if a size
        is symbolic.
        """
        total = 0
        for n in self.interior:
            v = n.meta["val"]
            if (
                not isinstance(v, torch.Tensor)
                or canon.of[n].op in FREE
                or peel(canon.of[n]).op in FREE
            ):
                continue
            if not isinstance(v.numel(), int):
                return None
            total += 2 * v.numel() * v.element_size()
        return total


@dataclasses.dataclass
class Mismatch:
    """Where matching stopped: `matched` of `size` operators agreed, then `reason` at `node`."""

    pattern: Rule
    root: fx.Node
    matched: int
    size: int
    node: fx.Node
    reason: str
    gave_up: bool = False  # the rest was not looked at

    @property
    def rank(self) -> tuple[bool, int, int]:
        """If a node has several misses, the one of the highest rank is reported: among forms of
        which equally many operators agree, the smaller one.
        """
        return self.gave_up, self.matched, -self.size
