"""Autocast, resolved operator by operator: the casts it would insert, written into the view as nodes.

The captured operator is run alone on fakes under its region's autocast with a recording mode. Leading `_to_copy`s of
its inputs are the casts; they are accepted when the rest equals the operator without autocast on inputs cast before.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from fusion_backend.capture import View, is_lowered
from fusion_backend.functional import value_of
from fusion_backend.torch_api import FakeTensor, TorchDispatchMode, pytree

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
    with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False), torch.no_grad(), Record() as mode:
        out = op(*args, **kwargs)
    return mode.log, out


def casts_of(op, args, kwargs, device: str, dtype: torch.dtype) -> dict[int, torch.dtype] | None:
    """Which flat argument autocast casts to what; None when it does something else to the operator."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    log, out = recorded(op, args, kwargs, device, dtype, True)
    casts: dict[int, torch.dtype] = {}
    rest = list(log)
    while rest and rest[0][0] is aten._to_copy.default and set(rest[0][2]) == {"dtype"}:
        hit = [i for i, leaf in enumerate(leaves) if leaf is rest[0][1][0]]
        if not hit:
            break
        casts |= dict.fromkeys(hit, rest.pop(0)[2]["dtype"])
    cast = [leaf.to(casts[i]) if i in casts else leaf for i, leaf in enumerate(leaves)]
    plain, plain_out = recorded(op, *pytree.tree_unflatten(cast, spec), device, dtype, False)
    same = [f for f, *_ in rest] == [f for f, *_ in plain] and dtypes_of(out) == dtypes_of(plain_out)
    return casts if same else None


def resolve(view: View) -> set[fx.Node]:
    """Write casts into the view. Returns the nodes that autocast changes in a way that no cast expresses: fences."""
    fences: set[fx.Node] = set()
    memo: dict = {}
    for n in list(view.graph.nodes):
        if not is_lowered(n) or n not in view.region:
            continue
        leaves, spec = pytree.tree_flatten((n.args, n.kwargs), is_leaf=lambda a: isinstance(a, fx.Node))
        values = [value_of(a) for a in leaves]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        devices = {v.device.type for v in tensors}
        modes = [(d, dtype) for d, on, dtype in view.region[n][2] if on and d in devices]
        if not modes or not all(type(v) is FakeTensor for v in tensors):
            continue
        device, dtype = modes[0]
        shape = tuple((v.dtype, v.dim()) if isinstance(v, torch.Tensor) else None for v in values)
        key = (n.target, dtype, str(spec), shape)
        if key not in memo:
            args, kwargs = pytree.tree_unflatten(values, spec)
            memo[key] = None
            with contextlib.suppress(Exception), tensors[0].fake_mode:
                memo[key] = casts_of(n.target, args, kwargs, device, dtype)
        if memo[key] is None:
            fences.add(n)
        elif memo[key]:
            write_casts(view, n, leaves, spec, values, memo[key])
    return fences


def write_casts(view: View, n: fx.Node, leaves, spec, values, casts: dict[int, torch.dtype]) -> None:
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
