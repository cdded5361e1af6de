"""Runs a Dynamo graph node by node under make_fx and decides for each node how it enters the view:
lowered to ATen without running it, lowered by running it, or copied verbatim.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import fx

from fusion_backend.capture.batch_norm import given_arguments, in_parts, running_statistics
from fusion_backend.capture.predicted_writes import PredictedWrites
from fusion_backend.capture.single_op import SingleOps
from fusion_backend.capture.view import state_key
from fusion_backend.compat.memory import DATA
from fusion_backend.compat.sums_over_ranks import (
    local_part,
    part_in_example,
    partial_sum,
    sum_over_ranks,
)
from fusion_backend.compat.torch import (
    LOG_USAGE,
    STATE_FUNCTIONS,
    FakeTensor,
    HigherOrderOperator,
    get_proxy_mode,
    last_node,
    pytree,
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

AUTOCAST = ("_enter_autocast", "_exit_autocast")


class Opaque:
    """A value that the tracer cannot hold; only its proxy is known."""

    def __init__(self, proxy: fx.Proxy):
        self.proxy = proxy


def is_opaque(value) -> bool:
    return isinstance(value, Opaque)


def traceable(value) -> bool:
    """Can the tracer follow it? It cannot follow subclasses, functorch wrappers and real
    tensors.
    """
    return all(
        type(t) is FakeTensor for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)
    )


class CaptureInterpreter(fx.Interpreter):
    """Builds the view. Its attributes `owner`, `value`, `region`, `requires_grad` and `copied` are
    those of View; `writes` None has every call run.
    """

    def __init__(self, gm: fx.GraphModule, writes: PredictedWrites | None):
        super().__init__(gm, garbage_collect_values=False)
        self.writes = writes
        self.single_ops: SingleOps | None = None
        self.level = 0
        self.state_changed_by: object = None  # the last function that may change unknown state
        self.autocast_stack: list = []
        self.owner: dict[fx.Node, fx.Node] = {}
        self.value: dict[fx.Node, object] = {}
        self.region: dict[fx.Node, object] = {}
        self.requires_grad: set[fx.Node] = set()
        self.copied: dict[fx.Node, str] = {}
        self.names = {id(v): n for n, v in gm.named_modules(remove_duplicate=False)}

    def run_node(self, n: fx.Node):
        mode = get_proxy_mode()
        tracer = mode.tracer
        self.single_ops = self.single_ops or SingleOps(mode)
        if n.op == "output":
            results = self.map_nodes_to_values(n.args[0], n)
            self.single_ops.track(results)
            return fx.node.map_aggregate(results, lambda v: v.proxy if is_opaque(v) else v)
        if n.op == "placeholder":
            out = super().run_node(n)
            self.note(n, out, (), None)
            return out
        last = last_node(tracer.graph)
        name = getattr(n.target, "__name__", "")
        step = LEVELS.get(name, 0) if n.op == "call_function" else 0
        self.level += max(step, 0)
        region = state_key(self.state_changed_by)
        if name in AUTOCAST:
            out = self.autocast(n, name, tracer)
        elif n.op == "get_attr":
            out = self.attribute(n, tracer)
        else:
            why = self.must_copy(n)
            how = self.data if n.target is DATA else self.lower
            parts = partial_sum(n) if why else None
            if parts is not None and is_opaque(self.env.get(parts[0])):
                out = self.sum_over_ranks(n, tracer, *parts)
            else:
                out = self.copy(n, tracer, why) if why else how(n, tracer, last)
        self.level += min(step, 0)
        self.note(n, out, nodes_after(last), region)
        return out

    # A node that is lowered.

    def lower(self, n: fx.Node, tracer, last: fx.Node):
        """Write the node as its single operator, or else run it. If the result of running it
        disagrees with Dynamo, remove the new nodes and copy the node instead.
        """
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        repeatable = self.writes is not None and n not in self.writes.touched
        out = self.single_ops.lower(n, args, kwargs) if repeatable else None
        if out is not None:
            return out
        self.single_ops.track((args, kwargs))
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        proxies = [tracer.unwrap_proxy(a) for a in tensors]
        try:
            if is_filled(n, args, kwargs):
                out = full_tensor(n, args)
            elif running_statistics(n):
                out = in_parts(**given_arguments(args, kwargs))
            else:
                out = super().run_node(n)
            check_agreement(n, out, last)
            if repeatable:
                self.single_ops.remember(n, args, kwargs, list(nodes_after(last)), out)
            return out
        except Exception as error:  # best effort: a node that cannot be lowered is a fence
            gone = [*nodes_after(last)]
            kept = sizes_of_others(gone)
            for new in reversed([m for m in gone if m not in kept]):
                tracer.graph.erase_node(new)
            # a tensor that the node wrote to stands for its old value again
            for a, proxy in zip(tensors, proxies, strict=True):
                if isinstance(proxy, fx.Proxy):
                    track_tensor_tree(a, proxy, constant=None, tracer=tracer)
            return self.copy(n, tracer, f"{type(error).__name__}: {error}")

    def data(self, n: fx.Node, tracer, last: fx.Node):
        """x.data is no operator. It is copied, and run so that the result has the memory of x."""
        args, _ = self.fetch_args_kwargs_from_env(n)
        self.single_ops.track(args)
        self.copied[n] = "no operator: a name for the same memory"
        proxy = tracer.create_proxy(
            n.op, n.target, pytree.tree_map(tracer.unwrap_proxy, args), {}, name=n.name
        )
        return track_tensor_tree(super().run_node(n), proxy, constant=None, tracer=tracer)

    def sum_over_ranks(self, n: fx.Node, tracer, parts: fx.Node, group: str):
        """Lower the sum over ranks of a DTensor to one operator on this rank's part."""
        given = self.env[parts].proxy
        proxy = tracer.create_proxy(
            "call_function", local_part, (given,), {}, name=f"{n.name}_part"
        )
        part = track_tensor_tree(part_in_example(parts), proxy, constant=None, tracer=tracer)
        proxy = tracer.create_proxy(
            "call_function", sum_over_ranks, (tracer.unwrap_proxy(part), group), {}, name=n.name
        )
        return self.value_of_copy(n, proxy, tracer)

    # A node that is copied.

    def must_copy(self, n: fx.Node) -> str:
        """Why the node is not lowered; empty where it is."""
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
        if n.target is LOG_USAGE:
            return "it only counts how often it is called"
        example = n.meta.get("example_value")
        if example is None and n.op == "call_function" and n.target is not operator.setitem:
            self.state_changed_by = n
            return "a function without a value: it may change state"
        return "" if traceable(example) else "a tensor subclass"

    def copy(self, n: fx.Node, tracer, why: str):
        """Put the node itself into the view."""
        self.copied[n] = why
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        self.single_ops.track((args, kwargs))

        def lift(a):
            if is_opaque(a):
                return a.proxy
            if isinstance(a, torch.nn.Module):
                return attribute_node(tracer, self.names.get(id(a), n.name), a)
            return tracer.unwrap_proxy(a)

        args, kwargs = pytree.tree_map(
            lift, (args, kwargs), is_leaf=lambda a: isinstance(a, (Opaque, torch.nn.Module))
        )
        proxy = tracer.create_proxy(n.op, n.target, args, kwargs, name=n.name)
        return self.value_of_copy(n, proxy, tracer)

    def value_of_copy(self, n: fx.Node, proxy: fx.Proxy, tracer):
        """Dynamo's result of a copied node, tracked as the result of its proxy; opaque if the
        tracer cannot follow it.
        """
        for key, item in n.meta.items():
            if key not in ("example_value", "val"):
                proxy.node.meta.setdefault(key, item)
        example = n.meta.get("example_value")
        if example is None or not pytree.tree_leaves(example) or not traceable(example):
            return Opaque(proxy)
        return track_tensor_tree(example, proxy, constant=None, tracer=tracer)

    def attribute(self, n: fx.Node, tracer):
        value = super().run_node(n)
        if not isinstance(value, torch.Tensor):
            return value
        return self.value_of_copy(n, attribute_node(tracer, n.target, value), tracer)

    def autocast(self, n: fx.Node, name: str, tracer):
        """Copy the call and really enter autocast; otherwise the dtypes of the view would be
        wrong.
        """
        out = self.copy(n, tracer, "autocast")
        with without_torch_function():
            if name == "_enter_autocast":
                self.autocast_stack.append(n.target(*n.args, **n.kwargs))
            else:
                n.target(self.autocast_stack.pop())
        return out

    def note(self, n: fx.Node, out, new_nodes, region) -> None:
        """Record what stands for the result of a Dynamo node, and that `new_nodes` are its own."""

        def node_of(v):
            proxy = v.proxy if is_opaque(v) else v
            if isinstance(v, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                proxy = self.single_ops.proxy_of(v)
            if not isinstance(proxy, fx.Proxy):
                return v
            if isinstance(v, torch.Tensor) and v.requires_grad:
                self.requires_grad.add(proxy.node)
            return proxy.node

        self.value[n] = pytree.tree_map(node_of, out, is_leaf=is_opaque)
        for new in new_nodes:
            self.owner[new] = n
            self.region[new] = region
            if "stack_trace" in n.meta:
                new.meta["stack_trace"] = n.meta["stack_trace"]


def sizes_of_others(nodes: list[fx.Node]) -> set[fx.Node]:
    """Those of the nodes that compute numbers from the sizes of tensors that are not among them.
    The tracer makes these nodes when a number is first read, and goes on to use them.
    """
    others, gone = set(), {*nodes}
    for n in nodes:
        number = isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
        if number and gone.isdisjoint(n.all_input_nodes):
            others.add(n)
            gone.discard(n)
    return others


def check_agreement(n: fx.Node, out, last: fx.Node) -> None:
    """Raise ValueError if a retraced node differs from Dynamo's in dtype or rank, or if a value was
    written into the graph as a constant.
    """
    expected = pytree.tree_leaves(n.meta.get("example_value"))
    for have, want in zip(pytree.tree_leaves(out), expected, strict=False):
        if isinstance(want, torch.Tensor) and (
            not isinstance(have, torch.Tensor)
            or (have.dtype, have.dim()) != (want.dtype, want.dim())
        ):
            raise ValueError(f"retracing {n.name} gives {have}, Dynamo says {want}")
    if any(new.op == "get_attr" for new in nodes_after(last)):
        raise ValueError(f"{n.name} bakes a constant in")


def is_filled(n: fx.Node, args: tuple, kwargs: dict) -> bool:
    """Does the call make a tensor of one number, as torch.tensor(0.0) does? Traced as it is, that
    tensor would be a constant of the graph.
    """
    makes_tensor = n.target in (torch.tensor, torch.as_tensor) or (
        n.op == "call_method" and n.target == "new_tensor"
    )
    if (
        not makes_tensor
        or not args
        or type(args[-1]) not in (bool, int, float)
        or not kwargs.keys() <= {"dtype", "device"}
    ):
        return False
    # a number beyond the dtype's range is infinity to torch.tensor, and an error to torch.full
    dtype = n.meta["example_value"].dtype
    return not dtype.is_floating_point or not torch.finfo(dtype).max < abs(args[-1]) < math.inf


def full_tensor(n: fx.Node, args: tuple) -> torch.Tensor:
    """The same tensor by torch.full, which is an operator."""
    example = n.meta["example_value"]
    return torch.full((), args[-1], dtype=example.dtype, device=example.device)


def attribute_node(tracer, name: str, value) -> fx.Proxy:
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
    """The nodes that the graph has after `last`, in order."""
    node = last.next
    while node.op != "root":
        yield node
        node = node.next
