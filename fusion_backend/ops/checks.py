"""Checks how the parts of a pattern are written: its arguments, the options of its decorators, and
the answers of its functions. A mistake raises a PatternError, when the pattern is defined or, for
an answer, when it is first asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence

from torch import Tensor

from fusion_backend.reporting.reject import PatternError

INDUCTOR = ("pointwise", "reduction", "recomputed", None)
SCALARS = (float, int)


@dataclasses.dataclass(frozen=True)
class Param:
    """One argument of a pattern: a tensor, a captured scalar, either, one of a few words, or any
    text, such as the name of a process group.
    """

    name: str
    tensor: bool
    scalar: type | None = None
    optional: bool = False
    words: tuple[str, ...] = ()
    text: bool = False

    def kinds(self) -> tuple[str, ...]:
        """The forms in which a graph may supply this argument. A word is a form of its own:
        `=relu`.
        """
        forms = ("tensor",) * self.tensor + ("scalar",) * (self.scalar is not None)
        forms += ("text",) * self.text
        return forms + ("none",) * self.optional + tuple(f"={w}" for w in self.words)


def plain_function(fn, what: str) -> types.FunctionType:
    """Code to trace, with arguments that have names; anything else is refused."""
    if not isinstance(fn, types.FunctionType):
        kind = "a class" if isinstance(fn, type) else f"of type {type(fn).__name__}"
        shown = repr(fn) if len(repr(fn).splitlines()) == 1 else "what is decorated"
        name = getattr(fn, "__name__", None) or shown
        hint = "; decorate a function of tensors that computes what it computes"
        raise PatternError(
            f"{what} must be a plain function, written with def; {name} is {kind}{location(fn)}"
            f"{hint if isinstance(fn, type) else ''}"
        )
    return fn


def location(thing) -> str:
    """The file and line of an object that is no function, if Python knows them."""
    try:
        return f" ({inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]})"
    except (OSError, TypeError):
        return ""


def params_of(fn: Callable, where: str) -> tuple[Param, ...]:
    """Read the parameters off a reference's annotations, or say which one is not understood."""
    try:
        hints = typing.get_type_hints(fn)
    except Exception as error:  # evaluating the text of an annotation may raise anything
        raise PatternError(f"{where}: an annotation cannot be read: {error}") from None
    params = []
    for p in inspect.signature(fn).parameters.values():
        hint = hints.get(p.name)
        if typing.get_origin(hint) is typing.Literal and all(
            isinstance(w, str) for w in typing.get_args(hint)
        ):
            params.append(Param(p.name, False, words=typing.get_args(hint)))
            continue
        if hint is str:
            params.append(Param(p.name, False, text=True))
            continue
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        members = set(typing.get_args(hint)) if union else {hint}
        optional = type(None) in members
        scalars = [s for s in SCALARS if s in members]
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.default is not p.empty:
            raise PatternError(
                f"{where}: argument {p.name} must be positional and without a default"
            )
        if members - {Tensor, type(None), *SCALARS} or len(scalars) > 1 or members == {type(None)}:
            raise PatternError(
                f"{where}: argument {p.name} has annotation {hint!r}; "
                "use Tensor, float, int, Tensor | float, str, Literal[words], and `| None` where "
                "it may be missing"
            )
        params.append(Param(p.name, Tensor in members, scalars[0] if scalars else None, optional))
    if not any(p.tensor for p in params):
        raise PatternError(f"{where}: a pattern needs at least one Tensor argument")
    return tuple(params)


def outputs_of(fn: Callable, where: str) -> int:
    """How many tensors a reference returns, by its annotation (one, when there is none)."""
    hint = typing.get_type_hints(fn).get("return", Tensor)
    members = typing.get_args(hint) if typing.get_origin(hint) is tuple else (hint,)
    if not members or any(m is not Tensor for m in members):
        raise PatternError(
            f"{where}: it returns {hint!r}; a pattern returns Tensor or tuple[Tensor, Tensor, ...]"
        )
    return len(members)


def is_one_of(value, allowed: Sequence, option: str, where: str) -> None:
    if not any(value is a or (type(value) is str and value == a) for a in allowed):
        raise PatternError(f"{where}: {option} is {value!r}; use {', '.join(map(repr, allowed))}")


def distinct_names(names: Sequence[str], option: str, where: str) -> tuple[str, ...]:
    """Names as a tuple. A string is one name, not a sequence of letters."""
    if isinstance(names, str) or not all(
        isinstance(name, str) and name.isidentifier() for name in names
    ):
        raise PatternError(f'{where}: {option} is {names!r}; it is a tuple of names, ("mean",) say')
    if len(set(names)) < len(names):
        raise PatternError(f"{where}: {option} is {names!r}, with a name given twice")
    return tuple(names)


def new_names(names: Sequence[str], params: Sequence[Param], where: str) -> tuple[str, ...]:
    """The names of the tensors that a kernel saves. They must differ from those of the arguments,
    because the backward finds both in `saved`.
    """
    names = distinct_names(names, "saves", where)
    taken = [
        name for name in names if name in {"needs", "result", "seed", *(p.name for p in params)}
    ]
    if taken:
        raise PatternError(
            f"{where}: saves names {taken[0]}, which the backward knows as something else"
        )
    return names


