"""Dynamo graph -> view: ATen above autograd, only looked at, never compiled.

What is understood is lowered; the rest is copied verbatim, and no match crosses it. Each view node
remembers the Dynamo node it came from (`owner`), each Dynamo node the view nodes that hold its
result (`value`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator

import torch
from torch import fx

from fusion_backend.capture.mutation import Written
from fusion_backend.capture.single_op import Lowering
from fusion_backend.compat.torch import (
    STATE_FUNCTIONS,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    fake_mode_of,
    get_proxy_mode,
    last_node,
    pytree,
    schema_of,
    trace,
    track_tensor_tree,
    without_torch_function,
)

# Entering or leaving one of these levels: everything inside is copied verbatim.
LEVELS = {
    "_vmap_increment_nesting": 1,
    "_vmap_decrement_nesting": -1,
    "_grad_increment_nesting": 1,
    "_grad_decrement_nesting": -1,
    "_jvp_increment_nesting": 1,
    "_jvp_decrement_nesting": -1,
    "_enter_inference_mode": 1,
    "_exit_inference_mode": -1,
}
# Higher-order operators whose bodies are ordinary code run once, in order.
BODIES = {"tag_activation_checkpoint", "invoke_subgraph", "cond"}


@dataclasses.dataclass
class View:
    """The ATen graph that is matched, and how it hangs together with the Dynamo graph."""

    source: fx.GraphModule
    graph: fx.Graph
    owner: dict[fx.Node, fx.Node]  # view node -> Dynamo node
    value: dict[fx.Node, object]  # Dynamo node -> its result as view nodes and constants
    region: dict[fx.Node, object]  # view node -> grad mode, autocast and copied state around it
    requires_grad: set[fx.Node]
    kept: dict[fx.Node, str]  # Dynamo node copied verbatim -> why
    bodies: dict[str, View]  # get_attr target of a body -> its view

    def views(self):
        """This view and those of all bodies."""
        yield self
        for body in self.bodies.values():
            yield from body.views()


class Opaque:
    """A value that the tracer cannot hold: known by its proxy alone."""

    def __init__(self, proxy: fx.Proxy):
        self.proxy = proxy


def is_opaque(value) -> bool:
    return isinstance(value, Opaque)


def ordinary(value) -> bool:
    """Can the tracer follow it? Subclasses, functorch wrappers and real tensors it cannot."""
    return all(
        type(t) is FakeTensor for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)
    )


def state_key(unknown: object) -> tuple:
    """What decides how an operator behaves besides its arguments."""
    autocast = tuple(
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, unknown)


class Capture(fx.Interpreter):
    """Run a Dynamo graph node by node under make_fx; what is one operator is written down without
    running it.
    """

    def __init__(self, gm: fx.GraphModule, written: Written | None):
        super().__init__(gm, garbage_collect_values=False)
        self.written = written
        self.lowering: Lowering | None = None
        self.level = 0
        self.unknown: object = None  # the last state function we do not understand
        self.autocast_stack: list = []
        self.owner: dict[fx.Node, fx.Node] = {}
        self.value: dict[fx.Node, object] = {}
        self.region: dict[fx.Node, object] = {}
        self.requires_grad: set[fx.Node] = set()
        self.kept: dict[fx.Node, str] = {}
        self.names = {id(v): n for n, v in gm.named_modules(remove_duplicate=False)}

    def run_node(self, n: fx.Node):
        mode = get_proxy_mode()
        tracer = mode.tracer
        self.lowering = self.lowering or Lowering(mode)
        if n.op == "output":
            self.lowering.track(self.map_nodes_to_values(n.args[0], n))
            return fx.node.map_aggregate(
                self.map_nodes_to_values(n.args[0], n), lambda v: v.proxy if is_opaque(v) else v
            )
        if n.op == "placeholder":
            out = super().run_node(n)
            self.note(n, out, tracer, None)
            return out
        last = last_node(tracer.graph)
        name = getattr(n.target, "__name__", "")
        step = LEVELS.get(name, 0) if n.op == "call_function" else 0
        self.level += max(step, 0)
        key = state_key(self.unknown)
        if name in ("_enter_autocast", "_exit_autocast"):
            out = self.autocast(n, name, tracer)
        elif n.op == "get_attr":
            out = self.attribute(n, tracer)
        else:
            why = self.must_copy(n)
            out = self.copy(n, tracer, why) if why else self.lower(n, tracer, last)
        self.level += min(step, 0)
        self.note(n, out, tracer, last, key)
        return out

    def lower(self, n: fx.Node, tracer, last: fx.Node):
        """Run the node for real; on any disagreement with Dynamo take it back and copy."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        again = self.written is not None and n not in self.written.touched
        out = self.lowering.lower(n, args, kwargs) if again else None
        if out is not None:
            return out
        self.lowering.track((args, kwargs))
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        proxies = [tracer.unwrap_proxy(a) for a in tensors]
        try:
            out = filled(n, args) if is_filled(n, args, kwargs) else super().run_node(n)
            expected = pytree.tree_leaves(n.meta.get("example_value"))
            for have, want in zip(pytree.tree_leaves(out), expected, strict=False):
                if isinstance(want, torch.Tensor) and (
                    not isinstance(have, torch.Tensor)
                    or (have.dtype, have.dim()) != (want.dtype, want.dim())
                ):
                    raise ValueError(f"retracing {n.name} gives {have}, Dynamo says {want}")
            if any(new.op == "get_attr" for new in nodes_after(last)):
                raise ValueError(f"{n.name} bakes a constant in")
            if again:
                self.lowering.learn(n, args, kwargs, list(nodes_after(last)), out)
            return out
        except (
            Exception
        ) as error:  # the view is best effort: a node that cannot be lowered is a fence
            for new in reversed(list(nodes_after(last))):
                tracer.graph.erase_node(new)
            # what was written to is what it was
            for a, proxy in zip(tensors, proxies, strict=True):
                if isinstance(proxy, fx.Proxy):
                    track_tensor_tree(a, proxy, constant=None, tracer=tracer)
            return self.copy(n, tracer, f"{type(error).__name__}: {error}")

    def must_copy(self, n: fx.Node) -> str:
        if n.op == "call_function" and n.target in STATE_FUNCTIONS:
            return ""
        if self.level:
            return "inside a vmap, grad, jvp or inference-mode level"
        if isinstance(n.target, HigherOrderOperator):
            return "a higher-order operator"
        if n.op == "call_module":
            return "a module call"
        if "unbacked_bindings" in n.meta:
            return "its size depends on data"
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if any(is_opaque(a) for a in pytree.tree_leaves((args, kwargs))):
            return "it reads a value that was copied"
        example = n.meta.get("example_value")
        if example is None and n.op == "call_function" and n.target is not operator.setitem:
            self.unknown = n
            return "a function without a value: it may change state"
        return "" if ordinary(example) else "a tensor subclass"

    def copy(self, n: fx.Node, tracer, why: str):
        """Put the node itself into the view."""
        self.kept[n] = why
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.lowering.track((args, kwargs))

        def lift(a):
            if is_opaque(a):
                return a.proxy
            if isinstance(a, torch.nn.Module):
                return held(tracer, self.names.get(id(a), n.name), a)
            return tracer.unwrap_proxy(a)

        args, kwargs = pytree.tree_map(
            lift, (args, kwargs), is_leaf=lambda a: isinstance(a, (Opaque, torch.nn.Module))
        )
        return self.emit(n, tracer.create_proxy(n.op, n.target, args, kwargs, name=n.name), tracer)

    def describe(self, n: fx.Node, proxy: fx.Proxy) -> None:
        for key, item in n.meta.items():
            if key not in ("example_value", "val"):
                proxy.node.meta.setdefault(key, item)

    def emit(self, n: fx.Node, proxy: fx.Proxy, tracer):
        self.describe(n, proxy)
        example = n.meta.get("example_value")
        leaves = pytree.tree_leaves(example)
        if example is None or not leaves or not ordinary(example):
            return Opaque(proxy)
        return track_tensor_tree(example, proxy, constant=None, tracer=tracer)

    def attribute(self, n: fx.Node, tracer):
        value = super().run_node(n)
        if not isinstance(value, torch.Tensor):
            return value
        return self.emit(n, held(tracer, n.target, value), tracer)

    def autocast(self, n: fx.Node, name: str, tracer):
        """Copied, and really entered, or the dtypes of the view would be wrong."""
        out = self.copy(n, tracer, "autocast")
        with without_torch_function():
            if name == "_enter_autocast":
                self.autocast_stack.append(n.target(*n.args, **n.kwargs))
            else:
                n.target(self.autocast_stack.pop())
        return out

    def note(self, n: fx.Node, out, tracer, last, key=None) -> None:
        def node_of(v):
            proxy = v.proxy if is_opaque(v) else v
            if isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                proxy = self.lowering.proxy_of(v)
            if not isinstance(proxy, fx.Proxy):
                return v
            if isinstance(v, torch.Tensor) and v.requires_grad:
                self.requires_grad.add(proxy.node)
            return proxy.node

        self.value[n] = pytree.tree_map(node_of, out, is_leaf=is_opaque)
        for new in nodes_after(last) if last is not None else ():
            self.owner[new] = n
            self.region[new] = key
            if "stack_trace" in n.meta:
                new.meta["stack_trace"] = n.meta["stack_trace"]


