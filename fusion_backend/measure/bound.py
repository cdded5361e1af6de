"""What can be gained at a site at best and for certain, from bytes, operations and launches alone.

It says no where nothing can be gained, and where nothing was measured it says yes if even a
pessimistic prediction gains much. Times are in bytes: of one launch and of one product and sum what
the memory of an H200 (4.3 TB/s, benchmarks/results) moves meanwhile.
"""

from __future__ import annotations

import dataclasses

import torch

from fusion_backend.capture.view import name_of
from fusion_backend.compat.torch import hinted
from fusion_backend.decide.gate import Decision
from fusion_backend.decide.neighbours import library_call
from fusion_backend.ir.argument_views import Viewed

ENOUGH = 1.15  # the predicted gain from which a site is taken without a measurement
LAUNCH = 2e-6 * 4.3e12  # bytes moved during a launch of 2 µs
OURS = 0.8  # of the bandwidth that a kernel of ours reaches at least, where it is large


@dataclasses.dataclass(frozen=True)
class Bound:
    """plain: what Inductor needs at least; ours: what we need at most. In bytes."""

    plain: float
    ours: float
    calls: int = 0  # of libraries, inside the site

    @property
    def gain(self) -> float:
        return self.plain / self.ours

    @property
    def hopeless(self) -> bool:
        """Is the site so small that it is one launch, whoever computes it?"""
        return not self.calls and self.plain < 1.5 * LAUNCH


def bound(d: Decision) -> Bound:
    """Of the forward. What library calls inside the site compute goes to memory and comes back;
    all else Inductor may fuse.
    """
    read = [value(a) for a in d.call.args if isinstance(a, Viewed) or hasattr(a, "meta")]
    roots = enumerate(d.match.roots)
    written = [r.meta["val"] for i, r in roots if i not in d.call.unread]
    moved = sum(map(size, (*read, *written)))
    calls = [n for n in (*d.match.interior, *d.match.roots) if library_call(name_of(n))]
    between = sum(2 * size(n.meta["val"]) for n in calls if n not in d.match.roots)
    given = sum(size(value(a)) for a in d.match.tensors.values())
    plain = given + sum(map(size, written)) + between + LAUNCH * max(1, len(calls))
    return Bound(plain, moved / OURS + LAUNCH, len(calls))


def value(a) -> torch.Tensor | None:
    return a.value if isinstance(a, Viewed) else a.meta.get("val")


def size(t: torch.Tensor | None) -> float:
    """The bytes of a tensor's elements, each counted once, in the example."""
    if not isinstance(t, torch.Tensor) or hinted((*t.shape, *t.stride())) is None:
        return 0.0
    elements = 1.0
    for n, s in zip(hinted(t.shape), hinted(t.stride()), strict=True):
        elements *= n if s else 1
    return elements * t.element_size()
