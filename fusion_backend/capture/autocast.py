"""Autocast, resolved operator by operator: the casts it would insert become nodes of the view.

Each operator of the view is run alone, on fakes, under its region's autocast, while a dispatch mode
records the operators that it calls. The first `_to_copy`s of its inputs are the casts. They are
accepted if the remaining calls equal those of the operator without autocast on inputs that were
cast beforehand.
"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from fusion_backend.capture.call_cache import key_of
from fusion_backend.capture.view import View, is_lowered, value_of
from fusion_backend.compat.torch import (
    TO_COPY,
    UNSAFE_VIEW,
    FakeTensor,
    TorchDispatchMode,
    pytree,
    schema_of,
)

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def resolve(view: View) -> set[fx.Node]:
    """Write casts into the view. Returns the fences: the nodes that autocast changes in a way that
    casts cannot express.
    """
    fences: set[fx.Node] = set()
    memo: dict = {}
    for n in list(view.graph.nodes):
        if not is_lowered(n) or not any(on for _, on, _ in autocast_around(n, view)):
            continue
        leaves, spec = pytree.tree_flatten(
            (n.args, n.kwargs), is_leaf=lambda a: isinstance(a, fx.Node)
        )
        values = [value_of(a) for a in leaves]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        devices = {v.device.type for v in tensors}
        modes = [(d, dtype) for d, on, dtype in autocast_around(n, view) if on and d in devices]
        if not modes or not all(type(v) is FakeTensor for v in tensors):
            continue
        casts = remembered_casts(n.target, values, spec, *modes[0], memo)
        if casts is None:
            fences.add(n)
        elif casts:
            write_casts(view, n, leaves, spec, values, casts)
    return fences


def autocast_around(n: fx.Node, view: View) -> tuple:
    """(device type, whether autocast is on, its dtype) at the place where the node was computed."""
    return view.region[n][2] if n in view.region else ()


def write_casts(
    view: View, n: fx.Node, leaves, spec, values, casts: dict[int, torch.dtype]
) -> None:
    """Have the node read casts of its flat arguments, and give each cast the node's owner."""
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


def remembered_casts(
    op, values: list, spec, device: str, dtype: torch.dtype, memo: dict
) -> dict[int, torch.dtype] | None:
    """`casts_of`, cached by everything that it can depend on: einsum chooses its operators by the
    equation and by which sizes are 1. Without such a key it runs each time.
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


class CallLog(TorchDispatchMode):
    """Logs (operator, args, kwargs, result) of every operator that runs."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            self.log.append((func, args, kwargs or {}, out))
        return out


def run_logged(op, args, kwargs, device: str, dtype: torch.dtype, enabled: bool):
    """The operators that `op` calls, with autocast or without, and its result."""
    with (
        torch.autocast(device, dtype, enabled=enabled, cache_enabled=False),
        torch.no_grad(),
        CallLog() as mode,
    ):
        out = op(*args, **kwargs)
    return mode.log, out


