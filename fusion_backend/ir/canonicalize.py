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
    rules_batch_norm,
    rules_channel_norm,
    rules_collective,
    rules_complex,
    rules_conv,
    rules_gelu,
    rules_images,
    rules_loss,
    rules_norm,
    rules_pointwise,
    rules_product,
    rules_shape,
    rules_soft_loss,
)
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import RULES, read
from fusion_backend.ir.rules_pointwise import held
from fusion_backend.ir.schema_args import Call, argument, written_arguments
from fusion_backend.reporting.faults import refusal

# Rules of one operator are asked in the order in which these files register them.
OUR_RULES = (rules_pointwise, rules_gelu, rules_shape, rules_norm, rules_batch_norm)
OUR_RULES += (
    rules_channel_norm,
    rules_complex,
    rules_product,
    rules_conv,
    rules_images,
    rules_attention,
    rules_loss,
    rules_soft_loss,
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
        region, later = region or {}, {}  # later: an expression -> its version, if written to later
        for n in graph.nodes:
            if n.op == "output":
                continue
            self.state = region.get(n)
            before = {a: self.of[a] for a in versions.read.get(n, ())}
            for a, (version, again) in versions.read.get(n, {}).items():
                self.of[a] = self.make("at", (before[a],), version, before[a].shape)
                later[self.of[a]] = again
                if a not in self.of[a].nodes:
                    self.of[a].nodes.append(a)
            e = self.of.get(n) or self.read(n, fences)
            self.of |= before
            # 3 * i in integers and 3.0 * i are two values
            if e.nodes and kind_of(e.nodes[0]) != kind_of(n):
                e = self.make(f"as {kind_of(n)}", (e,), None, e.shape)
            # equal, but no gradient passes through one of the two
            if e.nodes and self.stops_gradient(e.nodes[0], n, region):
                passes = "with gradient" if self.trains(n) else "without gradient"
                e = self.make(passes, (e,), None, e.shape)
            # computed alike, but one of the two is written to later
            version = versions.written_later.get(n)
            if e.nodes and version != later.get(e):
                e = self.make("at", (e,), version, e.shape)
            self.of[n], later[e] = e, version
            e.nodes.append(n)
        return self

    def stops_gradient(self, a: fx.Node, b: fx.Node, region: dict) -> bool:
        """Are the two computed in different grad modes, and does only one have a gradient?"""
        modes = [region.get(n, (True,))[0] for n in (a, b)]
        return modes[0] != modes[1] and self.trains(a) != self.trains(b)

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
