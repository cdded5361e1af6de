"""A rewritten graph as data, from which it can be rebuilt with the same Dynamo graph.

Most nodes are copies of Dynamo's; the recipe has their numbers and their new arguments. The others
are calls of operators of ATen or of ours, by name. Reading a recipe runs no code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fusion_backend.compat.torch import OpOverload, keep_source, name_again
from fusion_backend.rewrite.recompute import MARK
from fusion_backend.rewrite.writer import Origins, copied_bodies, module_of

GETITEM = "getitem"
SPACES = ("aten", "fusion")
KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
# The metadata that a new node takes from the Dynamo node that it stands for.
CARRIED = ("stack_trace", "nn_module_stack", "source_fn_stack", "custom")


class NoRecipe(Exception):
    """A rewritten graph cannot be written down, or a recipe does not fit; the message says why."""


def recipe_of(gm: fx.GraphModule, source: fx.GraphModule, origins: dict) -> list | None:
    """The recipe of a rewritten graph, None where it is the Dynamo graph itself. origins: those of
    each graph that was written. Raises NoRecipe.
    """
    if gm is source:
        return None
    origin: Origins = origins[gm]
    places = {d: i for i, d in enumerate(source.graph.nodes)}
    values = {id(d.meta["example_value"]): i for d, i in places.items() if has_value(d)}
    numbers: dict[fx.Node, int] = {}
    nodes = []
    for n in gm.graph.nodes:
        d, is_copy = origin[n]
        marked = "ac_graph_id" in n.meta and n.meta["ac_graph_id"] == MARK["ac_graph_id"]
        entry = [n.name, places[d], int(marked)]
        if is_copy:
            read = slots((d.args, d.kwargs), (n.args, n.kwargs))
            entry.append([written(now, numbers) for now in read])
        else:
            given = [written(n.args, numbers), written(n.kwargs, numbers)]
            holds = values.get(id(n.meta.get("example_value")))
            entry += [target_name(n), *given, n.meta.get("fusion", ""), holds]
        numbers[n] = len(numbers)
        nodes.append(entry)
    bodies = {}
    for name, child in source.named_children():
        body = getattr(gm, name, None)
        if isinstance(child, fx.GraphModule) and body in origins:
            bodies[name] = recipe_of(body, child, origins)
    return [nodes, bodies]


def rebuilt(recipe: list | None, source: fx.GraphModule) -> fx.GraphModule:
    """The rewritten graph of a recipe. Raises NoRecipe where it does not fit the Dynamo graph."""
    if recipe is None:
        return source
    entries, inner = recipe
    sources, graph, made = [*source.graph.nodes], fx.Graph(), []
    for name, place, marked, *rest in entries:
        d = sources[place]
        if len(rest) == 1:
            read = iter([read_back(now, made) for now in rest[0]])
            n = graph.node_copy(d, lambda _, read=read: next(read))
            keep_source(n, d)
        else:
            target, args, kwargs, pattern, holds = rest
            args, kwargs = read_back(args, made), read_back(kwargs, made)
            n = graph.call_function(target_of(target), args, kwargs)
            n.meta = {k: d.meta[k] for k in CARRIED if k in d.meta}
            if pattern:
                n.meta["fusion"] = pattern
            if holds is not None:  # AOTAutograd caches no graph that calls a method of another
                n.meta["example_value"] = sources[holds].meta["example_value"]
        if n.name != name:
            name_again(n, name)
        if marked:
            n.meta |= MARK
        made.append(n)
    new = module_of(graph, source)
    bodies = {k: rebuilt(body, source.get_submodule(k)) for k, body in inner.items()}
    copied_bodies(new, source, bodies)
    graph.lint()
    return new


def has_value(n: fx.Node) -> bool:
    return isinstance(n.meta.get("example_value"), torch.Tensor)


def slots(before, now) -> Iterator[object]:
    """The new values in place of the nodes in arguments, in the order in which fx copies them."""
    if isinstance(before, fx.Node):
        yield now
    elif isinstance(before, (tuple, list)):
        for b, n in zip(before, now, strict=True):
            yield from slots(b, n)
    elif isinstance(before, dict):
        for key, b in before.items():
            yield from slots(b, now[key])
    elif isinstance(before, slice):
        for part in ("start", "stop", "step"):
            yield from slots(getattr(before, part), getattr(now, part))


def target_name(n: fx.Node) -> str:
    if n.target is operator.getitem:
        return GETITEM
    if n.op == "call_function" and isinstance(n.target, OpOverload):
        if n.target.namespace in SPACES:
            return str(n.target)
    raise NoRecipe(f"{n.name} calls {n.target}")


def target_of(name: str):
    """The operator of a name, "aten.add.Tensor"."""
    if name == GETITEM:
        return operator.getitem
    space, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    if space not in SPACES:
        raise NoRecipe(f"there is no operator {name}")
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def written(value, numbers: dict[fx.Node, int]):
    """An argument as JSON: what JSON does not have is a list that begins with its kind."""
    if isinstance(value, fx.Node):
        return ["node", numbers[value]]
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is torch.device:
        return ["device", str(value)]
    if isinstance(value, (tuple, list)):
        word = "list" if isinstance(value, list) else "tuple"
        return [word, *(written(v, numbers) for v in value)]
    if isinstance(value, dict):
        return ["dict", *([k, written(v, numbers)] for k, v in value.items())]
    for word, known in KINDS.items():
        if kind is known:
            return [word, str(value).removeprefix("torch.")]
    raise NoRecipe(f"an argument is a {kind.__name__}")


def read_back(value, made: list[fx.Node]):
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "node":
        return made[rest[0]]
    if kind == "device":
        return torch.device(rest[0])
    if kind == "dict":
        return {k: read_back(v, made) for k, v in rest}
    if kind in KINDS:
        found = getattr(torch, rest[0])
        if type(found) is not KINDS[kind]:
            raise NoRecipe(f"torch.{rest[0]} is no {kind}")
        return found
    return {"list": list, "tuple": tuple}[kind](read_back(v, made) for v in rest)
