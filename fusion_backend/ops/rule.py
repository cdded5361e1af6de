"""A rule: a subgraph to find, and what replaces it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from fusion_backend.ops import checks
from fusion_backend.ops.checks import same_arguments, taking
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.op import Op
from fusion_backend.ops.registry import FUSION_RULES, register
from fusion_backend.reporting.reject import PatternError, Reject, Unmeasured

# Name -> analysis(node, graph), which a rule may ask about an argument. decide/analyses.py adds
# ours.
ANALYSES: dict[str, Callable] = {}


class Seed:
    """An int64 tensor of one number, drawn anew at each call: for an op with dropout."""

    def __repr__(self) -> str:
        return "SEED"


SEED = Seed()


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The answer "yes" of a rule: one call, `op(*args, **kwargs)`, that computes what was found.

    op: one of ours (an Op), which is then asked whether it takes these arguments and whether it is
    worthwhile, or any torch operator.
    args: tensors that the replacement function was given, nodes of the graph that an analysis
    found, numbers, words, None, or SEED. kwargs: numbers and words.
    why: the gain, for the report. otherwise: what happens to the site if our op refuses the
    arguments, also for the report. at_last: a slow check, which runs only if nothing else refuses
    the site; it returns a Reject, or None. instead_of: an operator of torch that computes the same;
    where the code calls it on the same tensors, the site is left alone.
    """

    op: Any
    args: tuple
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    why: str = ""
    otherwise: str = "the code stays as it is"
    at_last: Callable[[], Reject | None] | None = None
    instead_of: Any = None

    SEED = SEED


def analysis(fn: Callable) -> Callable:
    """Register an analysis under the name of its function, for `asks=` of a replacement.

    Called as `fn(node, graph)`: the graph node that an argument is bound to, and the
    `fusion_backend.decide.analyses.Facts` of the graph it stands in. What it returns is handed to
    the replacement function as `known[argument]`. Raises PatternError where the name is taken by
    the code of another file.
    """
    name = checks.plain_function(fn, "an analysis").__name__
    old = ANALYSES.get(name)
    if old is not None and old.__code__.co_filename != fn.__code__.co_filename:
        code = old.__code__
        raise PatternError(f"the analysis {name} exists: {code.co_filename}:{code.co_firstlineno}")
    ANALYSES[name] = fn
    return fn


def wrong_replacement(answer: Replacement) -> str:
    """Why a call with these arguments cannot be written into a graph; empty if it can."""
    op, args, kwargs = answer.op, answer.args, answer.kwargs
    if isinstance(op, Op):
        names = [p.name for p in op.params]
        if len(args) > len(names) or {*names[len(args) :]} != {*kwargs}:
            given = ", ".join([*map(repr, range(len(args))), *kwargs])
            return f"a Replacement with ({given}) for {op.name}({', '.join(names)})"
    elif not callable(op):
        return f"a Replacement by {op!r}"
    lists = [v for a in args if isinstance(a, (tuple, list)) for v in a]
    if any(isinstance(v, (Tensor, fx.Node)) for v in (*kwargs.values(), *lists)):
        return "a Replacement with a tensor in a list or by keyword"
    if not any(isinstance(a, (Tensor, fx.Node)) for a in args):
        return "a Replacement without a tensor"
    return ""


class Rule(Definition):
    """A subgraph to find, and what replaces it. A decorator of the reference, which is traced.

    `reciprocal=True`: division by a constant and multiplication by its reciprocal count as the same
    (off by default: the two differ by a rounding).

    Raises PatternError, naming file and line, where the annotations are not understood or the name
    is taken.
    """

    kind = "rule"

    def __init__(self, reference: Callable, *, reciprocal: bool = False) -> None:
        super().__init__(reference)
        self.is_found(reciprocal)
        register(self, FUSION_RULES)

    def is_found(self, reciprocal: bool) -> None:
        """The state before the decorators have run."""
        checks.is_one_of(reciprocal, (True, False), "reciprocal", self.where)
        self.reciprocal = reciprocal
        self.spellings: list[Callable] = [self.reference]
        self.near_misses: list[Callable] = []
        self.neighbours_fn: Callable | None = None
        self.replacement_fn: Callable | None = None
        self.asks: dict[str, str] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the reference."""
        return self.reference(*args)

    def wrong_answer(self, question: str, answer: Any) -> tuple[str, str]:
        """A replacement function has to answer."""
        if question != "replacement":
            return super().wrong_answer(question, answer)
        right = "a Replacement"
        if type(answer) in (Reject, Unmeasured):
            return "", right
        if not isinstance(answer, Replacement):
            return repr(answer), right
        return wrong_replacement(answer), right

    def spelling(self, fn: Callable) -> Callable:
        """Another way of writing the same function, with the same arguments; check_pattern proves
        that it agrees.
        """
        names = [p.name for p in self.params]
        same_arguments(fn, "spelling", names, self.where)
        self.spellings.append(fn)
        self.changed()
        return fn

    def near_miss(self, fn: Callable) -> Callable:
        """Code that looks like the pattern but computes something else: check_pattern proves that
        it is left alone.
        """
        self.near_misses.append(self.takes(fn, "near miss"))
        return fn

    def neighbours(self, fn: Callable) -> Callable:
        """Should the operators around a site leave it to Inductor? Return Reject("why"),
        Unmeasured("why") or None.

        Called as `fn(around, training)`; `around.makers` and `around.readers` are the names of
        operators that the arguments come from and the results go to, `around.unread` the places of
        results that nobody reads.
        """
        self.neighbours_fn = taking(fn, "neighbours", ["around", "training"], self.where)
        return fn

    def replacement(
        self, fn: Callable | None = None, *, asks: Mapping[str, str] | None = None
    ) -> Callable:
        """What replaces a site: `fn(*arguments, known, training)` returns a Replacement or
        Reject("why not").

        The arguments are (fake) tensors, numbers and words, as they were found. `asks` maps names
        of arguments to analyses, `{"mask": "attention_mask"}`; `known[name]` is what the analysis
        says of an argument that is a tensor at this site. `training` says whether a gradient will
        be asked for.
        """
        if fn is None:
            return functools.partial(self.replacement, asks=asks)
        asks = dict(asks or {})
        checks.tensor_names(tuple(asks), self.params, "asks", self.where)
        self.asks = asks
        self.replacement_fn = self.takes(fn, "replacement", ("known", "training"))
        return fn
