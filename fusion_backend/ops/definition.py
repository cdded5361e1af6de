"""The common base of ops and rules: a plain torch function of annotated arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from fusion_backend.ops import checks
from fusion_backend.ops.registry import retire
from fusion_backend.reporting.reject import PatternError, Reject, Settled, Unmeasured
from fusion_backend.reporting.report import warn_once


class Definition:
    """A plain torch function, the *reference*, and what its author says about it.

    The reference has annotated positional arguments (`Tensor`, `Tensor | None`, `float`, `int`,
    `Tensor | float`, `Literal["relu", "silu"]`) and returns a tensor or a tuple of tensors.

    Raises PatternError, naming file and line, where the annotations are not understood or the name
    is taken.
    """

    kind = "definition"  # the word for it in messages

    def __new__(cls, reference: Callable | None = None, **options: Any) -> Any:
        if reference is None:
            return functools.partial(cls, **options)
        return super().__new__(cls)

    def __init__(self, reference: Callable) -> None:
        code = checks.plain_function(reference, f"{self.article} {self.kind}").__code__
        self.name: str = reference.__name__
        self.reference = reference
        self.file, self.line = code.co_filename, code.co_firstlineno
        self.where = f"{self.kind} {self.name} ({self.file}:{self.line})"
        if not self.name.isidentifier():
            raise PatternError(
                f"{self.where}: {self.name} cannot be the name of an operator; write it with def"
            )
        self.params = checks.params_of(reference, self.where)
        self.outputs = checks.outputs_of(reference, self.where)
        self.doc = inspect.getdoc(reference) or inspect.getdoc(inspect.getmodule(reference)) or ""
        self.inputs_fn: Callable | None = None
        self.cases: tuple[dict, ...] = ()
        self.spec = reference.__globals__.get("__spec__")  # of the module as it was loaded
        self.memo: dict = {}  # values that other modules derive from it (templates, its operator)

    @property
    def article(self) -> str:
        return "an" if self.kind[0] in "aeiou" else "a"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self.file}:{self.line}>"

    def changed(self) -> None:
        """A function was added: everything that was derived from the definition is outdated, even
        its operator, whose schema may have changed.
        """
        retire(self)
        self.memo.clear()

    def forget(self) -> None:
        """Forget what was traced. The operator stays valid, because it runs the functions
        themselves.
        """
        for name in self.memo.keys() - {"operator"}:
            del self.memo[name]

    def takes(
        self, fn: Callable, what: str, extra: Sequence[str] = (), must: Sequence[str] = ()
    ) -> Callable:
        """Make a function of the reference's arguments and `extra` from one that names only those
        that it reads, or takes the others as `**rest`. Raises PatternError for other names, or if
        one of `must` is missing.
        """
        names = [*(p.name for p in self.params), *extra]
        return checks.taking(fn, what, names, self.where, must)

    def inputs(self, *cases: dict) -> Callable:
        """Example inputs: `fn(tensor, **case)` returns the arguments. The first case serves tests,
        the last benchmarks.

        `tensor(*shape)` makes a random floating tensor; the caller decides dtype and device.
        """

        checks.are_cases(cases, self.where)

        def keep(fn: Callable) -> Callable:
            checks.takes_cases(fn, cases or ({},), self.where)
            self.inputs_fn, self.cases = fn, cases or ({},)
            self.changed()
            return fn

        return keep

    def ask(self, question: str, *given: Any) -> Any:
        """The answer of the pattern's function for a question ("guard", "worthwhile", "neighbours",
        "replacement"). Raises PatternError if it is no valid answer.
        """
        fn = getattr(self, f"{question}_fn")
        if fn is None:
            return None
        answer = fn(*given)
        wrong, right = self.wrong_answer(question, answer)
        if wrong:
            line = checks.line_of(fn)
            told = f'its {question} at {line} returned {wrong}; it returns Reject("why not") or'
            raise PatternError(f"{self.where}: {told} {right}")
        return answer

    def wrong_answer(self, question: str, answer: Any) -> tuple[str, str]:
        """Why this is no valid answer to a question, in words, with the valid ones; empty if it is
        valid.
        """
        plain = (
            answer is None or type(answer) in (Reject, Unmeasured) or isinstance(answer, Settled)
        )
        return "" if plain else repr(answer), "None"

    def answer(self, question: str, *given: Any) -> Any:
        """`ask` for the gate: any exception refuses the site, and warns the author."""
        # imported late, because it imports Dynamo, which a definition does not need
        from fusion_backend.reporting.faults import refusal

        try:
            return self.ask(question, *given)
        except PatternError as error:
            why = str(error).removeprefix(f"{self.where}: ")
        except Exception as error:
            why, fault = refusal(error, f"its {question}")
            if fault is None:
                return Reject(why)
        told = f"fusion: {self.where}: {why}; the site is left to Inductor"
        warn_once(f"{question} {self.where}", told)
        return Reject(why)
