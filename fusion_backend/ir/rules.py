"""The tables of rules, and the decorators that fill them.

`@rule("aten::softplus")` registers what a call of an operator means, and `@composite("mul")` a
larger operator that a canonical product may be. A rule holds no state. It is asked once for each
node (or element), never calls itself, and returns None where it does not apply; the next rule is
then asked. Rules from outside this package are asked before ours, the latest first.
"""

from __future__ import annotations

import inspect
import time
import typing
from collections import UserDict
from collections.abc import Callable, Iterable
from types import UnionType

from torch import fx

from fusion_backend.compat.torch import OpOverload, schema_of
from fusion_backend.ir.argument_names import wrong_names, wrong_subject
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.schema_args import (
    Argument,
    arguments_of,
    given,
    known_value,
    operator_name,
)
from fusion_backend.reporting.reject import PatternError
from fusion_backend.reporting.report import warn_once

PACKAGE = __name__.partition(".")[0]
UNREADABLE = NotImplemented  # the answer of a reader of arguments; None is a missing argument
TABLES: list[Table] = []


class Again(Exception):
    """Raised if a rule needs a value that is not known yet: the rule is asked again once the value
    is known.
    """


class Rule:
    """A function, and how often it was asked and answered since the process began.

    Threads that compile at the same time may lose a count: nothing depends on one.
    """

    def __init__(self, subject: str, function: Callable, context: int = 0):
        self.subject, self.function = subject, function
        self.asked = self.applied = 0
        self.seconds = 0.0
        names = list(inspect.signature(function).parameters.values())[context:]
        types = inspect.get_annotations(function, eval_str=True)
        # The rule's parameters after the context, each with its type.
        self.parameters = [
            (p.name, types.get(p.name), p.default)
            for p in names
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]

    @property
    def where(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def wrong(self, of_operators: bool) -> str:
        """Why the rule can never be asked, with its name and line; empty where it can be, or where
        the operator is not defined yet. Raises nothing.
        """
        why = wrong_subject(self.subject, of_operators)
        why = why or (wrong_names(self.subject, self.parameters) if of_operators else "")
        code = inspect.unwrap(self.function).__code__
        where = f"rule {self.function.__name__} ({code.co_filename}:{code.co_firstlineno})"
        return why and f"{where}: {why}"

    @property
    def built_in(self) -> bool:
        return self.function.__module__.partition(".")[0] == PACKAGE

    def ask(self, *arguments):
        self.asked += 1
        started = time.perf_counter()
        try:
            found = self.function(*arguments)
        except Again:
            self.asked -= 1
            raise
        finally:
            self.seconds += time.perf_counter() - started
        if found is not None:
            self.applied += 1
        return found


class Table(UserDict[str, tuple[Rule, ...]]):
    """Rules by operator, in the order in which they are asked.

    `context` is how many parameters of a rule come before the operator's own arguments.
    `readers` maps the type that a rule gives an argument to a function that reads the argument,
    from the value in the graph and the context. An argument of any other type is read as a plain
    value.
    """

    def __init__(self, name: str, context: int, readers: dict[object, Callable] | None = None):
        self.name, self.context, self.readers = name, context, readers or {}
        self.version = 0  # counts the rules that were added from outside the package
        self.plans: dict[OpOverload, list[tuple[Rule, list]]] = {}
        super().__init__()
        TABLES.append(self)

    def __setitem__(self, subject: str, rules: tuple[Rule, ...]) -> None:
        super().__setitem__(subject, rules)
        self.plans = {}

    def __delitem__(self, subject: str) -> None:
        super().__delitem__(subject)
        self.plans = {}

    def register(self, *subjects: str) -> Callable:
        """Decorator: add a rule. A function of the same name in the same module is replaced, as
        when a cell is run again. Raises PatternError, and adds nothing, where the operator has no
        argument of a name that the function gives: it would never be asked, or never be given it.
        """

        def add(function: Callable) -> Callable:
            added = [Rule(subject, function, self.context) for subject in subjects]
            for new in added:
                if not new.built_in and (why := new.wrong(bool(self.context))):
                    raise PatternError(why)
            for subject, new in zip(subjects, added, strict=True):
                others = [r for r in self.get(subject, ()) if r.where != new.where]
                theirs = [r for r in others if not r.built_in]
                ours = [r for r in others if r.built_in]
                self[subject] = (*theirs, *ours, new) if new.built_in else (new, *theirs, *ours)
                self.version += not new.built_in
            return function

        return add

    def answer(self, subject: str, *arguments):
        """The answer of the first rule that applies; None if none does."""
        for r in self.data.get(subject, ()):
            found = r.ask(*arguments)
            if found is not None:
                return found
        return None

    def plan(self, op: OpOverload) -> list[tuple[Rule, list]]:
        """The rules for an operator, each with how its arguments are read."""
        found = self.plans.get(op)
        if found is None:
            rules = self.get(schema_of(op).name) or self.get(operator_name(op), ())
            planned = [(r, self.reading(r, op)) for r in rules]
            for r in (r for r, how in planned if how is None and not r.built_in):
                if why := r.wrong(bool(self.context)):  # the operator was defined after its rule
                    warn_once(why, f"fusion: {why}; it is never asked")
            found = self.plans[op] = [(r, how) for r, how in planned if how is not None]
        return found

    def reading(self, rule: Rule, op: OpOverload) -> list[tuple[Argument, Callable | None]] | None:
        """How to read each parameter of a rule; None where the operator lacks one that has no
        default.
        """
        known, found = arguments_of(op), []
        for name, kind, default in rule.parameters:
            if name not in known and default is inspect.Parameter.empty:
                return None
            # an argument that the schema lacks is always the default
            argument = known.get(name) or Argument(1 << 30, name, default)
            types = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
            readers = [read for type_, read in self.readers.items() if type_ in types]
            found.append((argument, readers[0] if readers else None))
        return found


def read(node: fx.Node, plan: Iterable, context: tuple) -> list | None:
    """The arguments of a rule, as its plan says; None where one of them cannot be read so."""
    found = []
    for argument, reader in plan:
        value = given(node, argument)
        value = known_value(value) if reader is None else reader(value, *context)
        if value is UNREADABLE:
            return None
        found.append(value)
    return found


def expression(value, c, call) -> Expr | None:
    """An operand: a node's expression, or a number as a constant."""
    if isinstance(value, fx.Node):
        return c.of[value]
    return None if value is None else c.const(value)


def expressions(value, c, call) -> list[Expr]:
    """The operands of cat, stack, einsum and index. The graph may hold something other than a list,
    and an index may leave a dimension unchanged.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(n, fx.Node) for n in value):
        return UNREADABLE
    return [c.of[n] for n in value]


# ATen operator -> expression. A rule gets the builder `c`, the `Call`, and then the arguments.
RULES = Table("expressions", 2, {Expr: expression, list[Expr]: expressions})
# Canonical operator -> another expression of the same value. A rule gets the builder, the operands
# and the shape of the result.
COMPOSITES = Table("composites", 0)

rule = RULES.register
composite = COMPOSITES.register


class Count(typing.NamedTuple):
    """How often one rule was asked, how often it applied, and how long it took."""

    table: str
    subject: str
    rule: str
    asked: int
    applied: int
    seconds: float


def counts() -> list[Count]:
    """Every rule that was asked in this process, the costliest first. The time of a rule includes
    that of the rules that its expressions ask.
    """
    found = [
        Count(table.name, subject, r.where, r.asked, r.applied, r.seconds)
        for table in TABLES
        for subject, rules in table.items()
        for r in rules
        if r.asked
    ]
    return sorted(found, key=lambda c: -c.seconds)


def reset_counts() -> None:
    for table in TABLES:
        for r in (r for rules in table.values() for r in rules):
            r.asked, r.applied, r.seconds = 0, 0, 0.0


def foreign_rules() -> dict[str, Callable]:
    """Rules from outside this package, which change the expressions that patterns are read into."""
    return {
        f"{table.name}: {subject} by {r.where}": r.function
        for table in TABLES
        for subject, rules in table.items()
        for r in rules
        if not r.built_in
    }


def version() -> int:
    """A number that changes with every rule that is added from outside this package."""
    return sum(table.version for table in TABLES)
