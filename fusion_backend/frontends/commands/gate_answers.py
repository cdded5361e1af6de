"""What a pattern's own functions say about its example inputs, on tensors without data.

The order of the questions is that of `decide/gate.py`, for a site alone in a graph on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fusion_backend.decide.call import by_name
from fusion_backend.decide.neighbours import FUSES_GRADIENT
from fusion_backend.match.templates import backward_of, example_inputs, templates
from fusion_backend.ops.op import Op
from fusion_backend.ops.rule import SEED, Replacement, Rule
from fusion_backend.reporting.reject import BackwardOnly, Reject

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEPENDS = "it depends"


class Answer(NamedTuple):
    """fused: "forward", "forward and backward", "backward", "" for nothing, or "it depends"."""

    case: dict
    dtype: str
    training: bool
    fused: str
    reason: str


def answers(rule: Rule) -> list[Answer]:
    """For each example and dtype, in inference and, where there is a gradient, in training."""
    modes = (False,) if backward_of(rule).startswith("none") else (False, True)
    return [
        Answer(case, dtype, training, *answer(rule, case, DTYPES[dtype], training))
        for case in rule.cases or ({},)
        for dtype in DTYPES
        for training in modes
    ]


def answer(rule: Rule, case: dict, dtype: torch.dtype, training: bool) -> tuple[str, str]:
    """What is fused, and the reason."""
    if rule.asks:  # an analysis needs a graph, and there is none here
        return DEPENDS, f"on what {', '.join(rule.asks)} is made of in the graph"
    replacement = replacement_of(rule, case, dtype, training)
    if isinstance(replacement, Reject):
        return "", replacement.reason
    whole, op = "forward and backward" if training else "forward", replacement.op
    if not isinstance(op, Op):
        return whole, replacement.why
    if op is rule and op.kernel_fn is None:
        return "", "no kernel yet"
    values = [*by_name(op, map(value_of, replacement.args), replacement.kwargs).values()]
    refused = op.ask("guard", *values) or op.ask("worthwhile", *values, training)
    taken = refused is None or isinstance(refused, BackwardOnly)
    if taken and training and op.inductor == "pointwise":
        return "", FUSES_GRADIENT.reason
    if refused is None:
        return whole, replacement.why
    if isinstance(refused, BackwardOnly) and training and op.can_inline_forward:
        return "backward", refused.reason
    return "", refused.reason


def replacement_of(rule: Rule, case: dict, dtype: torch.dtype, training: bool) -> Any:
    """The call that would replace a site with these arguments, or a Reject."""

    def tensor(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    args = example_inputs(rule, tensor, case or None)
    if bare(rule):
        args = [None if p.optional else a for p, a in zip(rule.params, args, strict=True)]
    if rule.replacement_fn is None:
        return Replacement(rule, tuple(args))
    return rule.ask("replacement", *args, {}, training)


def bare(rule: Rule) -> bool:
    """Does the pattern have a form without any of its optional arguments (bias, mask, scale)?"""
    missing = [p.optional for p in rule.params]
    return any([kind == "none" for kind in t.kinds] == missing for t in templates(rule))


def value_of(argument: Any) -> Any:
    return torch.empty(1, dtype=torch.int64, device="meta") if argument is SEED else argument


def sizes(case: dict) -> str:
    return " ".join(f"{k}={v}" for k, v in case.items()) or "default sizes"
