"""Settings of Inductor that a call of ours would defeat.

Under `_micro_pipeline_tp` a pass over Inductor's graph makes one call of a collective and a matrix
product beside it (asynchronous tensor parallelism). It looks for the operator `mm`, which a call of
ours that computes the product hides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

from torch import fx

from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.distributed import pipelines_collectives
from fusion_backend.compat.torch import inductor_config, schema_of
from fusion_backend.decide.call import draws_random_numbers
from fusion_backend.match.matcher import Match
from fusion_backend.reporting.places import location

# The first factor of a product, by its place among the arguments. The pass does not pipeline a
# gathered second factor, which is a weight.
PRODUCTS = {"aten::linear": 0, "aten::matmul": 0, "aten::mm": 0, "aten::addmm": 1}
# Parts of names. A DTensor that is redistributed may be gathered or scattered: the view does not
# say which.
GATHERS = ("all_gather", "full_tensor", "redistribute")
SCATTERS = ("reduce_scatter", "redistribute")
# Operators that move elements, besides views.
MOVES = {f"aten::{name}" for name in ("reshape", "flatten", "contiguous", "clone", "cat", "copy_")}
MOVES |= {"_c10d_functional::wait_tensor"}
# Calls that make a DTensor of a tensor and the reverse; and the autograd function in which torch
# 2.11 waits for a collective that has a gradient.
WRAPS = ("to_local", "from_local", "autograd_function_apply")


def asked(match: Match) -> str:
    """Why Inductor's settings rule a site out; "" if they do not."""
    if draws_random_numbers(match) and inductor_config.fallback_random:
        return "Inductor's fallback_random asks for the random numbers that eager draws"
    return pipelined(match) if pipelines_collectives() else ""


def pipelined(match: Match) -> str:
    """Does the site compute a product of a gathered tensor, or one whose result is scattered
    next?
    """
    for n in (*match.interior, *match.roots):
        if name_of(n) not in PRODUCTS:
            continue
        if found := reached([n.args[PRODUCTS[name_of(n)]]], sources, GATHERS):
            return left(f"reads the {kind(found, 'all-gather')} at {location(found)}")
        if found := reached(n.users, lambda n: n.users, SCATTERS):
            return left(f"feeds the {kind(found, 'reduce-scatter')} at {location(found)}")
    return ""


def left(why: str) -> str:
    return f"left to Inductor: its linear layer {why}, which _micro_pipeline_tp pipelines"


def kind(n: fx.Node, known: str) -> str:
    return known if is_lowered(n) else "redistribution"


def reached(
    start: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]], words: tuple[str, ...]
) -> fx.Node | None:
    """The first node with one of these words in its name, through nodes that move elements."""
    pending, seen = [*start], set()
    while pending:
        n = pending.pop()
        if n in seen or n.op not in ("call_function", "call_method"):
            continue
        seen.add(n)
        if any(word in name_of(n) for word in words):
            return n
        if moves(n):
            pending += step(n)
    return None


def sources(n: fx.Node) -> list[fx.Node]:
    return [n.args[1]] if name_of(n) == "aten::copy_" else n.all_input_nodes


def moves(n: fx.Node) -> bool:
    """Are the values those of an argument? Views are, and casts are not."""
    name = name_of(n)
    if n.target is operator.getitem or name in MOVES or any(word in name for word in WRAPS):
        return True
    if not is_lowered(n) or not any(r.alias_info is not None for r in schema_of(n.target).returns):
        return False
    return name != "aten::to" or n.meta["val"].dtype == n.args[0].meta["val"].dtype
