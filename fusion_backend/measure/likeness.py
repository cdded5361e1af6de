"""Sites that are equal in all but their neighbours, of which one group is measured for all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fusion_backend.compat.torch import pytree
from fusion_backend.decide.gate import Decision
from fusion_backend.ir.argument_views import Viewed
from fusion_backend.measure.bound import value

LINE = re.compile(r"\S+:\d+")  # the source line that a reason names
Group = tuple[tuple, ...]  # the likenesses of the sites of one region


def likeness(d: Decision) -> tuple:
    """A key that is equal for sites that differ only in their neighbours: the pattern, the
    providers, the arguments of the replacement (tensors by dtype, shape and strides), and the
    reason why the tables refuse it, if they do, without the source line in it.
    """
    given = pytree.tree_leaves((d.call.args, d.call.kwargs))
    tensors = (value(a) if isinstance(a, (fx.Node, Viewed)) else a for a in given)
    words = (
        f"{t.dtype} {tuple(t.shape)} {t.stride()}" if isinstance(t, torch.Tensor) else repr(t)
        for t in tensors
    )
    doubt = "" if d.doubt is None else LINE.sub("", d.doubt.reason)
    return d.match.pattern.name, d.providers, d.call.unread, doubt, *words


def group(sites: Iterable[Decision]) -> Group:
    return tuple(map(likeness, sites))


def alike(sites: Sequence[Decision], known: Iterable[Group]) -> dict[int, tuple[Group, int]]:
    """Index of a site -> the group that has one like it, and the index there. A group counts only
    with all of its sites, which were measured together; larger groups come first. The order of
    `known` makes no difference.
    """
    left: dict[tuple, list[int]] = {}
    for i, likeness_of_one in enumerate(group(sites)):
        left.setdefault(likeness_of_one, []).append(i)
    found: dict[int, tuple[Group, int]] = {}
    for one in sorted(known, key=lambda g: (-len(g), repr(g))):
        needed = Counter(one)
        while all(len(left.get(name, ())) >= count for name, count in needed.items()):
            found |= {left[name].pop(0): (one, place) for place, name in enumerate(one)}
    return found
