"""Bounds on the gain of a site, from bytes, operations and launches alone.

A site is refused if nothing can be gained. If nothing was measured, it is taken only if a
prediction that favours Inductor still gains much. Everything is counted in bytes: a launch or an
operation counts as the bytes that the memory of an H200 moves in its time (4.3 TB/s; 700 TFLOP/s of
products in bf16).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import fx

from fusion_backend.capture.aliases import storages, storages_of
from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import hinted, pytree
from fusion_backend.decide.gate import Decision
from fusion_backend.decide.neighbours import library_call
from fusion_backend.ir.argument_views import Viewed

ENOUGH = 1.15  # the predicted gain from which a site is taken without a measurement
LAUNCH = 2e-6 * 4.3e12  # of 2 µs
OPERATION = 4.3e12 / 700e12
OURS = 0.8  # share of the bandwidth that a large kernel of ours reaches at least
LIBRARY = (
    0.9  # share of the speed of the library's products that large products of ours reach at least
)
# A gradient of a gather is added up by atomic operations, which wait for one another where many
# numbers go to one address. Timed for 512 addresses of a relative position bias, where neighbours
# have the same one: on an H200 and an H100 each number took 0.6 ns with 8,192 for an address, 1.1
# ns with 131,072.
ADDRESSES, MANY, ADDITION = 512, 8192, 0.5e-9 * 4.3e12
GATHERS = ("aten::embedding", "aten::index")
# The gradient of an enlarged image is added up by four atomic operations for each number of the
# gradient that it reads. 99 million numbers took about 8 ms on an H200: segmentation_from_pixels
# took 17.9 ms with Inductor's gradient (benchmarks/results/h200-foreign-networks-before.json) and
# 9.8 ms with ours (h200-foreign-networks.json), each after its first compilation.
ENLARGES, SCATTERED = "aten::upsample_bilinear2d", 0.08e-9 * 4.3e12
# cuDNN reaches at most a tenth of the speed of products where a group has so few channels (on an
# H100 32 TFLOP/s with 3 channels and 50 with 16, in bf16).
FEW_CHANNELS, SLOWER = 16, 10.0
ATTENTION = "aten::scaled_dot_product_attention"
SOFTMAX, SCALING = {"aten::softmax", "aten::_softmax"}, {"aten::mul", "aten::div"}
CAP = "aten::tanh"  # of scores: Inductor has no pattern with one
# Matrix products, and the place of the argument whose rows have the length that is summed over.
INNER = {f"aten::{name}": 0 for name in ("linear", "matmul", "mm", "bmm")} | {
    f"aten::{name}": 1 for name in ("addmm", "baddbmm")
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """plain: the least that Inductor needs; ours: the most that we need. calls: library calls
    inside the site.
    """

    plain: float
    ours: float
    calls: int = 0

    @property
    def gain(self) -> float:
        return self.plain / self.ours

    @property
    def hopeless(self) -> bool:
        """Is the site so small that both Inductor and we need a single launch?"""
        return not self.calls and self.plain < 1.5 * LAUNCH


def bound(d: Decision) -> Bound:
    """The bound of the forward, and in training that of the gradient of a gather. The result of a
    library call inside the site is written to memory and read again, and a mask that is computed
    for attention is read, which other calls may share; Inductor may fuse everything else.
    """
    nodes = [*d.match.interior, *d.match.roots]
    calls = [n for n in nodes if library_call(name_of(n))]
    results = [r.meta["val"] for r in d.match.roots]
    given = sum(size(value(a)) for a in d.match.tensors.values())
    between = sum(2 * size(n.meta["val"]) for n in calls if n not in d.match.roots)
    attention = sum(OPERATION * operations(n) for n in calls if name_of(n) == ATTENTION)
    other = sum(multiplying(n) for n in calls if name_of(n) != ATTENTION)
    plain = given + sum(map(size, results)) + between + LAUNCH * max(1, len(calls))
    memory = storages_of([value(a) for a in d.match.tensors.values()])
    masks = [n for n in map(mask_of, calls) if n in d.match.interior and not memory & storages(n)]
    plain += attention + other + sum(size(n.meta["val"]) for n in masks)
    read = [value(a) for a in d.call.args if isinstance(a, (fx.Node, Viewed))]
    written = [v for i, v in enumerate(results) if i not in d.call.unread]
    half = 0.5 if d.call.kwargs.get("is_causal") else 1.0  # of the products, above the diagonal
    ours = sum(map(size, (*read, *written))) / OURS + LAUNCH
    ours += half * attention + other / LIBRARY
    if gathers_alone(d):
        plain += sum(ADDITION * waiting(n) for n in nodes)
        ours += sum(map(size, results)) / OURS + LAUNCH
    if d.backward not in (None, "vjp"):
        enlarged = [n.meta["val"] for n in nodes if name_of(n) == ENLARGES]
        plain += SCATTERED * sum(size(t) / t.element_size() for t in enlarged)
    return Bound(plain, ours, len(calls))


def promises(d: Decision) -> bool:
    """Is the site taken if nothing was measured? Not if Inductor may need less than is counted: it
    replaces attention by hand with one call if the scores are scaled (BERT's, timed at 0.95 and
    0.99 of it on an H100 and an H200). It does not replace T5's, whose scores are not scaled, nor
    Gemma 2's, whose scores are capped. Nor is a site taken that has a matrix product, whose speed
    depends on its shape: with one for which the bound promised a gain of 15 %, `star_relu_mixer`
    took 1.05 times as long on an H100.
    """
    names = {name_of(n) for n in d.match.interior}
    replaced = d.op is not None and bool(names & SOFTMAX and names & SCALING and CAP not in names)
    multiplies = has_product(d) and ATTENTION not in names | {name_of(r) for r in d.match.roots}
    return not replaced and not multiplies and bound(d).gain >= ENOUGH


def has_product(d: Decision) -> bool:
    """Is there a library call inside, such as a matrix product, other than in attention by hand?"""
    names = [name_of(n) for n in (*d.match.interior, *d.match.roots)]
    return any(map(library_call, names)) and not any("softmax" in name for name in names)


def least(nodes: Iterable[fx.Node]) -> float:
    """The least that the library calls of a graph need."""
    total = 0.0
    for n in nodes:
        if is_lowered(n) and library_call(name_of(n)):
            results = pytree.tree_leaves(n.meta.get("val"))
            read = [a.meta.get("val") for a in n.all_input_nodes]
            total += sum(map(size, (*read, *results))) + multiplying(n) + LAUNCH
    return total


def products(n: fx.Node) -> float:
    """The operations of a matrix product, a convolution or attention; 0.0 of another call."""
    name, out = name_of(n), n.meta.get("val")
    if name == ATTENTION:
        return operations(n)
    shapes = [a.meta["val"].shape for a in n.args if isinstance(a, fx.Node)]
    if len(shapes) < 2 or not isinstance(out, torch.Tensor) or hinted(out.shape) is None:
        return 0.0
    if name.startswith("aten::conv_transpose"):  # the weight: [in, out / groups, ...]
        return 2.0 * math.prod(
            map(float, (*(hinted(shapes[0]) or ()), *(hinted(shapes[1][1:]) or ())))
        )
    if name.startswith("aten::conv"):  # the weight: [out, in / groups, ...]
        factors = hinted(shapes[1][1:])
    elif name in INNER and len(shapes[INNER[name]]):
        factors = hinted(shapes[INNER[name]][-1:])
    else:
        factors = None
    return 2.0 * math.prod(map(float, (*hinted(out.shape), *factors))) if factors else 0.0


def multiplying(n: fx.Node) -> float:
    """The bytes that could be moved while the library computes the products of a call."""
    found = OPERATION * products(n)
    if found and name_of(n).startswith("aten::conv") and "transpose" not in name_of(n):
        (channels,) = hinted(n.args[1].meta["val"].shape[1:2])  # of a group
        return found * SLOWER if channels <= FEW_CHANNELS else found
    return found


def gathers_alone(d: Decision) -> bool:
    """Has the site a backward of its own, and can only the table of a gather be what is trained?"""
    floats = [a for a in d.match.tensors.values() if value(a).is_floating_point()]
    return d.backward not in (None, "vjp") and len(floats) == 1


def waiting(n: fx.Node) -> float:
    """The additions of a gather's gradient that wait for others to the same address."""
    if name_of(n) not in GATHERS:
        return 0.0
    shapes = [hinted(t.meta["val"].shape) for t in (n, n.args[0])]
    if None in shapes:
        return 0.0
    added, addresses = (math.prod(map(float, shape)) for shape in shapes)
    return added if addresses <= ADDRESSES and added >= MANY * addresses else 0.0


def mask_of(call: fx.Node) -> fx.Node | None:
    """The mask of a call of attention."""
    if name_of(call) != ATTENTION:
        return None
    return call.args[3] if len(call.args) > 3 else call.kwargs.get("attn_mask")


def operations(attention: fx.Node) -> float:
    """Of both products, of all queries with all keys."""
    q, k, v = (hinted(a.meta["val"].shape) for a in attention.args[:3])
    if q is None or k is None or v is None:
        return 0.0
    return 2.0 * math.prod(map(float, q[:-1])) * k[-2] * (q[-1] + v[-1])


def value(a: fx.Node | Viewed) -> torch.Tensor | None:
    return a.value if isinstance(a, Viewed) else a.meta.get("val")


def size(t: torch.Tensor | None) -> float:
    """The bytes of a tensor's elements, with the sizes of the example; expanded elements count
    once.
    """
    if not isinstance(t, torch.Tensor) or hinted((*t.shape, *t.stride())) is None:
        return 0.0
    elements = 1.0
    for n, s in zip(hinted(t.shape), hinted(t.stride()), strict=True):
        elements *= n if s else 1
    return elements * t.element_size()
