"""Checks that the operator of a rule has the arguments that the rule names. A rule that names
others would never be asked, and nothing else would report it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch

from fusion_backend.compat.torch import OpOverload, schema_of
from fusion_backend.ir.schema_args import arguments_of


def overloads(operator: str) -> list[OpOverload]:
    """The overloads of an operator such as `aten::add`; none if nobody has defined it yet."""
    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return [] if packet is None else [getattr(packet, o) for o in packet.overloads()]


def ways_of_calling(operator: str) -> str:
    """The arguments of the overloads, in words; those of overloads that take tensors, if there are
    any.
    """
    found = [op for op in overloads(operator) if "out" not in arguments_of(op)]
    of_tensors = [
        op for op in found if any("Tensor" in str(a.type) for a in schema_of(op).arguments)
    ]
    ways = [f"({', '.join(arguments_of(op))})" for op in of_tensors or found]
    return " or ".join(dict.fromkeys(ways))


def wrong_subject(subject: str, of_operators: bool) -> str:
    """Why no operator in a graph can have this name, in words; empty if one may."""
    if "::" not in subject:
        return f'{subject!r} is no operator; write "aten::{subject}"' if of_operators else ""
    if not of_operators:
        name = subject.partition("::")[2]
        return f'a composite is about a canonical operator, "{name}" say, not {subject!r}'
    if subject.startswith("aten::") and not overloads(subject):
        return f"torch has no operator {subject}"
    return ""


def wrong_names(operator: str, parameters: Iterable[tuple[str, object, object]]) -> str:
    """Which parameter of a rule no overload of the operator has, in words; empty where one has all
    of them. `parameters` are names, types and defaults.
    """
    known = [[*arguments_of(op)] for op in overloads(operator)]
    if not known:
        return ""
    names = [name for name, _, _ in parameters]
    nowhere = [name for name in names if not any(name in has for has in known)]
    needed = {name for name, _, default in parameters if default is inspect.Parameter.empty}
    if not nowhere and any(needed <= {*has} for has in known):
        return ""
    what = (
        f"{operator} has no argument {nowhere[0]}"
        if nowhere
        else f"no overload of {operator} has all of ({', '.join(names)})"
    )
    return f"{what}; it takes {ways_of_calling(operator)}"
