"""Accepted decisions -> the Dynamo graph with torch.ops.fusion.* at their sites.

Only Dynamo nodes that a site touches are replaced, by their ATen expansion; everything else stays
the very node that Dynamo made. An expanded group reads only values that Dynamo nodes produce
(groups grow to a fixpoint), and a chain of in-place operators is expanded as a whole or not at all.
The plan is made and checked first. If nothing is accepted, the same graph object is returned.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from fusion_backend.capture.aliases import storages
from fusion_backend.capture.view import View, is_lowered
from fusion_backend.compat.sums_over_ranks import redistributes
from fusion_backend.compat.torch import (
    OpOverload,
    aten,
    graph_module_of_dynamo,
    keep_signature,
    keep_source,
    pytree,
    schema_of,
)
from fusion_backend.decide.call import order_in_memory
from fusion_backend.decide.gate import Decision
from fusion_backend.ir.argument_views import Viewed, step_of, value_of
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ops.operator import DRAW, fake_seed, how_to_draw
from fusion_backend.ops.rule import SEED
from fusion_backend.rewrite.recompute import MARK, computed_again

# Attributes that Dynamo sets on a GraphModule and AOTAutograd reads (sources make parameters static
# inputs).
CARRIED = ("_param_name_to_source", "_backend_id", "compile_subgraph_reason", "shape_env")


# New node -> the Dynamo node that it comes from, and whether it is a copy of it.
Origins = dict[fx.Node, tuple[fx.Node, bool]]


def rewrite(
    view: View,
    canon: Canon,
    decisions: list[Decision],
    chains: dict,
    bodies: dict[str, fx.GraphModule],
) -> tuple[fx.GraphModule, Origins]:
    """The Dynamo graph with the accepted sites written in, or the very same object when there is
    nothing to write; and where its nodes come from.
    """
    accepted = [d for d in decisions if d.fused]
    bodies = {k: b for k, b in bodies.items() if b is not operator.attrgetter(k)(view.source)}
    if not accepted and not bodies:
        return view.source, {}
    writer = Writer(view, canon, chains)
    return writer.write(accepted, bodies), writer.origins


def put(graph: fx.Graph, d: Decision, now) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
    """Insert the call of a decision before its first root. Returns the new nodes and root ->
    result, without the roots that nobody reads.

    `now` maps an argument that was the result of an earlier site to the node that has it now.
    """
    return Insertion(graph, d, now).write()


class Insertion:
    """The nodes of one site."""

    def __init__(self, graph: fx.Graph, d: Decision, now):
        self.graph, self.match, self.call, self.now = graph, d.match, d.call, now
        self.first = min(d.match.roots)  # in graph order
        self.new: list[fx.Node] = []

    def write(self) -> tuple[list[fx.Node], dict[fx.Node, fx.Node]]:
        call, roots = self.call, self.match.roots
        with self.graph.inserting_before(self.first):
            args = tuple(map(self.argument, call.args))
            several = len(call.values) > 1
            value = call.values if several else call.values[0]
            result = self.node(call.target, args, dict(call.kwargs), value)
            results, places = [result], [0]
            if several:
                places = [i for i in range(len(roots)) if i not in call.unread]
                roots = [roots[i] for i in places]
                results = [
                    self.node(operator.getitem, (result, i), {}, call.values[i]) for i in places
                ]
            if call.narrow and 0 in places:
                results[0] = self.widened(results[0], roots[0].meta["val"].dtype)
            for i in call.copied:
                place = places.index(i)
                results[place] = self.copied_like(results[place], roots[place].meta["val"])
        return self.new, dict(zip(roots, results, strict=True))

    def widened(self, result: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The cast that the graph's readers undo, which Inductor drops with theirs."""
        narrow = result.meta["val"]
        with narrow.fake_mode:
            return self.node(aten.to.dtype, (result, dtype), {}, narrow.to(dtype))

    def copied_like(self, result: fx.Node, want: torch.Tensor) -> fx.Node:
        """A copy of a result that lies in memory as the graph's own does."""
        order, dense = order_in_memory(want), {"memory_format": torch.contiguous_format}
        if order == sorted(order):
            return self.node(aten.clone.default, (result,), dense, want)
        permuted = result.meta["val"].permute(order)
        result = self.node(aten.permute.default, (result, order), {}, permuted)
        result = self.node(aten.clone.default, (result,), dense, want.permute(order))
        back = [order.index(d) for d in range(len(order))]
        return self.node(aten.permute.default, (result, back), {}, want)

    def node(self, target, args: tuple, kwargs: dict, value) -> fx.Node:
        n = self.graph.call_function(target, args, kwargs)
        carried = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")
        n.meta = {k: self.first.meta[k] for k in carried if k in self.first.meta}
        n.meta["val"] = value
        n.meta["fusion"] = self.match.pattern.name
        self.new.append(n)
        return n

    def argument(self, a):
        if a is SEED:
            fake = fake_seed(self.call.values[0])
            return self.node(DRAW, *how_to_draw(fake.device), fake)
        if not isinstance(a, Viewed):
            return self.now(a) if isinstance(a, fx.Node) else a
        n, value = self.now(a.node), a.node.meta["val"]
        for step in a.steps:
            target, rest = step_of(step, value)
            value = target(value, *map(value_of, rest))
            args = (n, *(self.now(r) if isinstance(r, fx.Node) else r for r in rest))
            n = self.node(target, args, {}, value)
        return n


