"""Errors of whole models against a run of the same weights in a wider dtype."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from benchmarks.measure.distance import floats, joint_distance
from benchmarks.measure.failures import said
from benchmarks.model_runs.failing import failing, give_back
from benchmarks.model_runs.steps import DTYPES, Plan, Step
from benchmarks.records.rows import OK, WRONG, ModelContender, ModelRow
from benchmarks.subjects.subject import Subject

# fp32 sums of millions of terms, in another order, are that many eps apart; a loss is one of them
SUMS = 16


def exact_results(subject: Subject, plan: Plan) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Outputs and gradients of the same weights in plan.exact."""
    wide = subject.cast(plan.exact)
    step = Step(wide, lambda fn: fn, dataclasses.replace(plan, optimizer=None))
    outputs = {i: x.clone() for i, x in floats(step()).items()}
    return outputs, step.gradients() if plan.train else {}


def compare(
    step: Step, one: ModelContender, exact: tuple, eager: ModelContender, dtype: torch.dtype
) -> None:
    """Note the errors. Wrong is what is above twice eager's own and an eps of the dtype, from fp32
    on SUMS of them.
    """
    outputs, gradients = exact
    one.output_error = joint_distance(floats(step()), outputs)
    if step.plan.train:
        got = step.gradients()
        if got.keys() != gradients.keys():
            one.status, one.note = (
                WRONG,
                f"gradients of other parameters: {sorted(got.keys() ^ gradients.keys())[:3]}",
            )
            return
        one.gradient_error = joint_distance(got, gradients)
    for what in ("output_error", "gradient_error"):
        mine, base = getattr(one, what), getattr(eager, what) or 0.0
        limit = 2 * base + torch.finfo(dtype).eps * (SUMS if dtype.itemsize >= 4 else 1)
        if mine is not None and not mine <= limit:  # NaN, too
            one.status, one.note = (
                WRONG,
                f"{what.replace('_', ' ')} {mine:.1e}, eager's is {base:.1e}",
            )


def compare_all(subject: Subject, steps: dict[str, Step], found, row: ModelRow, say) -> None:
    plan = next(iter(steps.values())).plan
    if plan.exact is None:
        return
    say(f"the exact results, in {plan.exact}")
    exact = None
    try:
        exact = exact_results(subject, plan)
        row.exact = str(plan.exact).removeprefix("torch.")
    except Exception as error:  # too large for the memory, or an operator without this dtype
        row.notes.append(f"no errors: the run in {plan.exact} failed, {said(error)}")
    if exact is None:
        give_back()
        return
    eager = found.get("eager", ModelContender("eager"))
    for name, step in steps.items():
        if found[name].status == OK:
            with failing(found[name]):
                compare(step, found[name], exact, eager, DTYPES[row.dtype])
    if eager.status == OK and "eager" in steps:
        first, second = floats(steps["eager"]()), floats(steps["eager"]())
        if not all(torch.equal(first[i], second[i]) for i in first):
            row.notes.append("two eager runs differ (dropout? atomics?): errors contain that")
