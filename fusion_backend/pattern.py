"""What a pattern is: a plain torch function, and when, how fast and with what inputs its kernel runs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor


class PatternError(Exception):
    """A pattern is defined wrongly. The message names the pattern, its file and its line."""


@dataclasses.dataclass(frozen=True)
class Reject:
    """The answer "no" of a guard, with its reason: a sentence that a user reads in the report.

    With `forward_only`, from `worthwhile`: in training the forward is left to Inductor as the inlined reference and
    the backward kernel is used all the same.
    """

    reason: str
    forward_only: bool = False


@dataclasses.dataclass(frozen=True)
class LibraryCall:
    """The answer "yes" of a library provider: one call of a torch operator that computes the pattern's result.

    `tensors` are the pattern's arguments that it takes, in order: a name, None for one that is missing, a node of the
    graph that a mask was read back to, or SEED; `options` its keyword arguments; `why` says in the report what is
    gained. The operator may be that of a pattern with a kernel or a gradient of its own, which is then asked whether it
    takes these tensors; `stays` says in the report what becomes of the site if it does not.
    """

    SEED = object()  # an int64 tensor of one number, drawn anew at each call, for a dropout

    op: Callable | Pattern
    tensors: tuple
    options: dict
    why: str
    stays: str = "its mask stays"


@dataclasses.dataclass(frozen=True)
class Param:
    """One argument of a pattern: a tensor, a captured scalar, either, or one of a few words."""

    name: str
    tensor: bool
    scalar: type | None = None
    optional: bool = False
    words: tuple[str, ...] = ()

    def kinds(self) -> tuple[str, ...]:
        """The forms in which a graph may supply this argument. A word is a form of its own: `=relu`."""
        forms = ("tensor",) * self.tensor + ("scalar",) * (self.scalar is not None)
        return forms + ("none",) * self.optional + tuple(f"={w}" for w in self.words)


SCALARS = (float, int)
REGISTRY: dict[str, Pattern] = {}
UNMATCHED: dict[str, Pattern] = {}  # not looked for in graphs


def params_of(fn: Callable, where: str) -> tuple[Param, ...]:
    """Read the parameters off a reference's annotations, or say which one is not understood."""
    try:
        hints = typing.get_type_hints(fn)
    except NameError as error:
        raise PatternError(f"{where}: an annotation cannot be read: {error}") from None
    params = []
    for p in inspect.signature(fn).parameters.values():
        hint = hints.get(p.name)
        if typing.get_origin(hint) is typing.Literal and all(isinstance(w, str) for w in typing.get_args(hint)):
            params.append(Param(p.name, False, words=typing.get_args(hint)))
            continue
        union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        members = set(typing.get_args(hint)) if union else {hint}
        optional = type(None) in members
        scalars = [s for s in SCALARS if s in members]
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) or p.default is not p.empty:
            raise PatternError(f"{where}: argument {p.name} must be positional and without a default")
        if members - {Tensor, type(None), *SCALARS} or len(scalars) > 1 or members == {type(None)}:
            raise PatternError(
                f"{where}: argument {p.name} has annotation {hint!r}; "
                "use Tensor, float, int, Tensor | float, Literal[words], and `| None` where it may be missing"
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
        raise PatternError(f"{where}: it returns {hint!r}; a pattern returns Tensor or tuple[Tensor, Tensor, ...]")
    return len(members)


class Pattern:
    """A subgraph to find and what to run in its place. Use as a decorator of the reference.

    The reference is a plain torch function of annotated positional arguments (`Tensor`, `Tensor | None`, `float`,
    `int`, `Tensor | float`, `Literal["relu", "silu"]`) that returns a tensor or a tuple of tensors. It is the
    subgraph to look for, the CPU implementation, the shape rule, the default gradient (its vjp) and the test oracle.

    Options, as in `@Pattern(reciprocal=True)`:
      reciprocal  division by a constant and multiplication by its reciprocal count as the same
                  (off by default: the two differ by a rounding);
      inductor    what Inductor itself makes of it and can fuse with its neighbours: "pointwise" (as good a kernel:
                  by itself the gate takes only sites in inference without such neighbours), "reduction" (next to
                  such neighbours the forward is inlined), "recomputed" (Inductor's backward, which computes the
                  result again, is faster there as well: nothing is taken), or None (library calls);
      matched     is it looked for in graphs? False: only the library providers of other patterns call its operator.

    Raises PatternError, naming file and line, when the annotations are not understood or the name is taken.
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
        code = reference.__code__
        self.name = reference.__name__
        self.reference = reference
        self.reciprocal, self.inductor = reciprocal, inductor
        self.file, self.line = code.co_filename, code.co_firstlineno
        self.where = f"pattern {self.name} ({self.file}:{self.line})"
        self.params = params_of(reference, self.where)
        self.outputs = outputs_of(reference, self.where)
        self.doc = inspect.getdoc(reference) or inspect.getdoc(inspect.getmodule(reference)) or ""
        self.spellings: list[Callable] = [reference]
        self.near_misses: list[Callable] = []
        self.seeded_fn: Callable | None = None
        self.guard_fn: Callable | None = None
        self.worthwhile_fn: Callable | None = None
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
        self.memo: dict = {}  # what other modules derive from this pattern (templates, its op)
        register(self, REGISTRY if matched else UNMATCHED)

    def __call__(self, *args):
        """Run the reference."""
        return self.reference(*args)

    @property
    def drawn(self) -> tuple[str, ...]:
        """What the op takes besides the reference's arguments: the seed of its random numbers, if it has any."""
        return ("seed",) if self.seeded_fn is not None else ()

    @property
    def can_inline_forward(self) -> bool:
        """May the backward kernel run after an inlined forward? What it reads must be computable without the kernel."""
        return self.backward_fn is not None and (not self.saves or self.saved_fn is not None)

    def __repr__(self):
        return f"<Pattern {self.name} at {self.file}:{self.line}>"

    def forget(self) -> None:
        """What was traced no longer holds. The op stays: it runs the functions themselves."""
        for name in self.memo.keys() - {"op"}:
            del self.memo[name]

    def spelling(self, fn: Callable) -> Callable:
        """Another way of writing the same function, with the same arguments; check_pattern proves that it agrees."""
        self.same_arguments(fn, "spelling")
        self.spellings.append(fn)
        self.memo.clear()
        return fn

    def near_miss(self, fn: Callable) -> Callable:
        """Code that looks like the pattern and is not: check_pattern proves that it is left alone."""
        self.same_arguments(fn, "near miss")
        self.near_misses.append(fn)
        return fn

    def seeded(self, fn: Callable) -> Callable:
        """For a reference with dropout: the same in plain torch, its mask a function of `seed` and the position.

        It takes one more argument, `seed`, an int64 tensor of one number, drawn anew at each call where the pattern is
        used; so do the kernel and whatever is defined after this. It runs in place of the reference where the kernel
        does not, and its vjp is the gradient, so that forward and backward always drop the same elements.
        """
        self.same_arguments(fn, "seeded reference", ("seed",))
        self.seeded_fn = fn
        self.memo.clear()
        return fn

    def guard(self, fn: Callable) -> Callable:
        """May the kernel take these (fake) inputs? Return Reject("why not") or None."""
        self.same_arguments(fn, "guard")
        self.guard_fn = fn
        return fn

    def worthwhile(self, fn: Callable) -> Callable:
        """Is the kernel faster here than what Inductor would generate? Return Reject("why not") or None.

        Called as `fn(*inputs, training)`. Return a Reject only on the strength of a committed measurement.
        """
        self.worthwhile_fn = fn
        return fn

    def kernel(self, fn: Callable | None = None, *, saves: Sequence[str] = ()):
        """The launcher of the forward kernel: same arguments, same results as the reference.

        With `saves=("mean", "rstd")` it takes one more argument, `save: bool`, and returns these
        tensors after the results; they are handed to the backward. When `save` is false nobody will
        read them: return empty tensors.
        """
        if fn is None:
            return functools.partial(self.kernel, saves=saves)
        self.same_arguments(fn, "kernel", (*self.drawn, "save") if saves else self.drawn)
        self.kernel_fn, self.saves = fn, tuple(saves)
        self.memo.clear()
        return fn

    def library(self, fn: Callable | None = None, *, masks: Sequence[str] = ()):
        """Can one call of torch's own library compute it, better than what stands there? Plain autograd does the rest.

        `fn(*inputs, masks, training)` returns a LibraryCall or Reject("why not"). It is asked before the kernel.
        `masks[name]` is what is known of the argument `name`, for those that `masks=` names and that are tensors: a
        kept.Mask, of an integer index a diagonals.Index; `training` says whether a gradient will be asked for.
        """
        if fn is None:
            return functools.partial(self.library, masks=masks)
        self.same_arguments(fn, "library", extra=("masks", "training"))
        self.library_fn, self.library_masks = fn, tuple(masks)
        return fn

    def saved(self, fn: Callable) -> Callable:
        """Plain torch code for what the kernel saves, so that the forward may be inlined and the backward not."""
        self.same_arguments(fn, "saved", self.drawn)
        self.saved_fn = fn
        return fn

    def backward(
        self,
        fn: Callable | None = None,
        *,
        plain: bool = False,
        result: bool = False,
        same: dict[str, str | int] | None = None,
    ):
        """The gradient: `fn(saved, *grad_outputs)` returns one gradient (or None) for each Tensor argument.

        `saved` carries the inputs by name, the kernel's saved tensors by name, with `result=True` the forward's result
        (a tuple where the pattern returns several), and `saved.needs[name]`, whether anybody wants that gradient.
        With `plain=True` it launches no kernel: it is torch code that is better than the vjp of the
        reference, which is used where there is no backward; it may be differentiated again.
        `same={"residual": "x"}`: residual has the gradient of x, and fn returns None for it; a number instead of a
        name: that of the forward's result with this number.
        With `result=True` a gradient that fn has a default for, `dh=None`, is None where nobody used that result;
        otherwise it is zeros.
        """
        if fn is None:
            return functools.partial(self.backward, plain=plain, result=result, same=same)
        self.backward_same = same or {}
        self.backward_fn, self.backward_plain, self.backward_result = fn, plain, result
        given = list(inspect.signature(fn).parameters.values())[1:]
        self.backward_missing = [result and i < len(given) and given[i].default is None for i in range(self.outputs)]
        return fn

    def inputs(self, *cases: dict) -> Callable:
        """Example inputs: `fn(tensor, **case)` returns the arguments. The first case serves tests, the last benchmarks.

        `tensor(*shape)` makes a random floating tensor; the caller decides dtype and device.
        """

        def keep(fn: Callable) -> Callable:
            self.inputs_fn, self.cases = fn, cases or ({},)
            self.memo.clear()
            return fn

        return keep

    def same_arguments(self, fn: Callable, what: str, extra: tuple[str, ...] = ()) -> None:
        want = [*(p.name for p in self.params), *extra]
        have = list(inspect.signature(fn).parameters)
        if have != want:
            line = fn.__code__.co_firstlineno
            raise PatternError(
                f"{self.where}: the {what} at line {line} takes ({', '.join(have)}), not ({', '.join(want)})"
            )


def register(pattern: Pattern, registry: dict[str, Pattern] = REGISTRY) -> None:
    """Add a pattern. A second definition from the same file (a notebook cell run again) replaces the first."""
    old = {**REGISTRY, **UNMATCHED}.get(pattern.name)
    if old is not None and old.file != pattern.file:
        raise PatternError(f"{pattern.where}: the name is taken by {old.where}")
    registry[pattern.name] = pattern


def unregister(name: str) -> None:
    """Forget a pattern (tests and notebooks)."""
    REGISTRY.pop(name, None)