class Writer:
    """Carries out one rewrite of one Dynamo graph."""

    def __init__(self, view: View, canon: Canon, chains: dict[fx.Node, list[fx.Node]]):
        self.view, self.canon = view, canon
        # Node -> the members of the in-place chain that it belongs to, up to the last that was
        # converted.
        self.chain_of: dict[fx.Node, list[fx.Node]] = {}
        for m in reversed(chains):
            if m not in self.chain_of:
                members = chains[m][: chains[m].index(m) + 1]
                self.chain_of |= dict.fromkeys(members, members)
        # Dynamo node -> members of chains that it became
        self.chained: dict[fx.Node, list[fx.Node]] = {}
        for m in chains:
            self.chained.setdefault(view.owner.get(m), []).append(m)
        self.chains = chains
        self.waiting: list[fx.Node] = []  # members of chains whose value is not in the graph yet
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.touched: set[fx.Node] = set()  # Dynamo nodes
        # view nodes that a library call no longer reads, and the nodes that they are computed from
        self.dropped: set[fx.Node] = set()
        self.origins: Origins = {}

    def write(self, accepted: list[Decision], bodies: dict[str, fx.GraphModule]) -> fx.GraphModule:
        self.again = computed_again(self.view, accepted)
        for d in accepted:
            self.apply(d)
        self.groups: dict[fx.Node, list[fx.Node]] = {}
        for n in self.view.graph.nodes:
            if n in self.view.owner:
                self.groups.setdefault(self.view.owner[n], []).append(n)
        self.holders: dict[fx.Node, list[fx.Node]] = {}  # view node -> Dynamo nodes with its value
        for d, held in self.view.value.items():
            if isinstance(held, fx.Node):
                self.holders.setdefault(held, []).append(d)
        self.close()
        graph = self.emit()
        source = self.view.source
        new = module_of(graph, source)
        copied_bodies(new, source, bodies)
        graph.lint()
        return new

    def apply(self, d: Decision) -> None:
        """Insert the op into the view and remove the nodes that it replaces."""
        owner = self.view.owner
        first_owner = owner[min(d.match.roots)]
        arguments = [a for a in d.match.tensors.values() if isinstance(a, fx.Node)]
        for n in (*d.match.roots, *d.match.interior, *arguments):
            self.touched |= {owner[m] for m in self.chain_of.get(n, ())}
        read = [a for a in d.call.args if isinstance(a, (fx.Node, Viewed))]
        self.drop([a for a in d.match.tensors.values() if a not in read])
        new, replaced = put(self.view.graph, d, self.now)
        # an elementwise operator, and now a call that computes the same
        if self.again.issuperset(d.match.roots):
            self.again |= set(new)
        owner |= dict.fromkeys(new, first_owner)
        self.replaced |= replaced
        self.touched.add(first_owner)
        inside = {*d.match.roots, *d.match.interior}
        for root, result in replaced.items():
            root.replace_all_uses_with(result)
            self.touched.add(owner[root])
            for n in d.match.interior:
                # permuted and permuted back: other sites may name either. A copy stays one.
                shared = not storages(n).isdisjoint(storages(root))
                if self.canon.of[n] is self.canon.of[root] and shared:
                    self.replaced[n] = result
                    n.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        for n in sorted(inside, reverse=True):
            if not n.users:
                self.touched.add(owner[n])
                self.view.graph.erase_node(n)

    def drop(self, arguments: list) -> None:
        pending = [a if isinstance(a, fx.Node) else a.node for a in arguments]
        while pending:
            n = pending.pop()
            if n not in self.dropped:
                self.dropped.add(n)
                pending += n.all_input_nodes

    def only_computes(self, d: fx.Node) -> bool:
        """Was this Dynamo node, which may be unused now, part of a mask and made only of operators
        without side effects?
        """
        nodes = self.groups.get(d) or [self.view.value.get(d)]
        pure = all(
            n in self.dropped and is_lowered(n) and dead_if_unused(n) and not is_random(n)
            for n in nodes
        )
        return pure and d.op in ("call_function", "call_method") and d not in self.view.copied

    def close(self) -> None:
        """Touch the nodes that the touched groups need, to a fixpoint."""
        produced = {self.now(v) for v in self.view.value.values() if isinstance(v, fx.Node)}
        pending = list(self.touched)
        while pending:
            for n in self.groups.get(pending.pop(), ()):
                for a in n.all_input_nodes:
                    owner = self.view.owner.get(a)
                    if a not in produced and owner is not None and owner not in self.touched:
                        self.touched.add(owner)
                        pending.append(owner)

    def now(self, n: fx.Node) -> fx.Node:
        """The node that holds a value after the rewrite."""
        while n in self.replaced:
            n = self.replaced[n]
        return n

    def emit(self) -> fx.Graph:
        graph = fx.Graph()
        unneeded: set[fx.Node] = set()  # if nobody reads them
        dynamo: dict[fx.Node, object] = {}  # Dynamo node -> new node or constant
        atens: dict[fx.Node, fx.Node] = {}  # view node -> new node
        # view node that is still to come -> Dynamo nodes before it with its value
        missing: dict[fx.Node, list[fx.Node]] = {}
        for d in self.view.source.graph.nodes:
            # A call that returned its argument has no nodes of its own in the view, and ends where
            # its argument does.
            gone = (
                d not in self.groups
                and d.op != "output"
                and any(dynamo[a] is None for a in d.all_input_nodes)
            )
            if d not in self.touched and not gone:
                dynamo[d] = graph.node_copy(d, lambda x: dynamo[x])
                self.origins[dynamo[d]] = d, True
                if self.only_computes(d) or (d.users and redistributes(d)):
                    unneeded.add(dynamo[d])
                keep_source(dynamo[d], d)
                if self.again and self.again.issuperset(self.groups.get(d, {None})):
                    dynamo[d].meta |= MARK
                held = self.view.value.get(d)
                if isinstance(held, fx.Node):
                    atens[self.now(held)] = dynamo[d]
                continue
            for n in self.groups.get(d, ()):
                atens[n] = graph.node_copy(n, lambda x: atens[x])
                clean(atens[n])
                if n in self.again:
                    atens[n].meta |= MARK
                if "in_place" in n.meta:
                    draw_in_place(atens[n])
            dynamo[d] = self.result(d, atens)
            if isinstance(dynamo[d], fx.Node) and "example_value" in d.meta:
                dynamo[d].meta["example_value"] = d.meta["example_value"]
            self.computed_late(d, dynamo, atens, missing)
            self.repoint(d, dynamo, atens)
            new = itertools.takewhile(lambda n: n not in self.origins, reversed(graph.nodes))
            self.origins |= {n: (d, False) for n in [*new]}
        for n in reversed(list(graph.nodes)):
            if not n.users and (n in unneeded or (n.op == "call_function" and dead_if_unused(n))):
                graph.erase_node(n)
        return graph

    def result(self, d: fx.Node, atens: dict):
        """The new value of a touched Dynamo node; None for a value that nobody reads any more."""
        return pytree.tree_map(
            lambda v: atens.get(self.now(v)) if isinstance(v, fx.Node) else v,
            self.view.value[d],
            is_leaf=lambda v: isinstance(v, fx.Node),
        )

    def computed_late(self, d: fx.Node, dynamo: dict, atens: dict, missing: dict) -> None:
        """A call may return its argument (x.type_as(x)), and views may undo each other (x.t().t()).
        If they belong to a site, the first name of the value exists only from the last one on.
        """
        for n in self.groups.get(d, ()):
            dynamo |= dict.fromkeys(missing.pop(n, ()), atens[n])
        held = self.view.value[d]
        if isinstance(held, fx.Node) and dynamo[d] is None:
            missing.setdefault(self.now(held), []).append(d)

    def repoint(self, d: fx.Node, dynamo: dict, atens: dict) -> None:
        """After an in-place operator became functional, its older names mean the new value. The op
        that computes this value may come only with a later node that has it.
        """
        self.waiting += self.chained.get(d, ())
        for m in [m for m in self.waiting if self.now(m) in atens]:
            older = self.chains[m][: self.chains[m].index(m)]
            self.waiting = [w for w in self.waiting if w is not m and w not in older]
            for held in older:
                for earlier in self.holders.get(held, ()):
                    if earlier in dynamo:
                        dynamo[earlier] = atens[self.now(m)]


