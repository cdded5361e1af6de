"""The operators around a site: those that compute its arguments, and those that read its results.

A pattern's `neighbours` function gets their ATen names, so that it can decline a site if Inductor
would make one kernel of the site and its neighbours, or would choose their layout.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
from torch import fx

from fusion_backend.capture.view import embedded, is_lowered, name_of
from fusion_backend.compat.torch import schema_of, statically_known_true
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.expr import in_library, peel
from fusion_backend.match.matcher import Match
from fusion_backend.reporting.places import location
from fusion_backend.reporting.reject import BackwardOnly, Reject, Settled

NEARBY = 32  # operators to look at, on each side
LIBRARY = {
    f"aten::{name}" for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")
}
LIBRARY |= {"aten::scaled_dot_product_attention"}
# Elementwise, though torch does not say so.
POINTWISE = {
    f"aten::{name}" for name in ("_to_copy", "clone", "dropout", "reshape", "flatten", "batch_norm")
}

# Each result element needs many elements of the input.
REDUCTIONS = """
    sum mean prod var std var_mean std_mean norm linalg_vector_norm logsumexp softmax log_softmax
    max min amax amin aminmax argmax argmin any all cumsum cumprod topk sort median
    layer_norm native_layer_norm group_norm native_group_norm instance_norm rms_norm
"""
REDUCTIONS = {f"aten::{name}" for name in REDUCTIONS.split()}

FUSES_GRADIENT = Reject("in training Inductor fuses its gradient too, and chooses what to save")


def names(nodes: Iterable[fx.Node]) -> list[str]:
    """The name of each operator once, without "aten::"."""
    return list(dict.fromkeys(name_of(n).removeprefix("aten::") for n in nodes))


def library_call(name: str) -> bool:
    """A call that Inductor fuses with nothing."""
    return name in LIBRARY or name.startswith("aten::conv")


def reduces(name: str) -> bool:
    return name in REDUCTIONS or "pool" in name


def elementwise(n: fx.Node) -> bool:
    """Does each element of the result need one element of an argument? Views too."""
    if not is_lowered(n):
        return False
    return (
        is_view(n) or torch.Tag.pointwise in n.target.tags or schema_of(n.target).name in POINTWISE
    )


def is_view(n: fx.Node) -> bool:
    """Is the result, or each of them, in the memory of the first argument?"""
    return is_lowered(n) and any(r.alias_info is not None for r in schema_of(n.target).returns)


def multiplies(n: fx.Node, canon: Canon) -> bool:
    """Is it a product of two matrices that are no weights of a linear layer?"""
    return is_lowered(n) and peel(canon.of[n]).op == "matmul"


def source_of(n: fx.Node) -> fx.Node:
    """The value that a node is a view, or a part, of."""
    while is_view(n) or n.target is operator.getitem:
        n = n.all_input_nodes[0]
    return n


class Neighbours:
    """The neighbours of one match, the nearest first. unread: the places of results that nobody
    reads. lies_otherwise: Inductor will lay out images channels-last that are contiguous here.
    """

    def __init__(self, match: Match, unread: tuple[int, ...], lies_otherwise: bool):
        self.roots, self.unread, self.lies_otherwise = match.roots, unread, lies_otherwise
        self.inside = {*match.interior, *match.roots}
        self.arguments = [getattr(v, "node", v) for v in match.tensors.values()]

    def users(self, n: fx.Node) -> list[fx.Node]:
        return [u for u in n.users if u not in self.inside]

    @functools.cached_property
    def making(self) -> list[fx.Node]:
        """The operators that the arguments are computed from, back to the library calls before the
        site.
        """
        found: dict[fx.Node, None] = {}
        pending = list(self.arguments)
        while pending and len(found) < NEARBY:
            n = pending.pop(0)
            if n not in found and n.op == "call_function":
                found[n] = None
                pending += () if library_call(name_of(n)) else n.all_input_nodes
        return list(found)

    @functools.cached_property
    def reading(self) -> list[fx.Node]:
        """The operators that read the results, also through elementwise operators that have a
        single reader. Inductor writes a value with several readers to memory.
        """
        found: dict[fx.Node, None] = {}
        pending = [u for r in self.roots for u in self.users(r)]
        while pending and len(found) < NEARBY:
            n = pending.pop(0)
            if n not in found and n.op == "call_function":
                found[n] = None
                pending += self.users(n) if elementwise(n) and len(n.users) == 1 else ()
        return list(found)

    @property
    def makers(self) -> list[str]:
        return names(self.making)

    @property
    def readers(self) -> list[str]:
        return names(self.reading)

    @property
    def reductions(self) -> list[str]:
        """The readers that need many elements for one of theirs."""
        return names(n for n in self.reading if not elementwise(n) and reduces(name_of(n)))

    @property
    def convolutions(self) -> list[str]:
        """The makers and readers whose layout Inductor chooses."""
        return names(
            n for n in (*self.making, *self.reading) if name_of(n).startswith("aten::conv")
        )

    @property
    def laid_out_by(self) -> str | None:
        """The convolution before the site because of which its images, contiguous in the graph,
        will be channels-last; None if there is none.
        """
        return next((c for c in self.laid_out_beside if c in self.makers), None)

    @property
    def laid_out_beside(self) -> list[str]:
        """The convolutions before and behind the site that Inductor computes channels-last, though
        the site's images are contiguous in the graph.
        """
        values = [n.meta["val"] for n in self.arguments if isinstance(n, fx.Node)]
        if not self.lies_otherwise or not all(map(torch.Tensor.is_contiguous, values)):
            return []
        return self.convolutions

    def beside_extension(self, canon: Canon, training: bool) -> Settled | None:
        """Why a site that was extended is not all that one kernel of Inductor's computes; None if
        it is. The code next to it is seen through views.
        """
        sources = [*map(source_of, self.arguments)]
        for a, source in zip(self.arguments, sources, strict=True):
            sizes = (n.meta["val"].numel() for n in (a, source))
            if training and not statically_known_true(operator.eq(*sizes)):
                where = location(source)
                return Settled(f"Inductor writes the gradients of all parts of {where} at once")
        readers = [u for r in self.roots for u in self.users(r)]
        for u in readers:
            readers += self.users(u) if is_view(u) else ()
        for n in (*sources, *(u for u in readers if not is_view(u))):
            if is_lowered(n) and not in_library(peel(canon.of[n]).op) and canon.of[n].op != "input":
                return Settled(f"Inductor fuses it with more code, at {location(n)}")
        sides = [any(multiplies(n, canon) for n in side) for side in (sources, readers)]
        if all(sides):
            return Settled("Inductor may compute it in attention: matrix products are around it")
        return None

    def fusable(self, canon: Canon, inductor: str, training: bool) -> Reject | None:
        """A kernel of ours stands alone: next to code that Inductor would fuse with its own
        (`inductor` is what it makes of the op), it moves more bytes.
        """
        if training and inductor == "pointwise":
            return FUSES_GRADIENT
        refusal = BackwardOnly if inductor == "reduction" else Reject
        for n in (*self.arguments, *(u for r in self.roots for u in self.users(r))):
            if not is_lowered(n) or in_library(peel(canon.of[n]).op) or canon.of[n].op == "input":
                continue
            if inductor == "reduction" and training:
                tables = (embedded(a, self.inside) for a in self.arguments)
                if table := next(filter(None, tables), None):
                    where = location(table)
                    return Reject(
                        f"Inductor fuses its gradient with that of the embedding at {where}"
                    )
            return refusal(f"Inductor fuses it with its neighbour at {location(n)}")
        return None
