"""What the patterns' launchers would launch, and with what: they run on tensors without data."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import fusion_backend.patterns  # noqa: F401
import torch
from torch import Tensor

from fusion_backend.compat.torch import TorchDispatchMode, storage_id
from fusion_backend.kernels.common.launch import trial
from fusion_backend.match.templates import with_kinds
from fusion_backend.ops.op import Op
from fusion_backend.ops.registry import OPS
from fusion_backend.ops.rule import Rule
from fusion_backend.testing import supported_forms

HALF, FULL = torch.bfloat16, torch.float32
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.bool: "i1",
    torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip
# programs wait for one another
SHARED = {f"{name}_shared_kernel" for name in ("norm", "norm_backward", "softmax")}

MASKS = dict(padded=1), dict(bias=1)
# Op, case, dtype, does a backward follow?
SITES = [
    ("add_mul", dict(size=20_000_000), FULL, False),
    ("add_mul_exp", dict(size=20_000_000), FULL, False),
    ("add_mul_exp", dict(size=20_000_000), HALF, False),
    ("quantize_int8", dict(size=50_000_000), FULL, False),
    ("quantize_int8", dict(size=64_000_000), HALF, False),
    ("layer_norm", dict(rows=7, n=100), FULL, True),
    ("layer_norm", dict(rows=16384, n=1024), HALF, True),
    ("layer_norm", dict(rows=16384, n=4096), HALF, True),
    ("layer_norm", dict(rows=16384, n=4096), FULL, True),
    ("layer_norm", dict(rows=16384, n=2049), HALF, True),
    ("layer_norm", dict(rows=8192, n=8192), HALF, True),
    ("layer_norm", dict(rows=8192, n=8192), FULL, True),
    ("layer_norm", dict(rows=2048, n=16384), HALF, True),
    ("layer_norm", dict(rows=2048, n=32768), HALF, True),
    ("layer_norm", dict(rows=2048, n=32768), FULL, True),
    ("layer_norm", dict(rows=1024, n=65536), HALF, True),  # shared by programs
    ("layer_norm", dict(rows=64, n=131072), HALF, True),  # split over programs
    ("layer_norm", dict(rows=16, n=8192), HALF, True),
    ("layer_norm", dict(rows=16, n=8192), FULL, True),
    ("layer_norm", dict(rows=192, n=5120), HALF, True),
    ("layer_norm", dict(rows=64, n=131072), FULL, True),
    ("add_layer_norm", dict(rows=16384, n=4096), HALF, True),
    ("add_layer_norm", dict(rows=64, n=131072), HALF, True),
    ("dropout_add", dict(rows=16384, n=4096), HALF, True),
    ("dropout_add", dict(rows=16384, n=4096), FULL, True),
    ("dropout_add_layer_norm", dict(rows=16384, n=1024), HALF, True),
    ("dropout_add_layer_norm", dict(rows=16384, n=4096), HALF, True),
    ("dropout_add_layer_norm", dict(rows=16384, n=4096), FULL, True),
    ("dropout_add_layer_norm", dict(rows=16, n=8192), HALF, True),
    ("dropout_add_layer_norm", dict(rows=4096, n=768), HALF, True),
    ("dropout_add_layer_norm", dict(rows=8192, n=5120), HALF, True),
    ("dropout_add_layer_norm", dict(rows=8192, n=8192), HALF, True),
    ("dropout_add_layer_norm", dict(rows=2048, n=32768), HALF, True),
    ("dropout_add_layer_norm", dict(rows=1024, n=65536), HALF, True),
    ("dropout_add_layer_norm", dict(rows=64, n=131072), HALF, True),
    ("rms_norm", dict(rows=16384, n=4096), HALF, True),
    ("add_rms_norm", dict(rows=16384, n=4096), HALF, True),
    ("add_rms_norm", dict(rows=192, n=5120), HALF, True),
    ("add_rms_norm", dict(rows=8192, n=8192), HALF, True),
    ("add_rms_norm", dict(rows=2048, n=32768), HALF, True),
    ("add_rms_norm", dict(rows=1024, n=65536), HALF, True),
    ("softmax", dict(rows=16384, n=4096), HALF, True),
    ("softmax", dict(rows=8192, n=8192), HALF, True),
    ("softmax", dict(rows=2048, n=32768), HALF, True),
    ("softmax", dict(rows=2048, n=32768), FULL, True),
    ("softmax", dict(rows=64, n=131072), HALF, True),
    ("l2_norm", dict(rows=16384, n=1024), HALF, True),
    ("l2_norm", dict(rows=16384, n=4096), HALF, True),
    ("l2_norm", dict(rows=8192, n=8192), FULL, True),
    ("l2_norm", dict(rows=2048, n=32768), HALF, True),
    ("l2_norm", dict(rows=64, n=131072), FULL, True),
    ("batch_norm", dict(b=64, c=256, n=56), HALF, False),
    ("batch_norm", dict(b=64, c=2048, n=7), FULL, False),
    ("batch_norm", dict(b=256, c=2048, n=7), HALF, False),
    ("batch_norm", dict(b=256, c=2048, n=8), HALF, False),
    ("group_norm", dict(b=16, c=320, n=8, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=480, n=32, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=480, n=64, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=480, n=64, groups=32), FULL, True),
    ("group_norm", dict(b=16, c=320, n=32, groups=32), HALF, True),
    ("group_norm", dict(b=16, c=320, n=32, groups=32), FULL, True),
    ("group_norm", dict(b=2, c=512, n=128, groups=32), HALF, True),  # split over programs
    ("group_norm", dict(b=2, c=512, n=128, groups=32), FULL, True),
    ("bias_act", dict(rows=16384, n=4096), HALF, False),
    ("bias_act", dict(rows=16384, n=100), FULL, False),
    ("cross_entropy", dict(rows=8192, v=128256), HALF, True),
    ("cross_entropy", dict(rows=8192, v=128256), FULL, True),
    ("linear_cross_entropy", dict(rows=8192, k=4096, v=128256), HALF, True),
    ("quantize_per_token", dict(rows=8192, n=4096), HALF, False),
    ("quantize_per_token", dict(rows=64, n=131072), FULL, False),
    ("rms_norm_quantize", dict(rows=8192, n=4096), HALF, False),
    ("rms_norm_quantize", dict(rows=8192, n=8192), HALF, False),
    ("rms_norm_quantize", dict(rows=2048, n=16384), FULL, False),
    ("rms_norm_quantize", dict(rows=64, n=131072), FULL, False),
    ("masked_attention", dict(b=4, h=16, n=4096, d=128, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=32, n=2048, d=64, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=32, n=2048, d=64, window=256), torch.float16, True),
    *(
        ("masked_attention", dict(b=4, h=32, n=64, d=d, bias=1), HALF, False)
        for d in (64, 128, 256)
    ),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, bias=1), HALF, True),
    ("masked_attention", dict(b=1, h=16, n=512, d=64, bias=1), HALF, True),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, padded=1), HALF, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=128, bias=1), HALF, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=128, dense=1, padded=1, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=16, n=1000, d=80, causal=1), HALF, True),
    ("masked_attention", dict(b=4, h=8, n=2048, d=256, window=512), HALF, True),
    ("masked_attention", dict(b=32, h=16, n=512, d=64, bias=1), FULL, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=128, causal=1), FULL, True),
    ("masked_attention", dict(b=4, h=16, n=2048, d=256, bias=1), HALF, True),
    *(
        ("masked_attention", dict(b=32, h=16, n=512, d=64, drop=1) | mask, HALF, True)
        for mask in MASKS
    ),
    *(
        ("masked_attention", dict(b=8, h=16, n=2048, d=128, drop=1) | mask, HALF, True)
        for mask in MASKS
    ),
    *(
        ("masked_attention", dict(b=4, h=8, n=2048, d=256, drop=1) | mask, HALF, True)
        for mask in MASKS
    ),
    *(
        ("masked_attention", dict(b=32, h=16, n=512, d=64, drop=1) | mask, FULL, True)
        for mask in MASKS
    ),
    ("masked_attention", dict(b=1, h=16, n=512, d=64, bias=1, drop=1), HALF, True),
    ("masked_attention", dict(b=4, h=8, n=2048, d=128, padded=1, drop=1), FULL, True),
    ("masked_attention", dict(b=8, h=16, n=2048, d=128, window=512), HALF, True),
    ("masked_attention", dict(b=8, h=16, n=2048, d=128, padded=1), HALF, True),
    ("gated_linear", dict(m=16384, k=1024, n=4096), HALF, True),
    ("gated_linear", dict(m=16384, k=1024, n=4096), torch.float16, False),
    ("gated_linear", dict(m=16384, k=1000, n=4000), HALF, False),
    ("gated_linear", dict(m=16, k=4096, n=14336), HALF, False),
    ("gated_linear", dict(m=4096, k=1024, n=1024), FULL, False),
]


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
    """Collects what launchers compute in torch: kernels read that, they do not write it."""

    def __init__(self, seen: list[Tensor]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(
            name in func.__name__ for name in ("empty", "zeros", "transpose")
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
) -> list[Launch]:
    """Run the launchers of a pattern on tensors without data and collect what they launch."""
    found: list[Launch] = []
    # what a kernel was given or left behind; held, so that no address is used twice
    seen: list[Tensor] = []

    def record(kernel, grid, values, options):
        found.append(describe(kernel, grid, values, options, {storage_id(t) for t in seen}))
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
    drawn = {
        name: torch.empty(1, dtype=torch.int64, device="meta") for name in pattern.seed_arguments
    }
    seen.extend(a for a in (*args, *drawn.values()) if isinstance(a, Tensor))
    with trial(record), Computed(seen):
        results = pattern.kernel_fn(*args, *drawn.values(), *([backward] if pattern.saves else []))
        if backward:
            results = results if isinstance(results, tuple) else (results,)
            outs, kept = results[: pattern.outputs], results[pattern.outputs :]
            inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
            needs = {name: isinstance(value, Tensor) for name, value in inputs.items()}
            result = outs if len(outs) > 1 else outs[0]
            kept = dict(zip(pattern.saves, kept, strict=True))
            saved = SimpleNamespace(**inputs, **drawn, **kept, result=result, needs=needs)
            grads = [torch.empty_like(out) for out in outs]
            seen.extend(grads)
            pattern.backward_fn(saved, *grads)
    return found


def sites(only: list[str]):
    """Every distinct launch of the patterns, with the words that tell where it comes from."""
    seen = set()
    for name, case, dtype, backward in SITES:
        if only and name not in only:
            continue
        pattern = OPS[name]
        ways = (
            [dict(transposed=True)]
            if name == "gated_linear"
            else [dict(form=-1)]
            if name == "softmax"
            else []
        )
        for way in ({}, *ways):
            for launch in launches(pattern, case, dtype, backward, **way):
                if launch not in seen:
                    seen.add(launch)
                    words = [f"{k}={v}" for k, v in (case | way).items()]
                    yield launch, TYPES[dtype], " ".join(words)