def copied_bodies(
    new: fx.GraphModule, source: fx.GraphModule, bodies: dict[str, fx.GraphModule]
) -> None:
    """Give a rewritten graph its bodies: the rewritten ones, and copies of the others, because
    Inductor changes graphs in place and the source must stay unchanged.
    """
    for name, child in source.named_children():
        if isinstance(child, fx.GraphModule) and name not in bodies and hasattr(new, name):
            new.set_submodule(name, copied(child))
    for name, body in bodies.items():
        new.set_submodule(name, body)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same nodes and values in a graph of our own, submodules too."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for n in gm.graph.nodes:
        env[n] = graph.node_copy(n, lambda x: env[x])
        keep_source(env[n], n)
    keep_signature(graph, gm.graph)
    new = module_of(graph, gm)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(new, name, copied(child))
    return new


def module_of(graph: fx.Graph, source: fx.GraphModule) -> fx.GraphModule:
    """A module that Dynamo made, with a new graph. Its code is generated only when it is read,
    because Inductor's passes report changes of the graph many times.
    """
    new = graph_module_of_dynamo(source, graph)
    new.meta = dict(source.meta)
    for name in CARRIED:
        if name in source.__dict__:
            setattr(new, name, source.__dict__[name])
    return new


def clean(n: fx.Node) -> None:
    """Dynamo graphs carry example_value, never val."""
    n.meta = dict(n.meta)
    n.meta["example_value"] = n.meta.pop("val", None)
    n.meta.pop("tensor_meta", None)


def draw_in_place(n: fx.Node) -> None:
    """A random operator draws its numbers as the user wrote it: in place, here on a copy."""
    with n.graph.inserting_before(n):
        copy = n.graph.call_function(torch.ops.aten.clone.default, n.args[:1])
    n.target, n.args = n.meta.pop("in_place"), (copy, *n.args[1:])
    copy.meta = dict(n.meta)


def is_random(n: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in n.target.tags


def dead_if_unused(n: fx.Node) -> bool:
    schema = schema_of(n.target) if isinstance(n.target, OpOverload) else None
    if n.target is operator.getitem:
        return "fusion" in n.meta or not n.all_input_nodes
    return schema is not None and not schema.is_mutable
