"""A normalisation or softmax of rows, with the elementwise code around it: one generated kernel.

No template finds it. `extended.py` extends the matches of other patterns, and writes the program
down from their canonical expressions. The tensors are fp32, bf16, fp16 or boolean, and broadcast to
the result `[..., n]`, of one to four dimensions, its rows up to 4096 long. Computed in fp32, and
rounded once. The backward computes the program again: only the arguments are kept for it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusion_backend.kernels.common.inputs import DTYPES
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.generated import rows
from fusion_backend.kernels.generated.program import Program, evaluated, parsed
from fusion_backend.ops.extension import Extension
from fusion_backend.reporting.reject import Reject

TENSORS, CONDITIONS = 8, 2  # that a program may read
MOST = 48  # statements; Triton needs seconds for more


@Extension
def generated_rows(
    program: str,
    dtype: Literal["float32", "bfloat16", "float16"],
    t0: Tensor,
    t1: Tensor | None,
    t2: Tensor | None,
    t3: Tensor | None,
    t4: Tensor | None,
    t5: Tensor | None,
    t6: Tensor | None,
    t7: Tensor | None,
    c0: Tensor | None,
    c1: Tensor | None,
) -> Tensor:
    given = tensors(dict(t0=t0, t1=t1, t2=t2, t3=t3, t4=t4, t5=t5, t6=t6, t7=t7, c0=c0, c1=c1))
    (result,) = evaluated(parsed(program), given)
    return result.expand(rows.shape_of(given)).to(getattr(torch, dtype)).contiguous()


def tensors(given: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: t for name, t in given.items() if t is not None}


@generated_rows.guard
def _(program, dtype, **given):
    found = tensors(given)
    return (
        reject_long(parsed(program))
        or reject_kinds(found)
        or rows.reject_places(parsed(program), found)
    )


def reject_long(program: Program) -> Reject | None:
    if len(program.statements) > MOST:
        return Reject(f"{len(program.statements)} operations are more than {MOST} for one kernel")


def reject_kinds(given: dict[str, Tensor]) -> Reject | None:
    for name, t in given.items():
        if t.dtype not in (DTYPES if name[0] == "t" else (torch.bool,)):
            return Reject(f"{name} is {t.dtype}")


@generated_rows.worthwhile
def _(training):
    return UNMEASURED


@generated_rows.kernel
def _(program, dtype, **given):
    return rows.forward(program, tensors(given), getattr(torch, dtype))


@generated_rows.backward
def _(saved, d):
    names = [f"t{i}" for i in range(TENSORS)]
    given = {n: getattr(saved, n) for n in (*names, *(f"c{i}" for i in range(CONDITIONS)))}
    wanted = tuple(n for n in names if given[n] is not None and saved.needs[n])
    found = rows.backward(saved.program, d, tensors(given), wanted)
    return *(found.get(n) for n in names), *(None for _ in range(CONDITIONS))


NORM = (
    "v0 = mean t0; v1 = mul v0 -1.0; v2 = add t0 v1; v3 = mul v2 v2; v4 = mean v3; "
    "v5 = add v4 1e-05; v6 = rsqrt v5; v7 = mul v2 v6; v8 = mul t1 v7; v9 = add t2 v8; "
    "v10 = sigmoid v9; v11 = mul v10 v9; v12 = add t3 v11; return v12"
)

SOFTMAX = (
    "v0 = mul t0 0.125; v1 = add t1 v0; v2 = where c0 -1e+30 v1; v3 = softmax v2; "
    "v4 = mul t2 v3; return v4"
)


@generated_rows.inputs(dict(rows=7, n=100), dict(rows=16384, n=2048))
def _(tensor, rows, n, softmax=0):
    """A layer norm, silu, and a residual; or a scaled and masked softmax, and what follows it."""
    x = tensor(rows, n)
    dtype = str(x.dtype).removeprefix("torch.")
    if softmax:
        masked = tensor(rows, n) > 1
        given = x, tensor(n), tensor(rows, n), *(None,) * 5, masked, None
        return SOFTMAX, dtype, *given
    return NORM, dtype, x, tensor(n), tensor(n), tensor(rows, n), *(None,) * 6


# A tensor of any other pattern is one of floats.
generated_rows.memo["dtypes"] = {f"c{i}": torch.bool for i in range(CONDITIONS)}