def casts_of(op, args, kwargs, device: str, dtype: torch.dtype) -> dict[int, torch.dtype] | None:
    """Flat argument -> the dtype that autocast casts it to; None where autocast changes the
    operator in another way.

    The first casts may also be the operator's own, as in attention. Autocast's are the fewest that
    explain the remaining calls.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    log, out = run_logged(op, args, kwargs, device, dtype, True)
    casts: dict[int, torch.dtype] = {}
    for first in range(len(log) + 1):
        arguments = cast_by(casts, leaves, spec)
        if same_without_autocast(op, arguments, device, dtype, log[first:], out):
            return casts
        func, operands, options, _ = log[first] if first < len(log) else (None, (), {}, None)
        sources = [i for i, leaf in enumerate(leaves) if operands and leaf is operands[0]]
        if not casts_alone(func, operands, options) or not sources:
            known = op, leaves, spec, device, dtype, log, out
            return casts_of_views(*known) or casts_of_roundings(*known)
        casts |= dict.fromkeys(sources, options["dtype"])
    return None


def casts_alone(func, operands, options) -> bool:
    """Does it change the dtype of a tensor, and neither its layout nor its device?"""
    if func is not TO_COPY or "dtype" not in options:
        return False
    x, others = operands[0], {k: v for k, v in options.items() if k != "dtype"}
    return all(k in ("layout", "device") and getattr(x, k) == v for k, v in others.items())


def casts_of_views(
    op, leaves, spec, device: str, dtype: torch.dtype, log: list, out
) -> dict[int, torch.dtype] | None:
    """Like `casts_of`, for an operator that casts views of its arguments, as einsum does. They
    count as casts of the arguments if nothing else reads the views.
    """
    views = {
        id(v): i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.dtype != dtype
    }
    casts: dict[int, torch.dtype] = {}
    for func, operands, options, result in log:
        sources = [views[id(v)] for v in pytree.tree_leaves((operands, options)) if id(v) in views]
        if casts_alone(func, operands, options):
            casts |= dict.fromkeys(sources, options["dtype"])
        elif only_moves(func):
            views |= {id(v): i for v in pytree.tree_leaves(result) for i in sources}
        elif sources:
            return None
    return casts if casts and same_steps(op, leaves, spec, casts, device, dtype, log, out) else None


def casts_of_roundings(
    op, leaves, spec, device: str, dtype: torch.dtype, log: list, out
) -> dict[int, torch.dtype] | None:
    """Like `casts_of`, for an operator that reads 16 bits and gives fp32. Autocast has set its
    argument `dtype`, as that of sums and of the softmax of fp16 on CUDA; or it casts what the
    operator has computed, as in a cross entropy, whose log-softmax is rounded. A cast of what is
    read is the same, or rounds less.
    """
    for func, operands, options, _ in log:
        if func is TO_COPY:
            wider = casts_alone(func, operands, options) and operands[0].dtype in HALF
            if not wider or options["dtype"] != torch.float32:
                return None
    casts = in_fp32(leaves)
    return casts if casts and same_steps(op, leaves, spec, casts, device, dtype, log, out) else None


def in_fp32(leaves) -> dict[int, torch.dtype]:
    """Casts of all tensors of 16 bits."""
    tensors = [(i, v) for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]
    return {i: torch.float32 for i, v in tensors if v.dtype in HALF}


def same_steps(
    op, leaves, spec, casts: dict, device: str, dtype: torch.dtype, log: list, out
) -> bool:
    """Does the operator do the same with these casts and without autocast, but for casts and moves
    inside?
    """
    try:
        plain, plain_out = run_logged(op, *cast_by(casts, leaves, spec), device, dtype, False)
    except RuntimeError:  # two dtypes
        return False
    steps = [[f for f, *_ in ran if f is not TO_COPY and not only_moves(f)] for ran in (log, plain)]
    return steps[0] == steps[1] and dtypes_of(out) == dtypes_of(plain_out)


def cast_by(casts: dict, leaves, spec):
    """The arguments, cast."""
    cast = [leaf.to(casts[i]) if i in casts else leaf for i, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(cast, spec)


def same_without_autocast(op, arguments, device: str, dtype: torch.dtype, log: list, out) -> bool:
    """Does the operator do the same without autocast, operator by operator?"""
    try:
        plain, plain_out = run_logged(op, *arguments, device, dtype, False)
    except RuntimeError:  # two dtypes, which autocast would have made equal
        return False
    steps = [[(f, dtypes_of(result)) for f, _, _, result in ran] for ran in (log, plain)]
    return steps[0] == steps[1] and dtypes_of(out) == dtypes_of(plain_out)


def only_moves(func) -> bool:
    """Does the operator only change the order or memory of elements, and not their values?"""
    return func in (aten.clone.default, UNSAFE_VIEW) or any(
        r.alias_info for r in schema_of(func).returns
    )


def dtypes_of(out) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
