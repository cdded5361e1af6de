"""Graph -> canonical expressions.

Graphs and patterns are both read into hash-consed expressions (builder.py); the graph itself is not
touched. Dimensions are counted from the right, so that a pattern traced on [5, 7] fits [2, 5, 7];
broadcasting is implicit; commutative operands are ordered. Float casts stay visible as `cast`
expressions, which the matcher may look through. The files rules_*.py say what an operator means,
with one short function for each rule; an operator without a rule stands for itself.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from fusion_backend.capture.aliases import Versions
from fusion_backend.capture.view import is_lowered
from fusion_backend.compat.torch import schema_of
from fusion_backend.ir import (
    rules_attention,
    rules_channel_norm,
    rules_collective,
    rules_complex,
    rules_conv,
    rules_gelu,
    rules_loss,
    rules_norm,
    rules_pointwise,
    rules_product,
    rules_shape,
)
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import RULES, read
from fusion_backend.ir.rules_pointwise import held
from fusion_backend.ir.schema_args import Call, argument, written_arguments
from fusion_backend.reporting.faults import refusal

# Rules of one operator are asked in the order in which these files register them.
OUR_RULES = (rules_pointwise, rules_gelu, rules_shape, rules_norm, rules_channel_norm)
OUR_RULES += (
    rules_complex,
    rules_product,
    rules_conv,
    rules_attention,
    rules_loss,
    rules_collective,
)


class Canon(Builder):
    """Reads a graph into expressions."""

    def __init__(self, scalar_of=None, text_of=None):
        super().__init__(scalar_of, text_of)
        self.of: dict[fx.Node, Expr] = {}
        self.faults: dict[fx.Node, str] = {}  # a node whose rule failed -> how

    def variable(self, n: fx.Node, name: str) -> None:
        """Let a pattern's placeholder stand for anything."""
        self.of[n] = self.make("var", (), name, shape_of(n))

    def run(
        self, graph: fx.Graph, region=None, fences=frozenset(), trains=None, versions=None
    ) -> Canon:
        """`versions`: of memory that the graph writes to. What lies there is another expression
        for those that read it after a write.
        """
        self.trains, versions = trains or self.trains, versions or Versions()
        before: dict[fx.Node, Expr] = {}  # of the nodes whose memory was written to
        unsettled: dict[Expr, tuple] = {}
        for n in graph.nodes:
            if n.op == "output":
                continue
            self.state = (region or {}).get(n)
            e = self.of.get(n) or self.read(n, fences)
            # 3 * i in integers and 3.0 * i are two values
            if e.nodes and kind_of(e.nodes[0]) != kind_of(n):
                e = self.make(f"as {kind_of(n)}", (e,), None, e.shape)
            # equal, but a gradient of one of both stops there: a copy made without grad mode, say
            if e.nodes and self.trains(e.nodes[0]) != self.trains(n):
                e = self.make("trained" if self.trains(n) else "constant", (e,), None, e.shape)
            # computed alike, but one of both is written to later
            version = versions.unsettled.get(n)
            if e.nodes and unsettled.get(e) != version:
                e = self.make("at", (e,), version, e.shape)
            self.hold(e, n, version, unsettled)
            for m, (version, settled) in versions.changed.get(n, {}).items():
                e = before.setdefault(m, self.of[m])
                e = self.make("at", (e,), version, e.shape)
                self.hold(e, m, None if settled else version, unsettled)
        self.of.update(before)
        return self

    def hold(self, e: Expr, n: fx.Node, version: tuple | None, unsettled: dict) -> None:
        """From here on `n` holds `e`, until its memory is written to if `version` is not None."""
        self.of[n] = e
        e.nodes.append(n)
        if version is not None:
            unsettled[e] = version

    def read(self, n: fx.Node, fences) -> Expr:
        if (
            n.op == "call_function"
            and n.target is operator.getitem
            and self.of[n.args[0]].op == "tuple"
        ):
            return self.of[n.args[0]].args[n.args[1]]
        if n.target is torch.tensor and len(n.args) == 1 and type(n.args[0]) in (int, float):
            return self.const(held(n.args[0], n.meta["val"].dtype))
        if not is_lowered(n) or n in fences:
            return self.make("input", (), n.name, shape_of(n))
        e = self.by_rule(n)
        if e is not None:
            return e
        if unrepeatable(n):
            return self.make("input", (), n.name, shape_of(n))
        tensors = tuple(self.of[a] for a in n.all_input_nodes)
        return self.make(str(n.target), tensors, written_arguments(n), shape_of(n))

    def by_rule(self, n: fx.Node) -> Expr | None:
        """The expression that the rules of its operator give. A rule that fails or needs a guard
        does not apply.
        """
        planned = RULES.plan(n.target)
        context = (self, Call(n)) if planned else ()
        for rule, plan in planned:
            try:
                arguments = read(n, plan, context)
                found = None if arguments is None else rule.ask(*context, *arguments)
            except Exception as error:
                _, fault = refusal(error, f"the rule of {schema_of(n.target).name}")
                if fault is not None:
                    self.faults[n] = fault
                continue
            if found is not None:
                return found
        return None


def shape_of(n: fx.Node):
    value = n.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def kind_of(n: fx.Node) -> str:
    """The kind of number of a tensor; "" for any other value."""
    value = n.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = value.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return "floats" if dtype.is_floating_point else "complex numbers"
    return "booleans" if dtype == torch.bool else "integers"


def unrepeatable(n: fx.Node) -> bool:
    """May two such nodes with the same arguments have different values?"""
    if schema_of(n.target).name == "aten::scaled_dot_product_attention":
        return argument(n, "dropout_p") != 0
    return torch.Tag.nondeterministic_seeded in n.target.tags or schema_of(n.target).is_mutable
