"""Autocast, resolved operator by operator: the casts it would insert, written into the view as
nodes.

The captured operator is run alone on fakes under its region's autocast with a recording mode.
Leading `_to_copy`s of its inputs are the casts; they are accepted when the rest equals the operator
without autocast on inputs cast before.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from fusion_backend.capture.call_cache import key_of
from fusion_backend.capture.functionalize import value_of
from fusion_backend.capture.tracer import View, is_lowered
from fusion_backend.compat.torch import (
    TO_COPY,
    UNSAFE_VIEW,
    FakeTensor,
    TorchDispatchMode,
    pytree,
    schema_of,
)

aten = torch.ops.aten


class Record(TorchDispatchMode):
    """Keep (operator, args, kwargs, result) of everything that runs."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            self.log.append((func, args, kwargs or {}, out))
        return out


def dtypes_of(out) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]


def recorded(op, args, kwargs, device: str, dtype: torch.dtype, enabled: bool):
    with (
        torch.autocast(device, dtype, enabled=enabled, cache_enabled=False),
        torch.no_grad(),
        Record() as mode,
    ):
        out = op(*args, **kwargs)
    return mode.log, out


def casts_of(op, args, kwargs, device: str, dtype: torch.dtype) -> dict[int, torch.dtype] | None:
    """Which flat argument autocast casts to what; None when it does something else to the operator.

    Leading casts may also be the operator's own, as in attention: the fewest that explain the rest
    are autocast's.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    log, out = recorded(op, args, kwargs, device, dtype, True)
    casts: dict[int, torch.dtype] = {}
    for first in range(len(log) + 1):
        cast = [leaf.to(casts[i]) if i in casts else leaf for i, leaf in enumerate(leaves)]
        if same_without_autocast(
            op, pytree.tree_unflatten(cast, spec), device, dtype, log[first:], out
        ):
            return casts
        func, given, options, _ = log[first] if first < len(log) else (None, (), {}, None)
        hit = [i for i, leaf in enumerate(leaves) if given and leaf is given[0]]
        if func is not TO_COPY or set(options) != {"dtype"} or not hit:
            return casts_of_views(op, leaves, spec, device, dtype, log, out)
        casts |= dict.fromkeys(hit, options["dtype"])
    return None


def casts_of_views(
    op, leaves, spec, device: str, dtype: torch.dtype, log: list, out
) -> dict[int, torch.dtype] | None:
    """Casts of views of the arguments, as einsum makes them, are casts of the arguments: nothing
    reads them uncast.
    """
    views = {
        id(v): i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.dtype != dtype
    }
    casts: dict[int, torch.dtype] = {}
    for func, given, options, result in log:
        sources = [views[id(v)] for v in pytree.tree_leaves((given, options)) if id(v) in views]
        if func is TO_COPY and set(options) == {"dtype"}:
            casts |= dict.fromkeys(sources, options["dtype"])
        elif moves(func):
            views |= {id(v): i for v in pytree.tree_leaves(result) for i in sources}
        elif sources:
            return None
    cast = [leaf.to(casts[i]) if i in casts else leaf for i, leaf in enumerate(leaves)]
    plain, plain_out = recorded(op, *pytree.tree_unflatten(cast, spec), device, dtype, False)
    steps = [[f for f, *_ in done if f is not TO_COPY and not moves(f)] for done in (log, plain)]
    return (
        casts if casts and steps[0] == steps[1] and dtypes_of(out) == dtypes_of(plain_out) else None
    )


def moves(func) -> bool:
    """Does it only give the elements another place?"""
    return func in (aten.clone.default, UNSAFE_VIEW) or any(
        r.alias_info for r in schema_of(func).returns
    )


def same_without_autocast(op, arguments, device: str, dtype: torch.dtype, log: list, out) -> bool:
    """Does the operator do the same without autocast, operator by operator?"""
    try:
        plain, plain_out = recorded(op, *arguments, device, dtype, False)
    except RuntimeError:  # two dtypes, which autocast would have made one
        return False
    steps = [[(f, dtypes_of(result)) for f, _, _, result in done] for done in (log, plain)]
    return steps[0] == steps[1] and dtypes_of(out) == dtypes_of(plain_out)


def resolve(view: View) -> set[fx.Node]:
    """Write casts into the view. Returns the nodes that autocast changes in a way that no cast
    expresses: fences.
    """
    fences: set[fx.Node] = set()
    memo: dict = {}
    for n in list(view.graph.nodes):
        if (
            not is_lowered(n)
            or n not in view.region
            or not any(on for _, on, _ in view.region[n][2])
        ):
            continue
        leaves, spec = pytree.tree_flatten(
            (n.args, n.kwargs), is_leaf=lambda a: isinstance(a, fx.Node)
        )
        values = [value_of(a) for a in leaves]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        devices = {v.device.type for v in tensors}
        modes = [(d, dtype) for d, on, dtype in view.region[n][2] if on and d in devices]
        if not modes or not all(type(v) is FakeTensor for v in tensors):
            continue
        casts = resolved(n.target, values, spec, *modes[0], memo)
        if casts is None:
            fences.add(n)
        elif casts:
            write_casts(view, n, leaves, spec, values, casts)
    return fences


def resolved(
    op, values: list, spec, device: str, dtype: torch.dtype, memo: dict
) -> dict[int, torch.dtype] | None:
    """`casts_of`, remembered by everything that it can depend on: einsum chooses its operators by
    the equation and by which sizes are 1. What has no such key is worked out each time.
    """
    seen = key_of(values)
    key = None if seen is None else (op, str(spec), device, dtype, seen)
    if key in memo:
        return memo[key]
    args, kwargs = pytree.tree_unflatten(values, spec)
    casts = None
    with (
        contextlib.suppress(Exception),
        next(v for v in values if isinstance(v, torch.Tensor)).fake_mode,
    ):
        casts = casts_of(op, args, kwargs, device, dtype)
    if key is not None:
        memo[key] = casts
    return casts


def write_casts(
    view: View, n: fx.Node, leaves, spec, values, casts: dict[int, torch.dtype]
) -> None:
    with view.graph.inserting_before(n):
        for i, dtype in casts.items():
            cast = view.graph.call_function(aten.to.dtype, (leaves[i], dtype))
            with values[i].fake_mode, torch.no_grad():
                cast.meta["val"] = values[i].to(dtype)
            cast.meta["stack_trace"] = n.meta.get("stack_trace")
            view.owner[cast], view.region[cast] = view.owner[n], view.region[n]
            if leaves[i] in view.requires_grad:
                view.requires_grad.add(cast)
            leaves[i] = cast
    n.args, n.kwargs = pytree.tree_unflatten(leaves, spec)
