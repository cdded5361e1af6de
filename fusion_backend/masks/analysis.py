"""Finds what a mask keeps: traces the mask operand of an attention back to its sources.

Element (i, j) of the mask, for query i and key j, is read as a symbolic term (element_rules.py,
terms.py), so that dynamic sizes are no obstacle. Conditions that the term does not show, and that
no input decides, are computed on CPU (values.py) if sizes are static. Any other condition is a
vector over the keys, ids that must be equal, or not understood, which makes the mask dense.
"""

from __future__ import annotations

import functools
import math
import re

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.sizes import equals
from fusion_backend.capture.view import View, is_lowered
from fusion_backend.compat.torch import schema_of, statically_known_true
from fusion_backend.ir.argument_views import Viewed
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.operator_families import SAME_VALUE
from fusion_backend.ir.schema_args import argument
from fusion_backend.masks.element_rules import as_dtype
from fusion_backend.masks.reader import Reader, dtype_of
from fusion_backend.masks.spec import Mask, Part, hides
from fusion_backend.masks.terms import (
    Linear,
    Term,
    TooLarge,
    computed,
    conjunction,
    conjuncts,
    is_condition,
    leaves,
    lifted,
    negated,
    parts,
    variables,
)
from fusion_backend.masks.values import CAP, Values
from fusion_backend.reporting.places import location

# Ways to hide parts of a bias: the condition, if any, the value where it holds, and the other
# value.
CHOICES = {"aten::add": ("self", "other"), "aten::where": ("condition", "self", "other")}
CHOICES["aten::masked_fill"] = ("mask", "value", "self")


def source(n: fx.Node) -> str:
    """The names of the graph inputs that a value depends on; without any, the place where it is
    computed.
    """
    found, seen, stack = [], set(), [n]
    while stack and len(found) < 3:
        a = stack.pop()
        if a not in seen:
            seen.add(a)
            stack += reversed(a.all_input_nodes)
            found += (
                [a] if a.op == "placeholder" and isinstance(a.meta.get("val"), torch.Tensor) else []
            )
    names = [str(a.meta.get("input_name", a.name)) for a in found]
    return " and ".join(names) if 0 < len(names) < 3 else location_of(n)


def location_of(n: fx.Node) -> str:
    return location(n).rsplit("/", 1)[-1]


