"""An op: the code that runs at a site. It can be called, tested and timed without any matching."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fusion_backend.ops import checks
from fusion_backend.ops.checks import line_of
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.registry import OPS, register
from fusion_backend.reporting.reject import BackwardOnly, PatternError


class Op(Definition):
    """`torch.ops.fusion.<name>`: a reference, and kernels that compute the same. A decorator.

    The reference is its semantics: the implementation where the kernel does not run, the rule for
    shapes, the default gradient (its vjp) and the test oracle. A call `op(*arguments)` goes through
    torch's dispatcher; `guard` decides between kernel and reference. A rule's replacement may name
    the op; `Pattern` is an op and its rule in one.

    `inductor` says what Inductor makes of the reference, and could fuse with its neighbours:
    "pointwise" (a kernel as good as ours: without measurements the op is used only in inference,
    and only without such neighbours), "reduction" (next to such neighbours the forward is left to
    Inductor), "recomputed" (next to such neighbours the op is not used, because Inductor's
    backward, which computes the result again, is faster too), or None (library calls).

    `group` names the argument that is the name of a process group, if the kernel waits for the
    other ranks of it: then torch.compile runs a graph with the kernel only where all of them have
    compiled it.

    Raises PatternError, naming file and line, where the annotations are not understood or the name
    is taken.
    """

    kind = "op"

    def __init__(
        self,
        reference: Callable,
        *,
        inductor: Literal["pointwise", "reduction", "recomputed"] | None = None,
        group: str | None = None,
    ) -> None:
        super().__init__(reference)
        checks.is_one_of(inductor, checks.INDUCTOR, "inductor", self.where)
        texts = [p.name for p in self.params if p.text]
        checks.is_one_of(group, (None, *texts), "group", self.where)
        self.inductor = inductor
        self.has_no_functions()
        self.group = group
        register(self, OPS)

    def has_no_functions(self) -> None:
        """The state before the decorators have run."""
        self.seeded_fn: Callable | None = None
        self.guard_fn: Callable | None = None
        self.worthwhile_fn: Callable | None = None
        self.kernel_fn: Callable | None = None
        self.saves: tuple[str, ...] = ()
        self.saved_fn: Callable | None = None
        self.backward_fn: Callable | None = None
        self.backward_missing = [False] * self.outputs  # which gradients may be None for it
        self.backward_plain = self.backward_result = False
        self.backward_same: dict[str, str | int] = {}
        self.group: str | None = None
        self.skips = False  # does the kernel leave out results that nobody reads?
        self.narrows = False  # can the kernel round its first result to 16 bits?

    def __call__(self, *args: Any) -> Tensor | tuple[Tensor, ...]:
        """Run the operator on tensors and numbers, with autograd. Where the guard refuses them, the
        reference runs.
        """
        # imported late, because registering an op imports much of torch, which a definition does
        # not need
        from fusion_backend.ops.operator import call

        return call(self, args)

    @property
    def seed_arguments(self) -> tuple[str, ...]:
        """The arguments of the operator besides the reference's: the seed of its random numbers, if
        it draws any.
        """
        return ("seed",) if self.seeded_fn is not None else ()

    @property
    def can_inline_forward(self) -> bool:
        """May the backward kernel run after an inlined forward? The tensors that it reads must be
        computable without the forward kernel.
        """
        return self.backward_fn is not None and (not self.saves or self.saved_fn is not None)

    def wrong_answer(self, question: str, answer: Any) -> tuple[str, str]:
        """Only `worthwhile` may answer BackwardOnly."""
        if isinstance(answer, BackwardOnly):
            no = "a BackwardOnly, which only worthwhile may return"
            return "" if question == "worthwhile" else no, "None"
        return super().wrong_answer(question, answer)

    def seeded(self, fn: Callable) -> Callable:
        """For a reference with dropout: the same in plain torch, its mask a function of `seed` and
        the position.

        It takes one more argument, `seed`, an int64 tensor of one number, drawn anew at each call
        where the pattern is used; so do the kernel and whatever is defined after this. It runs in
        place of the reference where the kernel does not, and its vjp is the gradient, so that
        forward and backward always drop the same elements.
        """
        names = [*(p.name for p in self.params), "seed"]
        checks.same_arguments(fn, "seeded reference", names, self.where)
        if self.kernel_fn is not None or self.saved_fn is not None:
            raise PatternError(
                f"{self.where}: the seeded reference at {line_of(fn)} comes before kernel and saved"
            )
        self.seeded_fn = fn
        self.changed()
        return fn

    def guard(self, fn: Callable) -> Callable:
        """May the kernel take these (fake) inputs? Return Reject("why not") or None."""
        self.guard_fn = self.takes(fn, "guard")
        return fn

    def worthwhile(self, fn: Callable) -> Callable:
        """Is the kernel faster here than what Inductor would generate? Return Reject("why not"),
        Unmeasured("why not"), BackwardOnly("why") or None.

        Called as `fn(*inputs, training)`. Return a Reject only on the strength of a committed
        measurement; where there is none, Unmeasured.
        """
        self.worthwhile_fn = self.takes(fn, "worthwhile", ("training",))
        return fn

    def kernel(self, fn: Callable | None = None, *, saves: Sequence[str] = ()) -> Callable:
        """The launcher of the forward kernel: same arguments, same results as the reference.

        With `saves=("mean", "rstd")` it takes one more argument, `save: bool`, and returns these
        tensors after the results; they are handed to the backward. When `save` is false nobody will
        read them: return empty tensors.

        The kernel of a reference with several results may take one more argument, `read`, a tuple
        with a bool for each result: where nobody reads one, it need not be written, and may be an
        empty tensor. Results that the backward reads are never left out.

        A kernel may also take `result_dtype`: None, or the 16-bit dtype to which everything that
        reads the first result casts it, as linear layers do under autocast. The kernel writes it
        in this dtype, rounded once, and the backward gets its gradient in this dtype.
        """
        if fn is None:
            return functools.partial(self.kernel, saves=saves)
        saves = checks.new_names(saves, self.params, self.where)
        asks = checks.names_argument(fn, "read", self.params, "kernel", self.where)
        skips = asks and self.outputs > 1
        narrows = checks.names_argument(fn, "result_dtype", self.params, "kernel", self.where)
        extra = (*self.seed_arguments, *["save"] * bool(saves), *["read"] * skips)
        extra += ("result_dtype",) * narrows
        self.kernel_fn = self.takes(fn, "kernel", extra, extra)
        self.saves, self.skips, self.narrows = saves, skips, narrows
        self.changed()
        return fn

    def launched(
        self,
        args: Sequence[Any],
        save: bool,
        unread: Collection[int] = (),
        result_dtype: torch.dtype | None = None,
    ) -> Any:
        """The kernel's results for the arguments and, if there is one, the seed. save: will the
        backward read the saved tensors? unread: the places of results that nobody reads.
        result_dtype: what the first result is rounded to.
        """
        rest: list[Any] = [save] if self.saves else []
        rest += [tuple(i not in unread for i in range(self.outputs))] if self.skips else []
        rest += [result_dtype] if self.narrows else []
        return self.kernel_fn(*args, *rest)

    def saved(self, fn: Callable) -> Callable:
        """Plain torch code for the tensors that the kernel saves, so that the forward may be
        inlined and the backward kernel still run.
        """
        self.saved_fn = self.takes(fn, "saved", self.seed_arguments, self.seed_arguments)
        self.changed()
        return fn

    def backward(
        self,
        fn: Callable | None = None,
        *,
        plain: bool = False,
        result: bool = False,
        same: dict[str, str | int] | None = None,
    ) -> Callable:
        """The gradient: `fn(saved, *grad_outputs)` returns one gradient (or None) for each Tensor
        argument.

        `saved` carries the inputs by name, the kernel's saved tensors by name, with `result=True`
        the forward's result (a tuple where the pattern returns several), and `saved.needs[name]`,
        whether anybody wants that gradient. With `plain=True` it launches no kernel: it is torch
        code that is better than the vjp of the reference, which is used where there is no backward;
        it may be differentiated again. `same={"residual": "x"}`: residual has the gradient of x
        where fn returns None for it; a number instead of a name: that of the forward's result with
        this number. With `result=True` a gradient that fn has a default for, `dh=None`, is None
        where nobody used that result; otherwise it is zeros.
        """
        if fn is None:
            return functools.partial(self.backward, plain=plain, result=result, same=same)
        checks.is_one_of(plain, (True, False), "plain", self.where)
        checks.is_one_of(result, (True, False), "result", self.where)
        self.backward_missing = checks.gradients_taken(fn, self.outputs, result, self.where)
        self.backward_same = checks.same_gradients(
            same or {}, self.params, self.outputs, self.where
        )
        self.backward_fn, self.backward_plain, self.backward_result = fn, plain, result
        self.changed()
        return fn
