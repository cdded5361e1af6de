"""A pattern: an op and the rule that finds it, in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fusion_backend.ops import checks
from fusion_backend.ops.definition import Definition
from fusion_backend.ops.op import Op
from fusion_backend.ops.registry import FUSION_RULES, OPS, register
from fusion_backend.ops.rule import Rule


class Pattern(Rule, Op):
    """A subgraph to find and what to run in its place: the Rule whose replacement is the Op of the
    same arguments. A decorator of the reference.

    The reference is a plain torch function of annotated positional arguments (`Tensor`,
    `Tensor | None`, `float`, `int`, `Tensor | float`, `Literal["relu", "silu"]`) that returns a
    tensor or a tuple of tensors. It is the subgraph to look for, the implementation on CPU, the
    rule for shapes, the default gradient (its vjp) and the test oracle. A pattern with a
    `replacement` of its own may be replaced by another op; its own is then what runs where
    `fusion.gate` is "always" and that op is refused.

    `reciprocal` is an option of Rule, `inductor` one of Op: `@Pattern(inductor="reduction")`. A
    call runs the reference.

    Raises PatternError, naming file and line, where the annotations are not understood or the name
    is taken.
    """

    kind = "pattern"

    def __init__(
        self,
        reference: Callable,
        *,
        reciprocal: bool = False,
        inductor: Literal["pointwise", "reduction", "recomputed"] | None = None,
    ) -> None:
        Definition.__init__(self, reference)
        checks.is_one_of(inductor, checks.INDUCTOR, "inductor", self.where)
        self.inductor = inductor
        self.is_found(reciprocal)
        self.has_no_functions()
        register(self, FUSION_RULES, OPS)
