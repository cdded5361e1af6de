"""A region as a graph of its own, unchanged or with sites replaced, and the text that names it."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.capture.aliases import may_alias
from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import hinted, pytree
from fusion_backend.decide.facts import Facts
from fusion_backend.decide.gate import Decision
from fusion_backend.ir.argument_views import Viewed
from fusion_backend.measure.indices import is_index
from fusion_backend.measure.operands import Operand, copies, one_by_one, operand
from fusion_backend.measure.region import NUMBERS, Region, call_reads
from fusion_backend.rewrite.recompute import MARK, computed_again
from fusion_backend.rewrite.writer import put

CASTS = {"aten::to", "aten::_to_copy"}


@dataclasses.dataclass
class Cut:
    """A region with its edges. inputs: the nodes outside that it reads, or that a replacement in it
    reads. outputs: its nodes that are read outside. rows: the outputs that a matrix product outside
    copies, row by row, before it reads them. operands: the outputs that a product of batches
    outside reads, in the form in which it reads them. grads: the inputs whose gradient is wanted;
    none in inference.
    """

    facts: Facts
    region: Region
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    rows: list[fx.Node]
    operands: list[Operand]
    grads: set[fx.Node]

    @property
    def device(self) -> torch.device:
        return self.region.sites[0].match.roots[0].meta["val"].device

    def graph(self, chosen: list[Decision]) -> fx.GraphModule:
        """The region with these sites replaced. Symbolic sizes are those of the example."""
        graph = fx.Graph()
        now: dict[fx.Node, fx.Node] = {}
        for i, a in enumerate(self.inputs):
            now[a] = graph.placeholder(f"input_{i}")
            now[a].meta["val"] = a.meta["val"]
        again = computed_again(self.facts.view, chosen)
        for n in self.region.nodes:
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda a: outer(a, now))
            args, kwargs = pytree.tree_map_only(NUMBERS, number, (args, kwargs))
            now[n] = graph.call_function(n.target, args, kwargs)
            now[n].meta = {"val": n.meta.get("val"), **(MARK if n in again else {})}
        replaced: dict[fx.Node, fx.Node] = {}
        for d in chosen:
            self.replace(graph, d, replaced, now, again.issuperset(d.match.roots))
        results = [last(now[n], replaced) for n in self.outputs]
        for n in self.rows:
            rows = (last(now[n], replaced), [-1, number(n.meta["val"].shape[-1])])
            results.append(graph.call_function(torch.ops.aten.reshape.default, rows))
        results += [one.write(graph, last(now[one.node], replaced)) for one in self.operands]
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        return fx.GraphModule({}, graph)

    def replace(self, graph: fx.Graph, d: Decision, replaced: dict, now: dict, again: bool) -> None:
        """Write one site, as the rewriter does, into a graph that is ours alone. again: backward
        computes it again.
        """
        copy = moved(d, now)
        new, results = put(graph, copy, lambda n: last(n, replaced))
        for n in new:
            n.args, n.kwargs = pytree.tree_map_only(NUMBERS, number, (n.args, n.kwargs))
            n.meta |= MARK if again else {}
        replaced |= results
        of, inside = self.facts.canon.of, {*self.region.nodes}
        site = {now[n] for n in (*d.match.roots, *d.match.interior) if n in now}
        for root, copied in zip(d.match.roots, copy.match.roots, strict=True):
            if copied not in results:  # nobody reads it
                continue
            result = results[copied]
            copied.replace_all_uses_with(result)
            for n in d.match.interior:  # permuted and permuted back: the same value again
                if of[n] is of[root] and n in inside:
                    replaced[now[n]] = result
                    now[n].replace_all_uses_with(result, lambda user: user not in site)

    def text(self) -> str:
        """The region as text that is the same for all equal layers and in every process. A symbolic
        size is named by the power of two above it.
        """
        name = {n: f"%{i}" for i, n in enumerate((*self.inputs, *self.region.nodes))}
        lines = [
            f"{name[a]}: {kind(a.meta['val'])}{' wanted' if a in self.grads else ''}"
            for a in self.inputs
        ]
        for n in self.region.nodes:
            lines.append(f"{name[n]} = {n.target}{told((n.args, n.kwargs), name)}")
        if not self.grads:
            trained = self.facts.view.requires_grad
            frozen = [n for n in self.region.nodes if one_by_one(n, trained)]
            lines += [f"frozen {name[n]}" for n in frozen]
        for d in self.region.sites:
            lines.append(f"{d.match.pattern.name} {call_text(d, name)}")
        lines.append(f"return {told([*self.outputs], name)} rows {told([*self.rows], name)}")
        lines += [f"operand {name[n]} {order} {groups}" for n, order, groups in self.operands]
        return re.sub(r"device\(type='(\w+)'(, index=\d+)?\)", r"\1", "\n".join(lines))


def cut(facts: Facts, region: Region, training: bool, wanted: Callable[[fx.Node], bool]) -> Cut:
    """`wanted`: does anything want the gradient of this input?"""
    views = views_of_one(inputs_of(region))
    inside = {*region.nodes}
    tensors = [n for n in region.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    # lists: the order of a set of nodes differs from process to process, and would be in the text
    outside = {n: [u for u in n.users if u not in inside] for n in tensors if n not in region.again}
    trained = facts.view.requires_grad
    copying = {n: {u for u in users if copies(u, n, trained)} for n, users in outside.items()}
    rows = [n for n in outside if copying[n]]
    batched = {n: {u: o for u in users if (o := operand(u, n))} for n, users in outside.items()}
    operands = [*dict.fromkeys(o for found in batched.values() for o in found.values())]
    outputs = [
        n
        for n, users in outside.items()
        if any(u not in copying[n] and u not in batched[n] for u in users)
    ]
    nodes = sorted(inside | views, key=facts.order.__getitem__)
    region = dataclasses.replace(region, nodes=nodes)
    inputs = inputs_of(region)
    grads = {a for a in inputs if training and a.meta["val"].is_floating_point() and wanted(a)}
    return Cut(facts, region, inputs, outputs, rows, operands, grads)


def inputs_of(region: Region) -> list[fx.Node]:
    """The tensors outside that a region or a replacement in it reads."""
    inside = {*region.nodes}
    read = [a for n in region.nodes for a in n.all_input_nodes]
    read += [a for d in region.sites for a in call_reads(d)]
    tensors = (a for a in read if isinstance(a.meta.get("val"), torch.Tensor))
    return [*dict.fromkeys(a for a in tensors if a not in inside)]


def views_of_one(inputs: list[fx.Node]) -> set[fx.Node]:
    """The views and casts that must be part of the cut because several inputs are made of one
    tensor: values that were made up for each input would contradict each other.
    """
    source = {a: (a, *seen_through(a))[-1] for a in inputs}
    several = {n for n in source.values() if sum(m is n for m in source.values()) > 1}
    found: set[fx.Node] = set()
    for a in inputs:
        if source[a] in several:
            found |= {a, *seen_through(a)} - {source[a]}
    # integers stay outside, where their range is known
    return {n for n in found if not is_index(n)}


def seen_through(n: fx.Node) -> list[fx.Node]:
    """The values that a value is a view or a cast of, the nearest first."""
    found = []
    while is_lowered(n) and (name_of(n) in CASTS or may_alias(n)):
        tensors = [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
        if len(tensors) != 1:
            break
        n = tensors[0]
        found.append(n)
    return found


def outer(a: fx.Node, now: dict):
    """A node of the view in a cut: its copy, or the number that it is."""
    return now[a] if a in now else number(a.meta["val"])


def number(value):
    """A symbolic number as it is in the example."""
    if not isinstance(value, torch.SymInt):
        return value.node.hint if isinstance(value, NUMBERS) else value
    return hinted((value,))[0]


def last(n: fx.Node, replaced: dict) -> fx.Node:
    while n in replaced:
        n = replaced[n]
    return n


def moved(d: Decision, now: dict) -> Decision:
    """The decision about the copies of its nodes."""

    def copy(a):
        if isinstance(a, Viewed):
            return Viewed(outer(a.node, now), a.steps)
        return outer(a, now) if isinstance(a, fx.Node) else a

    match = dataclasses.replace(
        d.match,
        roots=[now[r] for r in d.match.roots],
        arguments={name: copy(a) for name, a in d.match.arguments.items()},
        interior=[now[n] for n in d.match.interior if n in now],
    )
    call = dataclasses.replace(d.call, args=tuple(map(copy, d.call.args)))
    return dataclasses.replace(d, match=match, call=call)


# Text.


def size(value) -> str:
    if not isinstance(value, torch.SymInt):
        return str(value)
    return f"to{1 << max(0, number(value) - 1).bit_length()}"


def kind(value: torch.Tensor) -> str:
    shape, stride = (",".join(map(size, sizes)) for sizes in (value.shape, value.stride()))
    return f"{value.dtype}[{shape}]({stride})"


def told(value, name: dict) -> str:
    if isinstance(value, fx.Node):
        return name[value] if value in name else told(value.meta["val"], name)
    if isinstance(value, Viewed):
        return f"{told(value.node, name)}{value.steps}"
    if isinstance(value, torch.SymInt):
        return size(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(told(v, name) for v in value)})"
    if isinstance(value, dict):
        return f"({', '.join(f'{k}={told(v, name)}' for k, v in sorted(value.items()))})"
    return repr(value)


def call_text(d: Decision, name: dict) -> str:
    """The call that replaces a site, without its providers, which the measurement decides."""
    named = {k: v for k, v in d.call.kwargs.items() if k not in ("forward", "backward")}
    return f"{d.call.target}{told((d.call.args, named), name)} copied={bool(d.call.copied)}"


def summary(region: Region) -> dict[str, int]:
    """How many operators of each name are in it."""
    counts: dict[str, int] = {}
    for n in region.nodes:
        if n.target is not operator.getitem:
            name = str(n.target).removeprefix("aten.").rpartition(".")[0]
            counts[name] = counts.get(name, 0) + 1
    return counts
