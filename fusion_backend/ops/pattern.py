"""What a pattern is: a plain torch function, and when, how fast and with what inputs its kernel
runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from fusion_backend.ops import definition
from fusion_backend.ops.definition import line_of, same_arguments
from fusion_backend.reporting.reject import PatternError, Reject
from fusion_backend.reporting.report import warn_once


@dataclasses.dataclass(frozen=True)
class LibraryCall:
    """The answer "yes" of a library provider: one call of a torch operator that computes the
    pattern's result.

    `tensors` are the pattern's arguments that it takes, in order: a name, None for one that is
    missing, a node of the graph that a mask was read back to, or SEED; `options` its keyword
    arguments; `why` says in the report what is gained. The operator may be that of a pattern with a
    kernel or a gradient of its own, which is then asked whether it takes these tensors; `stays`
    says in the report what becomes of the site if it does not.
    """

    SEED = object()  # an int64 tensor of one number, drawn anew at each call, for a dropout

    op: Callable | Pattern
    tensors: tuple
    options: dict
    why: str
    stays: str = "its mask stays"


Question = Literal["guard", "worthwhile", "neighbours", "library"]
REGISTRY: dict[str, Pattern] = {}
UNMATCHED: dict[str, Pattern] = {}  # not looked for in graphs
LOADING = contextvars.ContextVar("fusion_loading", default=False)


class Pattern:
    """A subgraph to find and what to run in its place. Use as a decorator of the reference.

    The reference is a plain torch function of annotated positional arguments (`Tensor`, `Tensor |
    None`, `float`, `int`, `Tensor | float`, `Literal["relu", "silu"]`) that returns a tensor or a
    tuple of tensors. It is the subgraph to look for, the CPU implementation, the shape rule, the
    default gradient (its vjp) and the test oracle.

    Options, as in `@Pattern(reciprocal=True)`:
      reciprocal  division by a constant and multiplication by its reciprocal count as the same
                  (off by default: the two differ by a rounding);
      inductor    what Inductor itself makes of it and can fuse with its neighbours: "pointwise" (as good a kernel:
                  by itself the gate takes only sites in inference without such neighbours), "reduction" (next to
                  such neighbours the forward is inlined), "recomputed" (Inductor's backward, which computes the
                  result again, is faster there as well: nothing is taken), or None (library calls);
      matched     is it looked for in graphs? False: only the library providers of other patterns call its operator.

    Raises PatternError, naming file and line, when the annotations are not understood or the name
    is taken.
    """

    def __new__(cls, reference: Callable | None = None, **options):
        if reference is None:
            return functools.partial(cls, **options)
        return super().__new__(cls)

    def __init__(
        self,
        reference: Callable,
        *,
        reciprocal: bool = False,
        inductor: Literal["pointwise", "reduction", "recomputed"] | None = None,
        matched: bool = True,
    ):
        code = definition.plain_function(reference, "a pattern").__code__
        self.name = reference.__name__
        self.reference = reference
        self.reciprocal, self.inductor = reciprocal, inductor
        self.file, self.line = code.co_filename, code.co_firstlineno
        self.where = f"pattern {self.name} ({self.file}:{self.line})"
        if not self.name.isidentifier():
            raise PatternError(f"{self.where}: {self.name} cannot be the name of an operator")
        definition.is_one_of(inductor, definition.INDUCTOR, "inductor", self.where)
        definition.is_one_of(reciprocal, (True, False), "reciprocal", self.where)
        definition.is_one_of(matched, (True, False), "matched", self.where)
        self.params = definition.params_of(reference, self.where)
        self.outputs = definition.outputs_of(reference, self.where)
        self.doc = inspect.getdoc(reference) or inspect.getdoc(inspect.getmodule(reference)) or ""
        self.spellings: list[Callable] = [reference]
        self.near_misses: list[Callable] = []
        self.seeded_fn: Callable | None = None
        self.guard_fn: Callable | None = None
        self.worthwhile_fn: Callable | None = None
        self.neighbours_fn: Callable | None = None
        self.kernel_fn: Callable | None = None
        self.library_fn: Callable | None = None
        self.library_masks: tuple[str, ...] = ()
        self.saves: tuple[str, ...] = ()
        self.saved_fn: Callable | None = None
        self.backward_fn: Callable | None = None
        self.backward_missing = [False] * self.outputs  # which results' gradients it takes None for
        self.backward_plain = self.backward_result = False
        self.backward_same: dict[str, str | int] = {}
        self.inputs_fn: Callable | None = None
        self.cases: tuple[dict, ...] = ()
        self.spec = reference.__globals__.get("__spec__")  # of the module as it was loaded
        self.memo: dict = {}  # what other modules derive from this pattern (templates, its op)
        register(self, REGISTRY if matched else UNMATCHED)

    def __call__(self, *args):
        """Run the reference."""
        return self.reference(*args)

    @property
    def drawn(self) -> tuple[str, ...]:
        """What the op takes besides the reference's arguments: the seed of its random numbers, if
        it has any.
        """
        return ("seed",) if self.seeded_fn is not None else ()

    @property
    def can_inline_forward(self) -> bool:
        """May the backward kernel run after an inlined forward? What it reads must be computable
        without the kernel.
        """
        return self.backward_fn is not None and (not self.saves or self.saved_fn is not None)

    def __repr__(self):
        return f"<Pattern {self.name} at {self.file}:{self.line}>"

    def forget(self) -> None:
        """What was traced no longer holds. The op stays: it runs the functions themselves."""
        for name in self.memo.keys() - {"op"}:
            del self.memo[name]

    def takes(self, fn: Callable, what: str, extra: Sequence[str] = ()) -> None:
        same_arguments(fn, what, [*(p.name for p in self.params), *extra], self.where)

    def ask(self, what: Question, *given) -> Reject | LibraryCall | None:
        """What the guard, worthwhile or library answers. Raises PatternError where that is no
        answer.
        """
        fn = getattr(self, f"{what}_fn")
        if fn is None:
            return None
        answer = fn(*given)
        wrong = wrong_answer(self, what, answer)
        if wrong:
            yes = "a LibraryCall" if what == "library" else "None"
            told = f'its {what} at {line_of(fn)} returned {wrong}; it returns Reject("why not") or {yes}'
            raise PatternError(f"{self.where}: {told}")
        return answer

    def asked(self, what: Question, *given) -> Reject | LibraryCall | None:
        """The same for a gate: whatever goes wrong refuses the site, with a warning to the
        pattern's author.
        """
        # not for whoever only defines patterns: it imports Dynamo
        from fusion_backend.reporting.faults import refusal

        try:
            return self.ask(what, *given)
        except PatternError as error:
            why = str(error).removeprefix(f"{self.where}: ")
        except Exception as error:
            why, fault = refusal(error, f"its {'library provider' if what == 'library' else what}")
            if fault is None:
                return Reject(why)
        warn_once(
            f"{what} {self.where}", f"fusion: {self.where}: {why}; the site is left to Inductor"
        )
        return Reject(why)

    def spelling(self, fn: Callable) -> Callable:
        """Another way of writing the same function, with the same arguments; check_pattern proves
        that it agrees.
        """
        self.takes(fn, "spelling")
        self.spellings.append(fn)
        self.memo.clear()
        return fn

    def near_miss(self, fn: Callable) -> Callable:
        """Code that looks like the pattern and is not: check_pattern proves that it is
        left alone.
        """
        self.takes(fn, "near miss")
        self.near_misses.append(fn)
        return fn

    def seeded(self, fn: Callable) -> Callable:
        """For a reference with dropout: the same in plain torch, its mask a function of `seed` and
        the position.

        It takes one more argument, `seed`, an int64 tensor of one number, drawn anew at each call
        where the pattern is used; so do the kernel and whatever is defined after this. It runs in
        place of the reference where the kernel does not, and its vjp is the gradient, so that
        forward and backward always drop the same elements.
        """
        self.takes(fn, "seeded reference", ("seed",))
        if self.kernel_fn is not None or self.saved_fn is not None:
            raise PatternError(
                f"{self.where}: the seeded reference at {line_of(fn)} comes before kernel and saved"
            )
        self.seeded_fn = fn
        self.memo.clear()
        return fn

    def guard(self, fn: Callable) -> Callable:
        """May the kernel take these (fake) inputs? Return Reject("why not") or None."""
        self.takes(fn, "guard")
        self.guard_fn = fn
        return fn

    def worthwhile(self, fn: Callable) -> Callable:
        """Is the kernel faster here than what Inductor would generate? Return Reject("why not") or
        None.

        Called as `fn(*inputs, training)`. Return a Reject only on the strength of a committed
        measurement.
        """
        self.takes(fn, "worthwhile", ("training",))
        self.worthwhile_fn = fn
        return fn

    def neighbours(self, fn: Callable) -> Callable:
        """Should it be left to Inductor for what stands around it? Return Reject("why") or None.

        Called as `fn(around, training)`; `around.makers` and `around.readers` are the names of
        operators that the arguments come from and the results go to, `around.unread` the places of
        results that nobody reads.
        """
        same_arguments(fn, "neighbours", ["around", "training"], self.where)
        self.neighbours_fn = fn
        return fn

    def kernel(self, fn: Callable | None = None, *, saves: Sequence[str] = ()):
        """The launcher of the forward kernel: same arguments, same results as the reference.

        With `saves=("mean", "rstd")` it takes one more argument, `save: bool`, and returns these
        tensors after the results; they are handed to the backward. When `save` is false nobody will
        read them: return empty tensors.
        """
        if fn is None:
            return functools.partial(self.kernel, saves=saves)
        saves = definition.new_names(saves, self.params, self.where)
        self.takes(fn, "kernel", (*self.drawn, "save") if saves else self.drawn)
        self.kernel_fn, self.saves = fn, saves
        self.memo.clear()
        return fn

    def library(self, fn: Callable | None = None, *, masks: Sequence[str] = ()):
        """Can one call of torch's own library compute it, better than what stands there? Plain
        autograd does the rest.

        `fn(*inputs, masks, training)` returns a LibraryCall or Reject("why not"). It is asked
        before the kernel. `masks[name]` is what is known of the argument `name`, for those that
        `masks=` names and that are tensors: a kept.Mask, of an integer index a diagonals.Index;
        `training` says whether a gradient will be asked for.
        """
        if fn is None:
            return functools.partial(self.library, masks=masks)
        self.takes(fn, "library", ("masks", "training"))
        self.library_masks = definition.tensor_names(masks, self.params, "masks", self.where)
        self.library_fn = fn
        return fn

    def saved(self, fn: Callable) -> Callable:
        """Plain torch code for what the kernel saves, so that the forward may be inlined and the
        backward not.
        """
        self.takes(fn, "saved", self.drawn)
        self.saved_fn = fn
        self.memo.clear()
        return fn

    def backward(
        self,
        fn: Callable | None = None,
        *,
        plain: bool = False,
        result: bool = False,
        same: dict[str, str | int] | None = None,
    ):
        """The gradient: `fn(saved, *grad_outputs)` returns one gradient (or None) for each Tensor
        argument.

        `saved` carries the inputs by name, the kernel's saved tensors by name, with `result=True`
        the forward's result (a tuple where the pattern returns several), and `saved.needs[name]`,
        whether anybody wants that gradient. With `plain=True` it launches no kernel: it is torch
        code that is better than the vjp of the reference, which is used where there is no backward;
        it may be differentiated again. `same={"residual": "x"}`: residual has the gradient of x,
        and fn returns None for it; a number instead of a name: that of the forward's result with
        this number. With `result=True` a gradient that fn has a default for, `dh=None`, is None
        where nobody used that result; otherwise it is zeros.
        """
        if fn is None:
            return functools.partial(self.backward, plain=plain, result=result, same=same)
        definition.is_one_of(plain, (True, False), "plain", self.where)
        definition.is_one_of(result, (True, False), "result", self.where)
        self.backward_missing = definition.gradients_taken(fn, self.outputs, result, self.where)
        self.backward_same = definition.same_gradients(
            same or {}, self.params, self.outputs, self.where
        )
        self.backward_fn, self.backward_plain, self.backward_result = fn, plain, result
        self.memo.clear()
        return fn

    def inputs(self, *cases: dict) -> Callable:
        """Example inputs: `fn(tensor, **case)` returns the arguments. The first case serves tests,
        the last benchmarks.

        `tensor(*shape)` makes a random floating tensor; the caller decides dtype and device.
        """

        def keep(fn: Callable) -> Callable:
            definition.takes_cases(fn, cases or ({},), self.where)
            self.inputs_fn, self.cases = fn, cases or ({},)
            self.memo.clear()
            return fn

        return keep


def wrong_answer(pattern: Pattern, what: str, answer) -> str:
    """Why this is no answer of a guard, worthwhile or library, in words; empty where it is one."""
    if isinstance(answer, Reject):
        half = answer.forward_only and what != "worthwhile"
        return "a Reject with forward_only, which only worthwhile may" if half else ""
    if isinstance(answer, LibraryCall) and what == "library":
        arguments = {p.name for p in pattern.params}
        unknown = [t for t in answer.tensors if isinstance(t, str) and t not in arguments]
        return f"a LibraryCall on {unknown[0]!r}, which is no argument" if unknown else ""
    return "" if answer is None and what != "library" else repr(answer)


def register(pattern: Pattern, registry: dict[str, Pattern] = REGISTRY) -> None:
    """Add a pattern. A definition that is run again (a notebook's cell, a module reloaded) replaces
    the first.

    Raises PatternError where another pattern has the name; inside `clashes_left_out` that is a
    warning.
    """
    name = pattern.name
    old = {**REGISTRY, **UNMATCHED}.get(name)
    why = ""
    if old is None:
        stem = name.removesuffix("_backward")
        other = next(
            (p for p in (*REGISTRY.values(), *UNMATCHED.values()) if p.name == stem != name), None
        )
        why = f"the name is that of the gradient of {other.where}" if other else ""
    elif old.reference.__code__ is pattern.reference.__code__:
        why = (
            "this definition has made a pattern before, and the name would stand for both: a function that makes "
            f"patterns gives each a name of its own (`reference.__name__ = ...` before `Pattern(reference)`), or calls "
            f"fusion_backend.ops.pattern.unregister({name!r}) first"
        )
    elif not run_again(old, pattern):
        why = f"the name is taken by {old.where}"
    if why and LOADING.get():
        warn_once(f"name {pattern.where}", f"fusion: {pattern.where}: {why}; it is left out")
        return
    if why:
        raise PatternError(f"{pattern.where}: {why}")
    if old is not None and registry.get(name) is not old:
        unregister(name)
    retire(old)
    registry[name] = pattern


def run_again(old: Pattern, new: Pattern) -> bool:
    """Has the code that defined `old` been run anew: a cell, edited or not, or a file that is
    loaded again?
    """
    before, now = old.reference.__globals__, new.reference.__globals__
    if before is now and ("__file__" not in now or not Path(new.file).is_file()):
        return True  # a notebook or a prompt, where the name is bound again
    # `reload` keeps a module's globals and gives it another spec; other ways to run a file give it
    # other globals.
    same = old.file == new.file and before.get("__name__") == now.get("__name__")
    return same and (before is not now or old.spec is not new.spec)


def retire(pattern: Pattern | None) -> None:
    """What a pattern that is no longer registered has left in torch: its operators."""
    op = pattern.memo.pop("op", None) if pattern is not None else None
    if op is not None:
        op.remove()


def unregister(name: str) -> None:
    """Forget a pattern (tests and notebooks)."""
    retire(REGISTRY.pop(name, None))
    retire(UNMATCHED.pop(name, None))


def registered(pattern: Pattern) -> bool:
    """False where another pattern has its name."""
    return {**REGISTRY, **UNMATCHED}.get(pattern.name, pattern) is pattern


@contextlib.contextmanager
def clashes_left_out():
    """Inside, a pattern whose name is taken is left out, with a warning, and its file goes on."""
    token = LOADING.set(True)
    try:
        yield
    finally:
        LOADING.reset(token)
