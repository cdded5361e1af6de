"""One form of a pattern's arguments: examples of them, and the graphs that the reference and its
spellings are traced into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx

from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.view import View
from fusion_backend.compat.torch import FakeTensorMode, pytree, trace
from fusion_backend.match.templates import example_inputs, templates, with_kinds
from fusion_backend.ops.pattern import Pattern

# Values of parameters, of the example arguments, where the pattern may be written otherwise: a part
# of it is left out, each channel is a group.
OTHER_VALUES = {
    "smoothing": lambda arguments: 0.0,
    "groups": lambda arguments: arguments[0].shape[1],
}


class Variant(NamedTuple):
    """How the example arguments are changed before they are traced."""

    batch: bool  # one more dimension in front
    bf16: bool  # floating tensors in bf16
    other: bool  # the parameters of OTHER_VALUES have their values there


class TracedForm:
    """`arguments` and `graph` of one form. `names`: the tensor parameters. `batched`: the arguments
    with a batch dimension; None where the pattern takes none.
    """

    def __init__(self, pattern: Pattern, kinds: tuple[str, ...]):
        self.pattern, self.kinds = pattern, kinds
        generator = torch.Generator().manual_seed(0)

        def make(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

        self.plain = with_kinds(pattern, kinds, example_inputs(pattern, make))
        self.names = [
            p.name for p, kind in zip(pattern.params, kinds, strict=True) if kind == "tensor"
        ]
        self.batched = self.with_batch()
        self.others = {
            i: OTHER_VALUES[p.name](self.plain)
            for i, p in enumerate(pattern.params)
            if p.name in OTHER_VALUES
        }
        lines = {t.line for t in templates(pattern) if t.kinds == kinds}
        self.fns = [fn for fn in pattern.spellings if fn.__code__.co_firstlineno in lines] or [
            pattern.reference
        ]
        self.memo: dict = {}

    def with_batch(self) -> list | None:
        """Arguments with one more dimension, where each result is then that of its slice."""
        first = next(a for a in self.plain if isinstance(a, torch.Tensor))
        # losses and dropout take a batch of one only
        for batch in (lambda a: torch.stack([a, a.flip(-1)]), lambda a: a[None]):
            batched = [
                batch(a) if isinstance(a, torch.Tensor) and a.shape == first.shape else a
                for a in self.plain
            ]
            try:
                if self.first_slice_agrees(batched):
                    return batched
            except Exception:  # the reference does not take such tensors
                continue
        return None

    def first_slice_agrees(self, batched: list) -> bool:
        """Is each result on batched arguments, at index 0, the result on the plain ones?"""
        outs, wanted = map(self.results, (batched, self.plain))
        pairs = list(zip(outs, wanted, strict=True))
        slices = [o[0] if o.dim() > w.dim() else o for o, w in pairs]
        return all(
            torch.allclose(a.double(), b.double()) for a, b in zip(slices, wanted, strict=True)
        )

    def results(self, arguments: list) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return pytree.tree_leaves(self.pattern.reference(*arguments))

    def arguments(self, variant: Variant) -> list:
        arguments = list(self.batched if variant.batch else self.plain)
        for i, number in self.others.items() if variant.other else ():
            arguments[i] = number
        floats = [
            i
            for i, a in enumerate(arguments)
            if isinstance(a, torch.Tensor) and a.is_floating_point()
        ]
        for i in floats if variant.bf16 else ():
            arguments[i] = in_bf16(arguments[i], odd=i == floats[0])
        return arguments

    def graph(self, fn: Callable, variant: Variant) -> fx.Graph | None:
        """The trace of one spelling on these arguments; None where it does not take this form."""
        key = (fn, variant)
        if key not in self.memo:
            self.memo[key] = trace_functional(fn, self.arguments(variant))
        return self.memo[key]


def in_bf16(a: torch.Tensor, odd: bool) -> torch.Tensor:
    """A tensor in bf16 with its last bit set or cleared. No sum of an odd and an even value is 0,
    where gradients would differ by the spelling.
    """
    a = a.to(torch.bfloat16)
    bits = a.view(torch.int16)
    return ((bits | 1) if odd else (bits & ~1)).view(torch.bfloat16)


def trace_functional(fn: Callable, arguments: list) -> fx.Graph | None:
    """The graph of a function above autograd, in-place code made functional; None where it cannot
    be traced on these arguments or needs an attribute.
    """
    mode = FakeTensorMode()
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    with mode:
        fakes = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in tensors]

    def call(*tensors):
        rest = iter(tensors)
        return fn(*(next(rest) if isinstance(a, torch.Tensor) else a for a in arguments))

    try:
        with torch.no_grad():
            gm = trace(call, fakes, mode)
    except Exception:  # a spelling for some forms only
        return None
    functionalize_locals(View(gm, gm.graph, {}, {}, {}, set(), {}, {}))
    gm.graph.eliminate_dead_code()
    complete = all(n.op in ("placeholder", "call_function", "output") for n in gm.graph.nodes)
    return gm.graph if complete else None
