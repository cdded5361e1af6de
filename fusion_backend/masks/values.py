"""The values of nodes that no input decides, computed on CPU while the graph is compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import pytree, schema_of
from fusion_backend.ir.operator_families import aten
from fusion_backend.ir.schema_args import operator_name
from fusion_backend.masks import element_rules, index_rules
from fusion_backend.masks.reader import ELEMENTS

OUR_RULES = (element_rules, index_rules)  # importing them fills the table

CAP = 1 << 25  # elements that are computed at compile time: 4096 x 4096 and more
# Operators besides those with a rule. They run on integers and booleans only, where all devices
# agree.
EXACT = aten("cumprod", "sum", "any", "all", "floor_divide", "remainder", "fmod", "div")
EXACT += aten("minimum", "maximum", "clamp", "cat", "stack", "roll", "repeat_interleave", "eye")
EXACT += aten("gather", "index_select", "scatter", "index_put", "bincount")
EXACT += aten("tril_indices", "triu_indices")
ROUNDING = aten("add", "sub", "rsub", "mul", "arange", "cumsum")


class Values:
    """The values of one view's nodes. `unknown(node)` says for which nodes the operator does not
    determine the value, `resolve(node)` of which node a node is another name.
    """

    def __init__(self, unknown: Callable, resolve: Callable):
        self.unknown, self.resolve = unknown, resolve
        self.known: dict[fx.Node, torch.Tensor | None] = {}
        # nodes whose value another device may round differently
        self.inexact: set[fx.Node] = set()

    def of(self, n: fx.Node) -> torch.Tensor | None:
        """The tensor that a node computes, unless an input, memory that is written to or a rounding
        decides it.
        """
        pending = [self.resolve(n)]
        while pending:
            m = pending[-1]
            if m in self.known or not self.repeatable(m):
                self.known.setdefault(m, None)
                pending.pop()
                continue
            operands = [
                self.resolve(a)
                for a in m.all_input_nodes
                if isinstance(a.meta.get("val"), torch.Tensor)
            ]
            first = next((a for a in operands if self.known.get(a) is None), None)
            if first is None:
                self.known[m] = self.run(m)
            elif first in self.known:  # an input decides it, and so everything computed from it
                self.known[m] = None
            else:
                pending.append(first)
        return self.known[self.resolve(n)]

    def exactly(self, n: fx.Node) -> torch.Tensor | None:
        """The value, if every device computes the same."""
        found = self.of(n)
        return None if self.resolve(n) in self.inexact else found

    def repeatable(self, n: fx.Node) -> bool:
        val = n.meta.get("val")
        if not is_lowered(n) or not isinstance(val, torch.Tensor) or self.unknown(n):
            return False
        name = operator_name(n.target)
        exact = name in ELEMENTS or (name in EXACT and not val.is_floating_point())
        small = all(isinstance(size, int) for size in val.shape) and val.numel() <= CAP
        return exact and small and not schema_of(n.target).is_mutable

    def run(self, n: fx.Node) -> torch.Tensor | None:
        def real(a):
            if isinstance(a, fx.Node):
                tensor = isinstance(a.meta.get("val"), torch.Tensor)
                value = self.known[self.resolve(a)] if tensor else a.meta.get("val")
                if value is None or (not tensor and not isinstance(value, (int, float, bool))):
                    raise LookupError
                return value
            return torch.device("cpu") if isinstance(a, torch.device) else a

        try:
            args, kwargs = pytree.tree_map(
                real, (n.args, dict(n.kwargs)), is_leaf=lambda a: isinstance(a, fx.Node)
            )
            with torch.no_grad():
                out = n.target(*args, **kwargs)
        except Exception:  # it takes a dynamic size, or there is no such operator on CPU
            return None
        val = n.meta["val"]
        rounds = out.is_floating_point() and operator_name(n.target) in ROUNDING
        if rounds or any(self.resolve(a) in self.inexact for a in n.all_input_nodes):
            self.inexact.add(n)
        return out if (out.dtype, tuple(out.shape)) == (val.dtype, tuple(val.shape)) else None

    def by_difference(self, node: fx.Node) -> torch.Tensor | None:
        """The values as a function of i - j, if nothing else decides them."""
        value = self.of(node)
        if value is None or value.dim() < 2 or not value.numel():
            return None
        *_, n, m = value.shape
        table = torch.cat([value[..., 0, :].flip(-1), value[..., 1:, 0]], -1)
        again = table[..., torch.arange(n)[:, None] - torch.arange(m) + m - 1]
        return table if torch.equal(again, value) else None
