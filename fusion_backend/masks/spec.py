"""The result of the mask analysis: a band around the diagonal, conditions, and a bias that is
added.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.compat.torch import statically_known_true
from fusion_backend.masks.terms import ZERO, Linear, Term

# a score that is further down than this has no weight; bf16 holds -1e9 as -0.998e9
BEYOND = -0.99e9


def hides(fill: float, dtype: torch.dtype, exact: bool = False) -> bool:
    """Does a score that is replaced by `fill`, or to which `fill` is added, lose all weight against
    any other? Scores are assumed to differ by less than 0.99 · 10⁹, in fp16 by less than 65,000:
    exp of the remaining difference is 0 in fp32. With `exact`, which forbids this assumption, only
    -inf hides.
    """
    if exact:
        return fill == -math.inf
    return fill <= BEYOND or (dtype == torch.float16 and fill <= torch.finfo(dtype).min)


@dataclasses.dataclass
class Part:
    """A condition that depends on data, or that no arithmetic on i and j expresses.

    `kind` is "keys" (a vector over the keys, the same for all queries), "documents" (ids that must
    be equal for query and key) or "dense". `term` is the condition, with i, j and b0, b1, ... for
    the dimensions of the mask; None where the mask is not a choice at all.
    """

    kind: str
    term: object
    text: str
    here: bool = True  # is what it reads in the graph of the attention, or around it?

    def numbers(self, batches, places) -> fx.Node | None:
        """The node that holds the numbers of documents, `[b or 1, m]` or `[m]`. batches: how many
        there are, if the first dimension of the mask is theirs, or None.
        """
        t = self.term
        if self.kind != "documents" or not self.here or not isinstance(t, Term):
            return None
        node, *sides = t.args
        value = node.meta["val"]
        if value.dtype not in (torch.int32, torch.int64) or value.dim() not in (1, 2):
            return None
        (*batch, place), _ = sorted(sides, key=lambda side: "j" in side[-1].terms)
        shape, first = value.shape, batch[0] if batch else ZERO
        one = first == ZERO and (not batch or same(shape[:1], (1,)))
        each = batches is not None and first == Linear({"b0": 1}) and same(shape[:1], (batches,))
        whole = place == Linear({"i": 1}) and same(shape[-1:], (places,))
        return node if whole and (one or each) else None

    def vector(self, batches) -> tuple[fx.Node, str] | None:
        """The node that holds the condition for every batch and key of a mask `[b, h, n, m]`, `[b
        or 1, m]` or with two dimensions of 1 between, and which keys it is true for: "seen" or
        "padding".
        """
        t, opposite = self.term, isinstance(self.term, Term) and self.term.op == "not"
        t = t.args[0] if opposite else t
        read = isinstance(t, Term) and t.op == "read" and len(t.args[1]) in (2, 4)
        if self.kind != "keys" or not self.here or not read:
            return None
        node, (batch, *between, key) = t.args
        shape = node.meta["val"].shape
        whole = (
            key == Linear({"j": 1})
            and all(i == ZERO for i in between)
            and node.meta["val"].dtype == torch.bool
        )
        one = batch == ZERO and same(shape[:1], (1,))
        each = batch == Linear({"b0": 1}) and same(shape[:1], (batches,))
        return (node, "padding" if opposite else "seen") if whole and (one or each) else None


@dataclasses.dataclass
class Mask:
    """What is kept: low <= i - j <= high and all of `parts`.

    Of an additive mask, `choice` says whether it is one; `fill` is the one number that hides,
    `taken` are the finite numbers that were taken for -inf, and `added` is the node that is added
    to the scores where they are kept. `exact`: only -inf hides.
    """

    where: str
    low: object = None
    high: object = None
    square: bool = False  # as many queries as keys
    parts: list[Part] = dataclasses.field(default_factory=list)
    choice: bool = True
    fill: float | None = None
    taken: tuple[float, ...] = ()
    exact: bool = False
    added: fx.Node | None = None
    about: str = ""  # what is added
    trained: bool = False  # has the mask a gradient?
    proofs: list[str] = dataclasses.field(default_factory=list)

    def hides(self, fill: float, dtype: torch.dtype) -> bool:
        return hides(fill, dtype, self.exact)

    def add(self, kind: str, term, text: str) -> None:
        self.parts.append(Part(kind, term, text))

    @property
    def everything(self) -> bool:
        """Is nothing masked at all?"""
        return not self.parts and self.low is None and self.high is None

    @property
    def causal(self) -> bool:
        """Is it the lower triangle of a square? Then every query keeps a key: itself."""
        exactly = self.low is not None and statically_known_true(self.low == 0)
        return not self.parts and self.high is None and exactly and self.square

    def together(self, other: Mask) -> Mask | None:
        """The mask that keeps what both keep; None if a guard would be needed to tell."""
        found = Mask(
            self.where, parts=[*self.parts, *other.parts], proofs=[*self.proofs], exact=self.exact
        )
        found.taken = tuple(sorted({*self.taken, *other.taken}))
        found.square = all(mask.square for mask in (self, other) if mask.low is not None)
        found.proofs += [proof for proof in other.proofs if proof not in found.proofs]
        for name, tighter in (("low", max), ("high", min)):
            bounds = [b for b in (getattr(self, name), getattr(other, name)) if b is not None]
            if (
                len(bounds) == 2
                and not all(isinstance(b, int) for b in bounds)
                and bounds[0] is not bounds[1]
            ):
                return None
            setattr(found, name, tighter(bounds) if bounds else None)
        return found

    @property
    def recovered(self) -> str:
        low, high = self.low, self.high
        if low is None and high is None:
            return "" if self.parts else f"nothing is masked, proven at {self.where}"
        causal = low is not None and statically_known_true(low == 0)
        name = "causal" if causal else "" if low is None else f"causal with offset {-low}"
        name += "" if high is None else f"{' and ' if name else ''}window of {high + 1} keys"
        return f"{name}, proven from {' and '.join(self.proofs) or self.where}"

    def __str__(self):
        texts = (self.recovered, ", ".join(p.text for p in self.parts), self.about)
        return "; ".join(text for text in texts if text)