def is_filled(n: fx.Node, args: tuple, kwargs: dict) -> bool:
    """A tensor made of one number, torch.tensor(0.0): traced, it would be a constant of
    the graph.
    """
    made = n.target in (torch.tensor, torch.as_tensor) or (
        n.op == "call_method" and n.target == "new_tensor"
    )
    if (
        not made
        or not args
        or type(args[-1]) not in (bool, int, float)
        or not kwargs.keys() <= {"dtype", "device"}
    ):
        return False
    # what is too large for it is infinity to torch.tensor, and not to torch.full
    dtype = n.meta["example_value"].dtype
    return not dtype.is_floating_point or not torch.finfo(dtype).max < abs(args[-1]) < math.inf


def filled(n: fx.Node, args: tuple) -> torch.Tensor:
    example = n.meta["example_value"]
    return torch.full((), args[-1], dtype=example.dtype, device=example.device)


def held(tracer, name: str, value) -> fx.Proxy:
    """A get_attr node of the view, whose module must own what its nodes name."""
    *path, last = name.split(".")
    root = tracer.root
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if not hasattr(root, last):
        setattr(root, last, value)
    return fx.Proxy(tracer.graph.create_node("get_attr", name, (), {}), tracer)


def nodes_after(last: fx.Node):
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


@contextlib.contextmanager
def state_kept():
    """Leave grad mode and autocast as they were, whatever the captured graph does to them."""
    grad = torch.is_grad_enabled()
    cast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}
    cache = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        for device, (on, dtype) in cast.items():
            torch.set_autocast_enabled(device, on)
            torch.set_autocast_dtype(device, dtype)


