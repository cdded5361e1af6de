"""The nodes and numbers of the graph that hold what a template's arguments are bound to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fusion_backend.ir.argument_views import BY_NUMBERS, OF_COMPLEX, Viewed, original, permuted
from fusion_backend.ir.expr import Expr, peel
from fusion_backend.match.templates import Template
from fusion_backend.match.unify import Bound

HALVES = {torch.bfloat16, torch.float16}
# The operators that a Viewed may put around a node.
VIEWS = ("permute", "half", "slice", "unsqueeze", "not", "times", *OF_COMPLEX, *BY_NUMBERS)


def mixed(env: dict, arguments: dict) -> str:
    """Without its cast, would an argument reach a matrix product whose other operand keeps its
    dtype?
    """
    bounds = {name: b for name, b in env.items() if isinstance(b, Bound)}
    pinned = {original(arguments[name]).dtype for name, b in bounds.items() if b.pinned}
    uncast = {
        original(arguments[name]).dtype
        for name, b in bounds.items()
        if not b.pinned and b.expr.op == "cast"
    }
    told = "the operands of a matrix product would differ in dtype"
    return told if pinned and uncast - pinned else ""


def without_upcasts(t: Template, env: dict) -> dict:
    """Operands of matrix products taken before their cast to fp32, if an operand of the last
    product has their dtype without a cast; else nothing. Scores of bf16 are those of the same
    numbers in fp32, because a kernel sums both in fp32. The weights must be rounded for the last
    product in the graph as well, so its operand may not be one of those that were cast.
    """
    pinned = {name: b.expr for name, b in env.items() if isinstance(b, Bound) and b.pinned}
    uncast = {name: without_upcast(e) for name, e in pinned.items()}
    found = {name: e for name, e in uncast.items() if e is not None}
    dtypes = {dtype_of(found.get(name, e)) for name, e in pinned.items()}
    last = {a.attr for root in t.roots if root.op == "matmul" for a in root.args if a.op == "var"}
    if len(dtypes) != 1 or not dtypes < HALVES or not found or not last or last & found.keys():
        return {}
    return env | {name: Bound(e, True) for name, e in found.items()}


def without_upcast(e: Expr) -> Expr | None:
    if e.op == "cast":
        inner = unwidened(e)
        return None if inner is e else inner
    if e.op == "permute" and not e.nodes:
        inner = without_upcast(e.args[0])
        return None if inner is None else permuted(inner, e.attr)
    return None


def dtype_of(e: Expr) -> torch.dtype | None:
    while e.op == "permute" and not e.nodes:
        e = e.args[0]
    return e.nodes[0].meta["val"].dtype if e.nodes else None


def unwidened(e: Expr) -> Expr:
    """The value before its casts from 16 bits to fp32, which do not change it."""
    while e.op == "cast" and e.attr == torch.float32 and dtype_of(e.args[0]) in HALVES:
        e = e.args[0]
    return e


def unchanged(e: Expr) -> Expr:
    return e


def ways_to_read(env: dict) -> tuple[Callable[[Expr], Expr], ...]:
    """How arguments may be read that need not be in the dtype in which the graph reads them: before
    casts that do not change them, before all roundings, or as they are.
    """
    free = [b.expr for b in env.values() if isinstance(b, Bound) and not b.pinned]
    rounded = any(unwidened(e) is not peel(e) for e in free)
    return (unwidened, peel, unchanged) if rounded else (peel, unchanged)


def arguments_of(
    t: Template, env: dict, read: Callable[[Expr], Expr], through: bool
) -> dict[str, object] | str:
    """The arguments as nodes and numbers; a sentence where no node holds one. `read` is one of
    `ways_to_read`.
    """
    arguments: dict[str, object] = {}
    for p, kind in zip(t.pattern.params, t.kinds, strict=True):
        if kind == "text":
            arguments[p.name] = env[p.name]
            continue
        if kind != "tensor":
            word = kind.removeprefix("=") if p.words else None
            arguments[p.name] = word if p.words or kind == "none" else p.scalar(env[p.name])
            continue
        arguments[p.name] = argument_of(env[p.name], read, through)
        if arguments[p.name] is None:
            return (
                f"argument {p.name} is computed inside one operator: no node of the graph holds it"
            )
    return arguments


def argument_of(
    bound: Bound, read: Callable[[Expr], Expr], through: bool = False
) -> fx.Node | Viewed | None:
    """The first node with the bound value.

    `through`: look through a permutation that the user wrote for another purpose, because a linear
    layer reads the weight itself.
    """
    e = bound.expr if bound.pinned else read(bound.expr)
    through = through and e.op == "permute" and bool(e.args[0].nodes)
    if e.nodes and not through:
        return e.nodes[0]
    if e.graph_value is not None and e.graph_value.nodes:
        return e.graph_value.nodes[0]
    steps: list[tuple[str, tuple]] = []
    while e.op in VIEWS and (through or not e.nodes):
        through = False
        number = next((a for a in e.args if a.of_run_time), None)
        attr = (e.attr,) if e.op in ("unsqueeze", "times") else e.attr or ()
        steps.insert(0, (e.op, (number.nodes[0],) if number else attr))
        if e.op in BY_NUMBERS and (number is None or (e.op == "div" and e.args[0] is number)):
            return None
        e = next(a for a in e.args if a is not number)
    if not e.nodes and e.rows is not None:
        seen_as = len(e.shape) - len(e.rows.shape) + 1  # dimensions in place of the first
        steps.insert(0, ("unflatten", e.shape[:seen_as]))
        e = e.rows
    plain = all(isinstance(v, (int, fx.Node)) for _, attr in steps for v in attr)
    return Viewed(e.nodes[0], tuple(steps)) if e.nodes and plain else None