class Masks:
    """The masks of one view, each analysed once."""

    def __init__(
        self, view: View, canon: Canon, writers: dict[int, list[fx.Node]], exact: bool = False
    ):
        self.view, self.canon, self.writers = view, canon, writers
        self.exact = exact  # is only -inf what hides?
        self.known: dict[tuple, Mask] = {}
        self.values = Values(self.unknown, self.resolve)
        self.outer: Masks | None = None  # those of the graph around a body
        self.outer_nodes: dict[fx.Node, fx.Node] = {}  # the body's placeholders -> nodes around it
        for n in view.graph.nodes:
            if n.op == "placeholder" and n in view.owner:
                name = (
                    str(view.owner[n].target).strip("_").removeprefix("L_").removeprefix("kwargs_")
                )
                name = name.rsplit("_modules_", 1)[-1]  # Dynamo spells out the path to a parameter
                n.meta["input_name"] = re.sub("_(parameters|buffers)_", ".", name).removeprefix(
                    "self_"
                )

    def of(self, argument: fx.Node | Viewed) -> Mask:
        steps = argument.steps if isinstance(argument, Viewed) else ()
        node = argument.node if isinstance(argument, Viewed) else argument
        found = self.of_view(node, steps)
        found.trained = node in self.view.requires_grad
        return found

    def of_view(self, node: fx.Node, steps: tuple) -> Mask:
        nots = sum(step == ("not", ()) for step in steps)
        # a mask of three dimensions, with one for the only head, has the same element (i, j)
        with_head = ("unsqueeze", (-3,)) in steps and node.meta["val"].dim() == 3
        key = (node, nots % 2)
        if len(steps) - nots - with_head:
            return view_of(node)
        if key not in self.known:
            try:
                self.known[key] = self.analysed(node, bool(key[1]))
            except TooLarge:
                much = Part(
                    "dense", None, f"of more conditions than are followed, from {source(node)}"
                )
                self.known[key] = Mask(
                    location_of(node), parts=[much], choice=False, exact=self.exact
                )
        of_node = self.known[key]
        return view_of(node) if with_head and of_node.added is not None else of_node

    def connect(self, outer: Masks, outer_nodes: dict[fx.Node, fx.Node]) -> None:
        """Analyse the masks that a body gets as arguments in the graph around it, except those that
        the body may write to.
        """
        self.outer = outer
        self.outer_nodes = {
            p: n for p, n in outer_nodes.items() if not any(s in self.writers for s in storages(p))
        }

    def resolve(self, n: fx.Node) -> fx.Node:
        """What a placeholder of a body is in the graphs around it; any other node as it is."""
        if n.graph is not self.view.graph:
            return self.outer.resolve(n)
        return self.outer.resolve(self.outer_nodes[n]) if n in self.outer_nodes else n

    def unknown(self, n: fx.Node) -> bool:
        """May its value differ from what its operator computes, because it is written to or changed
        by autocast?
        """
        if n.graph is not self.view.graph:
            return self.outer.unknown(n)
        return self.canon.of[n].op == "input" or any(s in self.writers for s in storages(n))

    def analysed(self, node: fx.Node, complement: bool) -> Mask:
        val, found = node.meta["val"], Mask(location_of(self.resolve(node)), exact=self.exact)
        names = (
            [*(f"b{k}" for k in range(val.dim() - 2)), "i", "j"][-val.dim() :] if val.dim() else []
        )
        sizes = dict(zip(names, val.shape, strict=True))
        found.square = val.dim() > 1 and statically_known_true(val.shape[-2] == val.shape[-1])
        reader = Reader(sizes, self.unknown, self.resolve)
        at = tuple(Linear({v: 1}) for v in names)
        t = reader.element(node, at)
        if val.is_floating_point():
            kept, fills = hidden_by(t, val.dtype, self.exact)
            if node in self.view.requires_grad or kept is None:
                kept, fills, found.added = self.separated(node, reader, at, self.exact)
            bias, trained = found.added or node, node in self.view.requires_grad
            about = f"{'a bias with a gradient' if trained else 'additive'}, from {source(bias)}"
            if kept is None:
                found.choice = False
                if self.exact:
                    refused = (
                        hidden_by(t, val.dtype)[1] or self.separated(node, reader, at, False)[1]
                    )
                    about += "".join(
                        f"; {fill:g} is not taken for -inf: fusion.exact_masks is set"
                        for fill in refused
                    )
                found.add("dense", None, about)
                return found
            found.about = about if found.added is not None else ""
            found.fill = fills[0] if len(fills) == 1 else None
            found.taken = tuple(fill for fill in fills if fill > -math.inf)
            t = kept
        self.classify(negated(t) if complement else t, found, reader, sizes)
        return found

    def separated(self, node: fx.Node, reader: Reader, at: tuple, exact: bool) -> tuple:
        """For a bias of which parts are hidden, by addition or by choice: the kept part, the
        numbers that hide, and the bias itself.
        """
        nothing, dtype, trained = (None, (), None), node.meta["val"].dtype, self.view.requires_grad
        gets_gradient = node in trained
        while (
            is_lowered(node)
            and not self.unknown(node)
            and schema_of(node.target).name in SAME_VALUE
        ):
            node = node.args[0]
        if not is_lowered(node) or self.unknown(node) or schema_of(node.target).name not in CHOICES:
            return nothing
        names = CHOICES[schema_of(node.target).name]
        condition = reader.operand(argument(node, names[0]), at) if len(names) == 3 else True
        alpha = argument(node, "alpha")
        if not is_condition(condition) or (alpha is not None and not equals(alpha, 1)):
            return nothing
        x, y = (argument(node, name) for name in names[-2:])
        for bias, other, there in ((x, y, condition), (y, x, negated(condition))):
            if dtype_of(bias) != dtype or other in trained or not 0 < bias.meta["val"].dim() <= 4:
                continue
            if bias in trained and not gets_gradient:  # it was made under no_grad
                continue
            kept, fills = hidden_by(as_dtype(reader.operand(other, at), dtype), dtype, exact)
            if len(names) == 3:
                kept = there if kept is False else None
            if kept is not None:
                return kept, fills, bias
        return nothing

    def classify(self, t, found: Mask, reader: Reader, sizes: dict) -> None:
        """Sort the conditions that must all hold."""
        fixed: list[Term] = []  # no input decides it, and its form is not known
        for c in conjuncts(t):
            made_by = next(
                (reader.made_by[x] for p in parts(c) for x in either_way(p) if x in reader.made_by),
                None,
            )
            proof = location_of(made_by) if made_by is not None else found.where
            if c is True or (
                isinstance(c, Term)
                and c.op == "nonnegative"
                and self.bound(c.args[0], found, proof)
            ):
                continue
            reads = [p for p in parts(c) if isinstance(p, Term) and p.op in ("read", "same")]
            if c is False:
                found.add("dense", False, f"it keeps nothing, at {found.where}")
            elif all(self.values.exactly(p.args[0]) is not None for p in reads):
                fixed.append(c)
            elif c.op == "same" and mirrored(*c.args[1:]):
                found.add("documents", c, f"documents by {source(c.args[0])}")
                found.parts[-1].here = c.args[0].graph is self.view.graph
            elif "j" in variables(c) and "i" not in variables(c):
                found.add(
                    "keys", c, f"padding from {' and '.join({source(p.args[0]): 1 for p in reads})}"
                )
                found.parts[-1].here = all(p.args[0].graph is self.view.graph for p in reads)
            else:
                found.add("dense", c, f"a mask from {source(reads[0].args[0])}")
        if fixed:
            self.band(functools.reduce(conjunction, fixed), found, sizes)

    def bound(self, form: Linear, found: Mask, proof: str) -> bool:
        """i - j >= low, or <= high?"""
        if form.terms == {"i": 1, "j": -1}:
            had, new = found.low, -form.constant
            if had is None or statically_known_true(new >= had):
                found.low = new
            elif not statically_known_true(had >= new):
                return False
        elif form.terms == {"i": -1, "j": 1}:
            had, new = found.high, form.constant
            if had is None or statically_known_true(new <= had):
                found.high = new
            elif not statically_known_true(had <= new):
                return False
        else:
            return False
        found.proofs += [proof] if proof not in found.proofs else []
        return True

    # Conditions that no input decides, computed.

    def band(self, t: Term, found: Mask, sizes: dict) -> None:
        """Compute a condition for all i and j: everything, a band around the diagonal, or something
        else.
        """
        unknown = f"a mask computed at {found.where}"
        used = [sizes[v] for v in variables(t)]
        if not all(
            isinstance(k, int)
            for k in (*used, *(p.constant for p in parts(t) if isinstance(p, Linear)))
        ):
            return found.add("dense", t, f"{unknown}, of dynamic size")
        if math.prod(used) > CAP:
            return found.add("dense", t, f"{unknown}, of more than {CAP:,} elements")
        kept = computed(t, sizes, self.values.of)
        if kept.all():
            return None
        if not {"i", "j"} <= variables(t):
            return found.add("dense", t, unknown)
        while kept.dim() > 2:
            if not bool((kept == kept[:1]).all()):
                return found.add("dense", t, f"{unknown}, which differs between heads or batches")
            kept = kept[0]
        n, m = sizes["i"], sizes["j"]
        apart = torch.arange(n)[:, None] - torch.arange(m)
        inside = apart[kept.expand(n, m)]
        low, high = (int(inside.min()), int(inside.max())) if inside.numel() else (0, -1)
        if not inside.numel() or not bool((((apart >= low) & (apart <= high)) == kept).all()):
            return found.add("dense", t, unknown)
        proof = f"its values at {found.where}"
        if low > 1 - m:
            self.bound(Linear({"i": 1, "j": -1}, -low), found, proof)
        if high < n - 1:
            self.bound(Linear({"i": -1, "j": 1}, high), found, proof)
        return None


