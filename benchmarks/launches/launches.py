"""What the launchers of the patterns would launch, and with which arguments, found by running them
on tensors without data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import fusion_backend.patterns  # noqa: F401  (fills the registry)
import torch
from torch import Tensor

import fusion_backend.extend.generated_rows  # noqa: F401  (registers the op of this name)
import fusion_backend.rewrite.embeddings  # noqa: F401  (registers sorted_embedding)
from benchmarks.launches.sites import SITES
from fusion_backend.compat.torch import TorchDispatchMode, storage_id
from fusion_backend.kernels.common.launch import trial
from fusion_backend.match.templates import with_kinds
from fusion_backend.ops.op import Op
from fusion_backend.ops.registry import OPS
from fusion_backend.ops.rule import Rule
from fusion_backend.testing import supported_forms

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.int64: "i64",
    torch.int32: "i32",
}
# Other forms of the arguments, which are launched differently.
OTHER_WAYS = {
    "gated_linear": [dict(transposed=True), dict(transposed=True, form=1)],  # of sigmoid, of silu
    "linear_act": [dict(transposed=True)],
    "mlp": [dict(transposed=True, form=2)],  # of gelu
    "dropout_mlp": [dict(transposed=True, form=2)],
    "softmax": [dict(form=-1)],
    "norm_act": [dict(form=-1)],  # of an RMS norm
    "gated_norm": [dict(form=form) for form in (9, -1)],  # in front of an RMS norm
    # relu with a residual, and all activations without one; the first has none
    "batch_norm_training": [dict(form=form) for form in (1, 9, 10, 11, 12)],
    "batch_norm_sum": [dict(form=1)],  # relu; the first has no activation
    "channel_norm": [dict(form=4)],  # of a layer norm; the first is of unit length
    "channel_softmax": [dict(form=-1)],  # the logarithm
    "channel_cross_entropy": [dict(form=6)],  # without weights
    "cross_entropy": [dict(form=6)],  # without weights
    "soft_cross_entropy": [dict(form=12), dict(form=24)],  # without weights, and a divergence
    "distillation_loss": [dict(form=6), dict(form=12)],  # of logarithms, and a cross entropy
    "norm_rotary": [dict(form=-1)],  # of neighbours
    # of x as it is, by the reciprocal of the scale, and by the inverse of the largest
    "quantize_per_token": [dict(form=form) for form in (1, 5, 9)],
    "rms_norm_quantize": [dict(form=form) for form in (2, 4)],
    "token_log_probs": [dict(form=-1)],  # of an index that wraps, and logsumexp
    # of a layer norm without weight and bias, as models have it, and of an RMS norm with a weight
    "modulated_norm": [dict(form=form) for form in (8, 3)],
}
OTHER_WAYS["masked_attention"] = [dict(frozen="q")]
# Kernels whose programs wait for one another.
SHARED = {f"{name}_shared_kernel" for name in ("norm", "norm_backward", "softmax")}


class Launch(NamedTuple):
    kernel: object
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    aligned: tuple[int, ...]  # indices of arguments known to be multiples of 16
    options: tuple[tuple[str, int], ...]
    inputs: tuple[str, ...]  # the arguments that share memory with what the launcher was given
    programs: int

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class Computed(TorchDispatchMode):
    """Collects what launchers compute in torch: kernels read it and do not write it."""

    def __init__(self, seen: list[Tensor]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(
            name in func.__name__ for name in ("empty", "zeros", "transpose", "select")
        ):
            self.seen.append(out)
        return out


def arguments(kernel, args: tuple, options: dict) -> dict[str, object]:
    named = dict(zip(kernel.arg_names, args, strict=False))
    return named | {name: value for name, value in options.items() if name in kernel.arg_names}


def describe(kernel, grid: tuple, args: tuple, options: dict, given: set[int]) -> Launch:
    """What Triton would specialise on for these arguments, launched by Inductor (floats are fp64
    then).
    """
    values = arguments(kernel, args, options)
    signature, constants, aligned = [], [], []
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature.append((param.name, "constexpr"))
            constants.append((param.name, value))
            continue
        if isinstance(value, Tensor):
            signature.append((param.name, "*" + TYPES[value.dtype]))
        elif isinstance(value, int):
            signature.append((param.name, "i32" if -(2**31) <= value < 2**31 else "i64"))
        else:
            signature.append((param.name, "fp64"))
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned.append(i)
    rest = {name: value for name, value in options.items() if name not in kernel.arg_names}
    inputs = [
        name
        for name, value in values.items()
        if isinstance(value, Tensor) and storage_id(value) in given
    ]
    programs = math.prod(grid) if kernel.fn.__name__ in SHARED else 0
    return Launch(
        kernel, *map(tuple, (signature, constants, aligned, rest.items(), inputs)), programs
    )


def launches(
    pattern: Op,
    case: dict,
    dtype: torch.dtype,
    backward: bool,
    transposed: bool = False,
    form: int = 0,
    unread: tuple[int, ...] = (),
    frozen: str = "",
) -> list[Launch]:
    """Run the launchers of a pattern on tensors without data and collect what they launch. unread:
    the results that nobody reads; frozen: an argument without a gradient.
    """
    found: list[Launch] = []
    # what a kernel was given or wrote; held, so that no address is used twice
    seen: list[Tensor] = []

    def record(kernel, grid, values, options):
        one = describe(kernel, grid, values, options, {storage_id(t) for t in seen})
        # where heads take turns, the next launch writes to what the first has written to
        if not any(one._replace(inputs=before.inputs) == before for before in found):
            found.append(one)
        seen.extend(t for t in arguments(kernel, values, options).values() if isinstance(t, Tensor))

    def tensor(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    args = list(pattern.inputs_fn(tensor, **case))
    if isinstance(pattern, Rule):
        args = with_kinds(pattern, supported_forms(pattern)[form], args)
    if transposed:  # the weight of a linear layer, seen from x @ w
        args = [
            a.t().contiguous().t() if isinstance(a, Tensor) and i else a for i, a in enumerate(args)
        ]
    seeds = {
        name: torch.empty(1, dtype=torch.int64, device="meta") for name in pattern.seed_arguments
    }
    seen.extend(a for a in (*args, *seeds.values()) if isinstance(a, Tensor))
    with trial(record), Computed(seen):
        results = pattern.launched((*args, *seeds.values()), backward, unread)
        if backward:
            results = results if isinstance(results, tuple) else (results,)
            saved = saved_of(pattern, args, seeds, results)
            saved.needs |= {frozen: False} if frozen else {}
            grads = [torch.empty_like(out) for out in results[: pattern.outputs]]
            seen.extend(grads)
            pattern.backward_fn(saved, *grads)
    return found


def saved_of(pattern: Op, args: list, seeds: dict, results: tuple) -> SimpleNamespace:
    """What a pattern's backward is given: arguments, seeds, results and what the forward saves."""
    outs, saves = results[: pattern.outputs], results[pattern.outputs :]
    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
    needs = {name: isinstance(value, Tensor) for name, value in inputs.items()}
    result = outs if len(outs) > 1 else outs[0]
    named = dict(zip(pattern.saves, saves, strict=True))
    return SimpleNamespace(**inputs, **seeds, **named, result=result, needs=needs)


class Found(NamedTuple):
    """A launch, the dtype of the pattern's arguments, and the case that it comes from, in words."""

    launch: Launch
    dtype: str
    work: str


def all_launches(only: list[str]) -> Iterator[Found]:
    """Every distinct launch of the patterns of SITES, or of those in `only`."""
    seen = set()
    for name, case, dtype, backward in SITES:
        if only and name not in only:
            continue
        pattern = OPS[name]
        left_out = [dict(unread=(1,))] if pattern.skips else []
        for way in ({}, *OTHER_WAYS.get(name, ()), *left_out):
            trained = backward and "unread" not in way  # backward reads what the code does not
            for launch in launches(pattern, case, dtype, trained, **way):
                if launch not in seen:
                    seen.add(launch)
                    words = [f"{k}={v}" for k, v in (case | way).items()]
                    yield Found(launch, TYPES[dtype], " ".join(words))
