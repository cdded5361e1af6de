"""Compiles one small kernel of ours, and compares it with its reference if it can run."""

from __future__ import annotations

import time
import warnings

import torch
import triton

from fusion_backend.compat.triton import SM_90, ASTSource
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels.common.launch import interpreting, trial
from fusion_backend.ops.operator import call
from fusion_backend.ops.registry import OPS

NAME = "add_mul"  # (x + y) · z, elementwise
SIZE = 5000  # three blocks, of which one is not full


def compiled_and_compared() -> str:
    """What was done, in words. Raises what the compiler raises, and AssertionError for a wrong
    result.
    """
    patterns()  # so that it is registered
    started = time.perf_counter()
    with triton.knobs.compilation.scope(), warnings.catch_warnings():
        triton.knobs.compilation.always_compile = True  # not taken from the cache
        warnings.simplefilter("ignore")  # Triton's, about defaults that are going to change
        how = run()
    return f"{NAME} {how} ({time.perf_counter() - started:.1f} s)"


def run() -> str:
    if torch.cuda.is_available():
        compare("cuda")
        return f"compiled for {torch.cuda.get_device_name()}, run, and equal to its reference"
    if interpreting():
        compare("cpu")
        return "run in Triton's interpreter, and equal to its reference; not compiled"
    compile_for_sm_90()
    return "compiled for sm_90; not run, for there is no GPU"


def compare(device: str) -> None:
    x, y, z = (torch.linspace(-1, i, SIZE, device=device) for i in (1, 2, 3))
    torch.testing.assert_close(call(OPS[NAME], (x, y, z)), (x + y) * z)


def compile_for_sm_90() -> None:
    """Compile the kernel from the launch that its launcher makes on tensors without data."""
    launches: list[tuple] = []
    x = torch.empty(SIZE, device="meta")
    with trial(lambda *launch: launches.append(launch)):
        OPS[NAME].launched((x, x, x), save=False)
    ((kernel, _, args, options),) = launches
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants = {}, {}
    for i, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name], constants[i,] = "constexpr", given[p.name]
        else:
            signature[p.name] = "*fp32" if isinstance(given[p.name], torch.Tensor) else "i32"
    source = ASTSource(kernel, signature, constexprs=constants)
    triton.compile(source, target=SM_90, options={"num_warps": options["num_warps"]})
