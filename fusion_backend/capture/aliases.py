"""Which values share memory, and which nodes may write to it. All such questions are in this file.

Memory is known by its storage, an integer. Values of a traced graph have the storages that running
it would give them, so that two values alias only if their storages meet. A copied node has Dynamo's
values and may do anything to its arguments.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.capture.subgraphs import arguments_of_body, is_body
from fusion_backend.capture.view import View, is_lowered, is_mutation
from fusion_backend.compat.torch import FakeTensor, pytree, schema_of, storage_id


@dataclass
class Versions:
    """Memory that is written to holds several values, one after another. A version names one: the
    storages, and how often each has been written to.
    """

    # the version of a node when it is computed, if it is written to later
    written_later: dict[fx.Node, tuple] = field(default_factory=dict)
    # a node -> what it reads and what was written to since it was computed -> its version now, and
    # the same version where it will be written to once more, else None
    read: dict[fx.Node, dict[fx.Node, tuple[tuple, tuple | None]]] = field(default_factory=dict)


def storages(node: fx.Node) -> set[int]:
    """The storages that the values of a view node live in."""
    return {
        storage_id(v)
        for v in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(v, torch.Tensor) and v.layout == torch.strided
    }


def storages_of(value) -> set[int]:
    """The storages that the fake tensors in `value` live in. A tensor subclass has no storage of
    its own and counts as none.
    """
    return {
        storage_id(t)
        for t in pytree.tree_leaves(value)
        if type(t) is FakeTensor and t.layout == torch.strided
    }


def may_alias(node: fx.Node) -> bool:
    """Does the schema let a result share memory with an argument it does not write?"""
    return any(
        a.alias_info is not None and not a.alias_info.is_write
        for a in schema_of(node.target).arguments
    )


def aliases_whole(n: fx.Node, root: fx.Node) -> bool:
    """Is the value of `n` the same as that of `root` under another name, as x.view(x.shape) and
    x[:] are?

    The two are known to share a storage; this compares how they lie in it.
    """
    a, b = n.meta.get("val"), root.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    if (a.dtype, a.dim(), a.is_conj(), a.is_neg()) != (b.dtype, b.dim(), b.is_conj(), b.is_neg()):
        return False
    return same(layout(a), layout(b))


def layout(t: torch.Tensor) -> tuple:
    """Sizes, strides and offset, which may be symbolic."""
    return *t.shape, *t.stride(), t.storage_offset()


def writers_of(view: View, inner: dict[str, dict]) -> dict[int, list[fx.Node]]:
    """Storage -> the nodes that may write to it. `inner` has the same of the bodies inside."""
    writers: dict[int, list[fx.Node]] = {}
    for n in view.graph.nodes:
        for storage in written_by(n, view, inner):
            writers.setdefault(storage, []).append(n)
    for call in view.graph.nodes if writers else ():
        same = set().union(*map(storages, returned(call, view)))
        results = storages(call) if same else set()
        for group in (same & writers.keys(), results & writers.keys()):
            for w in [w for s in group for w in writers[s] if w > call]:
                for s in (same | results) - group:
                    writers.setdefault(s, []).append(w)
    return writers


def returned(call: fx.Node, view: View) -> list[fx.Node]:
    """The operands of a higher-order operator that a body may return, itself or as a view, though
    the results have storages of their own in the view.
    """
    found: list[fx.Node] = []
    for body in (view.bodies.get(a.target) for a in call.all_input_nodes if is_body(a)):
        pairs = arguments_of_body(call, body) if body is not None else []
        if not pairs:
            return [a for a in call.all_input_nodes if not is_body(a)]
        (output,) = [m for m in body.graph.nodes if m.op == "output"]
        results = set().union(*map(storages, output.all_input_nodes))
        found += [o for p, o in pairs if storages(p) & results]
    return found


def versions(view: View, writers: dict[int, list[fx.Node]]) -> Versions:
    """The versions of the values of a view. `writers`: those of `writers_of`."""
    found, count = Versions(), dict.fromkeys(writers, 0)
    first: dict[fx.Node, tuple] = {}
    by_writer: dict[fx.Node, list[int]] = {}
    for storage, nodes in writers.items():
        for n in nodes:
            by_writer.setdefault(n, []).append(storage)

    def version(n: fx.Node) -> tuple:
        return tuple((s, count[s]) for s in sorted(storages(n) & count.keys()))

    def if_later(version: tuple) -> tuple | None:
        return version if any(times < len(writers[s]) for s, times in version) else None

    for n in view.graph.nodes if writers else ():
        now = {a: version(a) for a in n.all_input_nodes if a in first}
        if changed := {a: (v, if_later(v)) for a, v in now.items() if v != first[a]}:
            found.read[n] = changed
        for storage in by_writer.get(n, ()):
            count[storage] += 1
        if own := version(n):
            first[n] = own
            if if_later(own):
                found.written_later[n] = own
    return found


def written_by(n: fx.Node, view: View, writers: dict[str, dict]) -> set[int]:
    """The storages that a node may write to.

    An operator writes if its schema says so; a copied node may write to all of its arguments,
    unless it only takes one of several results. A higher-order operator whose bodies are known
    writes to those arguments only that a body writes to or returns. `writers` has the storages
    that each body writes to, by its name.
    """
    if is_lowered(n):
        writes = is_mutation(n)
    else:
        called = n.op in ("call_function", "call_method", "call_module")
        writes = called and n.target is not operator.getitem and view.owner.get(n) in view.copied
    if not writes:
        return set()
    names = [a.target for a in n.all_input_nodes if is_body(a)]
    if not names or not all(
        name in writers and arguments_of_body(n, view.bodies[name]) for name in names
    ):
        return set().union(*map(storages, n.all_input_nodes))
    return set().union(*(written_in_body(n, view.bodies[name], writers[name]) for name in names))


def written_in_body(call: fx.Node, body: View, writers: dict) -> set[int]:
    """The storages that a call gives to a body and that the body writes to or returns."""
    (output,) = [m for m in body.graph.nodes if m.op == "output"]
    touched = {*writers}.union(*map(storages, output.all_input_nodes))
    pairs = arguments_of_body(call, body)
    return set().union(*(storages(o) for p, o in pairs if storages(p) & touched))
