"""Large values that a graph both returns and reads, such as logits that are returned with their
loss: the gradient that they get from outside is added only where there is one.

To AOTAutograd every returned value has a gradient from outside, which its backward graph adds to
the one from inside. Where the caller only uses the loss, autograd fills a tensor as large as the
logits with zeros for it, in every step.

Here the value is returned as a constant, together with a *token*: one number, whose gradient
autograd fills in its place. `Returned` then makes the value depend on the token. If the caller
differentiates the value, the gradient of the token carries that of the value, and
`fusion::add_given_` adds it to the gradient from inside when the backward runs.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fusion_backend.capture.sizes import is_dense
from fusion_backend.compat.torch import (
    at_end_of_backward,
    aten,
    hinted,
    is_traceable_wrapper_subclass,
    storage_id,
    times_written,
)
from fusion_backend.reporting.places import location

LARGE = 1 << 26  # elements of a value; 128 MB in 16 bits
SMALLER = 64  # times fewer elements than the value: a loss, of a batch or of each row

library = torch.library.Library("fusion", "FRAGMENT")
library.define("read_inside(Tensor(a) x) -> (Tensor(a), Tensor)")
library.define("add_given_(Tensor(a!) gradient, Tensor token) -> ()")


class ReadInside(torch.autograd.Function):
    """x for what reads it in the graph, and its token."""

    @staticmethod
    def forward(ctx, x: Tensor):
        return x.view_as(x), x.new_zeros(())

    @staticmethod
    def backward(ctx, gradient: Tensor, token: Tensor):
        torch.ops.fusion.add_given_(gradient, token)
        return gradient


class Returned(torch.autograd.Function):
    """The value that the caller gets."""

    @staticmethod
    def forward(ctx, token: Tensor, values: list[Tensor]):
        return values.pop()  # autograd would return a view of an argument

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "fusion: compiled autograd cannot compute a gradient of a tensor that a compiled "
                "graph returns and reads; set torch._dynamo.config.compiled_autograd before the "
                "graph is compiled"
            )
        token, given = gradient.new_zeros(()), [gradient]
        token.given = given  # type: ignore[attr-defined]

        def check():
            if given:
                raise RuntimeError(
                    "fusion: the gradient of a returned tensor was lost. A hook may have replaced "
                    "that of another result with new tensors; if there is none, please report "
                    'this. options={"fusion.gate": "never"} avoids it'
                )

        at_end_of_backward(check)
        return token, None


def add_given(gradient: Tensor, token: Tensor) -> None:
    """Add what the token carries."""
    given = getattr(token, "given", None)
    if given:
        gradient += given.pop()


library.impl("read_inside", ReadInside.apply, "CompositeImplicitAutograd")
library.impl("add_given_", add_given, "CompositeExplicitAutograd")
library.impl("add_given_", lambda gradient, token: None, "Meta")


class Separated(NamedTuple):
    """places: of such values among the results. Their tokens come after all results. told: of each
    value a sentence with its place in the user's code.
    """

    places: list[int]
    told: list[str]

    def wrap(self, compiled: Callable) -> Callable:
        """The compiled graph, with the results that it had before."""
        if not self.places:
            return compiled

        def call(*args):
            found = [*compiled(*args)]
            tokens = found[-len(self.places) :]
            del found[-len(self.places) :]
            for place, token in zip(self.places, tokens, strict=True):
                # a tensor that the graph keeps for its backward would keep itself alive
                found[place] = Returned.apply(token, [found[place].detach()])
            return tuple(found)

        return call


def separate(gm: fx.GraphModule, source: fx.GraphModule) -> Separated:
    """Have a rewritten graph return such values of the Dynamo graph `source` as constants, and
    tokens for them.
    """
    output, made = gm.graph.output_node(), Separated([], [])
    (results,), (values,) = output.args, source.graph.output_node().args
    if not isinstance(results, tuple | list):
        return made
    new, tokens = [*results], []
    for place in places_of(values, source):
        n, value = results[place], value_of(values[place])
        readers = [user for user in n.users if user is not output]
        if results.count(n) > 1 or not readers:
            continue
        both = call_after(n, torch.ops.fusion.read_inside.default, n)
        inside = call_after(both, operator.getitem, both, 0)
        tokens.append(call_after(inside, operator.getitem, both, 1))
        new[place] = call_after(inside, aten.detach.default, n)
        # AOTAutograd caches no graph that calls a method of a node without a value
        for m in (inside, new[place]):
            m.meta = {**n.meta, "example_value": value}
        for user in readers:
            user.replace_input_with(n, inside)
        made.places.append(place)
        told = f"{value.numel():,} elements of {str(value.dtype).removeprefix('torch.')}"
        made.told.append(f"{location(values[place])}: {told}")
    if tokens:
        output.args = ((*new, *tokens),)
        gm.recompile()
    return made


def call_after(n: fx.Node, target: Callable, *args) -> fx.Node:
    with n.graph.inserting_after(n):
        return n.graph.call_function(target, args)


def places_of(results: Sequence, gm: fx.GraphModule) -> list[int]:
    """Which results of a Dynamo graph are large, computed in it with a gradient, never written to,
    alone in their memory, and read by a loss.
    """
    nodes = {place: n for place, n in enumerate(results) if isinstance(n, fx.Node)}
    large = [p for p, n in nodes.items() if elements(n) >= LARGE and is_fixed(value_of(n))]
    if not large:
        return []
    inputs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    values = map(value_of, (*nodes.values(), *inputs))
    memory = Counter(storage_id(v) for v in values if is_dense(v))
    alone = [p for p in large if memory[storage_id(value_of(nodes[p]))] == 1]
    return [p for p in alone if is_in_a_loss(nodes[p])]


def value_of(n: fx.Node):
    return n.meta.get("example_value")


def is_fixed(value: Tensor) -> bool:
    return (
        value.requires_grad
        and value.is_contiguous()
        and times_written(value) == 0
        and not is_traceable_wrapper_subclass(value)
    )


def is_in_a_loss(n: fx.Node) -> bool:
    """Is something much smaller computed from the value, with a gradient, that is returned and from
    which nothing large is computed?
    """
    own = elements(n)
    pending, seen = [n], {n}
    while pending:
        for user in pending.pop().users.keys() - seen:
            seen.add(user)
            if elements(user) >= own // 2:
                pending.append(user)
            elif elements(user) <= own // SMALLER and is_loss(user, own // SMALLER):
                return True
    return False


def is_loss(n: fx.Node, most: int) -> bool:
    """Is all that is computed from a value with a gradient no larger than `most`, and returned?"""
    if not getattr(value_of(n), "requires_grad", False):
        return False
    pending, seen = [n], {n}
    while pending:
        for user in pending.pop().users.keys() - seen:
            seen.add(user)
            if elements(user) > most:
                return False
            pending.append(user)
    return any(user.op == "output" for user in seen)


def elements(n: fx.Node) -> int:
    """How many elements a node's tensor has; 0 where that depends on data, or it is no tensor."""
    value = value_of(n)
    sizes = hinted(value.shape) if is_dense(value) else None
    return 0 if sizes is None else math.prod(sizes)