def tensor_names(
    names: Sequence[str], params: Sequence[Param], option: str, where: str
) -> tuple[str, ...]:
    tensors = [p.name for p in params if p.tensor]
    wrong = [name for name in distinct_names(names, option, where) if name not in tensors]
    if wrong:
        raise PatternError(
            f"{where}: {option} names {wrong[0]}; its tensors are {', '.join(tensors)}"
        )
    return tuple(names)


def same_gradients(
    same: dict, params: Sequence[Param], outputs: int, where: str
) -> dict[str, str | int]:
    """The `same=` of a backward: an argument's gradient is that of another argument, or of the
    result with this number.
    """
    tensor_names(list(same), params, "same", where)
    for name, other in same.items():
        if type(other) is int and not 0 <= other < outputs:
            raise PatternError(
                f"{where}: same gives {name} the gradient of result {other}; it has {outputs}"
            )
        if type(other) is not int:
            tensor_names([other], params, "same", where)
            if other in same:
                raise PatternError(
                    f"{where}: same gives {name} the gradient of {other}, which has none of its own"
                )
    return dict(same)


def gradients_taken(fn: Callable, outputs: int, result: bool, where: str) -> list[bool]:
    """The gradients that may be None for a backward, among its parameters after `saved`."""
    plain_function(fn, f"{where}: the backward")
    first, *given = [*inspect.signature(fn).parameters.values()] or [None]
    several = bool(given) and given[-1].kind is inspect.Parameter.VAR_POSITIONAL
    if first is None or (len(given) != outputs and not several):
        takes = ", ".join(inspect.signature(fn).parameters)
        gradients = f"saved and {outputs} gradient{'s' if outputs > 1 else ''}"
        raise PatternError(
            f"{where}: the backward at {line_of(fn)} takes ({takes}), not {gradients}"
        )
    defaults = [p.default for p in given if p.default is not inspect.Parameter.empty]
    if any(d is not None for d in defaults):
        raise PatternError(f"{where}: the backward at {line_of(fn)} has a default other than None")
    return [result and i < len(given) and given[i].default is None for i in range(outputs)]


def same_arguments(fn: Callable, what: str, want: list[str], where: str) -> None:
    have = list(inspect.signature(plain_function(fn, f"{where}: the {what}")).parameters)
    if have != want:
        message = f"the {what} at {line_of(fn)} takes ({', '.join(have)}), not ({', '.join(want)})"
        raise PatternError(f"{where}: {message}")


def names_argument(fn: Callable, name: str, params: Sequence[Param], what: str, where: str) -> bool:
    """Does a function name a parameter that is not an argument of the reference?"""
    parameters = inspect.signature(plain_function(fn, f"{where}: the {what}")).parameters
    return name in parameters and name not in [p.name for p in params]


def taking(
    fn: Callable, what: str, want: list[str], where: str, must: Sequence[str] = ()
) -> Callable:
    """Make a function of all of `want` from one that names only the parameters that it reads, in
    any order, or takes the others as `**rest`. The function must name those of `must`.
    """
    parameters = inspect.signature(plain_function(fn, f"{where}: the {what}")).parameters
    rest = [p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    have = [name for name in parameters if name not in rest]
    if have == want:
        return fn
    if not rest and not set(must) <= set(have):
        same_arguments(fn, what, want, where)
    unknown = [name for name in have if name not in want]
    if unknown or any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        message = f"the {what} at {line_of(fn)} takes ({', '.join(parameters)}), not some of "
        raise PatternError(f"{where}: {message}({', '.join(want)})")

    @functools.wraps(fn)
    def selects(*args):
        given = dict(zip(want, args, strict=True))
        return fn(**(given if rest else {name: given[name] for name in have}))

    return selects


def takes_cases(fn: Callable, cases: Sequence[dict], where: str) -> None:
    """Can the example inputs be made from every case?"""
    plain_function(fn, f"{where}: the inputs")
    for case in cases:
        try:
            inspect.signature(fn).bind(None, **case)
        except TypeError as error:
            raise PatternError(
                f"{where}: the inputs at {line_of(fn)} do not take {case!r}: {error}"
            ) from None


def are_cases(cases: Sequence, where: str) -> None:
    """Is each a dict? If the author forgets to call the decorator, the function itself arrives
    instead.
    """
    if wrong := [case for case in cases if not isinstance(case, dict)]:
        raise PatternError(
            f"{where}: inputs takes a dict of sizes for each example, inputs(dict(n=8)), or none, "
            f"inputs(), and then the function; not {wrong[0]!r}"
        )


def is_tuple(made, what: str) -> list:
    """Are the example inputs a tuple? A single tensor would count as a tuple of its rows, and so as
    that many arguments.
    """
    if not isinstance(made, (tuple, list)):
        raise PatternError(
            f"{what} returned {type(made).__name__}, not a tuple of arguments; a single argument "
            "needs a comma, `return (tensor(4, 8),)`"
        )
    return list(made)


def line_of(fn: Callable) -> str:
    return f"line {inspect.unwrap(fn).__code__.co_firstlineno}"