def capture(gm: fx.GraphModule) -> View | None:
    """The view of a Dynamo graph; None when it holds no tensor to look at.

    What is written down instead of run has Dynamo's own values, as they are at the end of the graph
    and in storages of Dynamo's. Where memory is written to, calls are run; where that was not
    foreseen, all of them.
    """
    written = Written(gm)
    view = captured(gm, written)
    if view is not None and any(unforeseen(n, view, written) for n in view.graph.nodes):
        view = captured(gm, None)
    return view


def unforeseen(n: fx.Node, view: View, written: Written) -> bool:
    """Does this node write to memory, or may it, in a call that does not say so?"""
    owner = view.owner.get(n)
    writes = (
        schema_of(n.target).is_mutable
        if is_lowered(n)
        else owner in view.kept and bool(n.all_input_nodes)
    )
    return writes and owner not in written.writers


def captured(gm: fx.GraphModule, written: Written | None) -> View | None:
    fake_mode = fake_mode_of(gm)
    if fake_mode is None:
        return None
    bodies = {name: capture(body) for name, body in inner_bodies(gm)}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    interpreter = Capture(gm, written)
    with state_kept():
        traced = trace(
            lambda *args: interpreter.run(*args),
            [n.meta["example_value"] for n in placeholders],
            fake_mode,
        )
    live = set(traced.graph.nodes)
    for mine, theirs in zip(
        [n for n in traced.graph.nodes if n.op == "placeholder"], placeholders, strict=True
    ):
        interpreter.value[theirs] = mine
        interpreter.owner[mine] = theirs
        if (
            isinstance(theirs.meta["example_value"], torch.Tensor)
            and theirs.meta["example_value"].requires_grad
        ):
            interpreter.requires_grad.add(mine)
    value = {
        n: pytree.tree_map(lambda v: None if isinstance(v, fx.Node) and v not in live else v, v)
        for n, v in interpreter.value.items()
    }
    return View(
        gm, traced.graph, interpreter.owner, value, interpreter.region, interpreter.requires_grad,
        interpreter.kept, {name: body for name, body in bodies.items() if body is not None},
    )  # fmt: skip


def inner_bodies(gm: fx.GraphModule):
    """Bodies of activation checkpoints, invoke_subgraph and cond that are traced like the graph
    itself.
    """
    seen = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in BODIES:
            continue
        for arg in node.all_input_nodes:
            if arg.op != "get_attr" or arg.target in seen:
                continue
            body = operator.attrgetter(arg.target)(gm)
            if not isinstance(body, fx.GraphModule) or "_checkpoint_context_fn" in body.meta:
                # a selective-checkpoint policy decides operator by operator: keep the operators
                continue
            if all("example_value" in p.meta for p in body.graph.nodes if p.op == "placeholder"):
                seen.add(arg.target)
                yield arg.target, body


def is_lowered(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def is_elementwise(n: fx.Node) -> bool:
    pure = isinstance(n.target, OpOverload) and not schema_of(n.target).is_mutable
    return (
        pure
        and torch.Tag.pointwise in n.target.tags
        and torch.Tag.nondeterministic_seeded not in n.target.tags
    )


def embedded(n: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    """An embedding, if n is one or elementwise code of embeddings alone, and read by
    nothing else.
    """
    pending, inside, seen, table = [n], set(inside), set(), None
    while pending:
        n = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if not is_lowered(n) or not inside.issuperset(n.users):
            return None
        if n.target is torch.ops.aten.embedding.default:
            table = n
        elif is_elementwise(n):
            inside.add(n)
            pending += n.all_input_nodes
        else:
            return None
    return table