def view_of(node: fx.Node) -> Mask:
    boolean, part = dtype_of(node) == torch.bool, Part("dense", None, f"a view of {source(node)}")
    return Mask(location_of(node), parts=[part], choice=boolean)


def either_way(p) -> tuple:
    """A condition and its opposite, because a comparison may have been read as either."""
    return (p, negated(p)) if isinstance(p, Term) and p.op not in ("where", "read") else ()


def hidden_by(t, dtype: torch.dtype, exact: bool = False) -> tuple:
    """The condition under which adding the element keeps a score, and the numbers that hide the
    others.
    """
    kept = None if t is None else lifted(lambda x: kept_by(x, dtype, exact), t)
    return kept, sorted({x for x in leaves(t) if x != 0}) if kept is not None else ()


def kept_by(number, dtype: torch.dtype, exact: bool) -> bool | None:
    """Does adding this number keep a score (0), or hide it? None for anything else."""
    if not isinstance(number, float):
        return None
    return True if number == 0 else False if hides(number, dtype, exact) else None


def mirrored(left: tuple[Linear, ...], right: tuple[Linear, ...]) -> bool:
    """Are the indices the same but for i in the one and j in the other?"""
    swap = {"i": "j", "j": "i"}
    swapped = tuple(
        Linear({swap.get(v, v): k for v, k in f.terms.items()}, f.constant) for f in left
    )
    return swapped == right and left != right
