"""Names of Triton besides its language and its public functions.

Each was checked in 3.6 and 3.9: `versions.py` says how.
"""

# ruff: noqa: F401 (the imports are what this file is for)
from __future__ import annotations

import os

import torch
import triton
from triton import AsyncCompileMode, FutureKernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import interpreter
from triton.runtime._allocation import NullAllocator, _allocator
from triton.runtime.autotuner import Autotuner, Heuristics  # the second in 3.6 and 3.8
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from fusion_backend.compat.torch import empty_cuda

SM_90 = GPUTarget("cuda", 90, 32)


def set_driver(driver) -> None:
    """Make `driver` the one that Triton asks which GPU there is."""
    triton.runtime.driver.set_active(driver)


def forget_compiled(kernel) -> None:
    """Forget a kernel's compiled versions: its next launch compiles it again."""
    kernel.device_caches.clear()


def index_of_one_element() -> None:
    """Let the interpreter accept a tensor of one element as an index, as Triton 3.7 and later do.

    Triton 3.6 passes NumPy an array of one dimension as a number, which NumPy 2.4 and later refuse.
    """
    before = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched


def masks_of_booleans() -> None:
    """Let the interpreter take masks in which one comparison is spread over a block.

    It makes integers of such a mask, which loads and stores of Triton 3.9 refuse.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def booleans(mask):
        return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)

    def create_masked_load(self, ptrs, mask, *rest, **named):
        return load(self, ptrs, booleans(mask), *rest, **named)

    def create_masked_store(self, ptrs, value, mask, *rest, **named):
        return store(self, ptrs, value, booleans(mask), *rest, **named)

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store


def fma_of_one_rounding() -> None:
    """Let the interpreter's fused multiply-add in fp32 round once, as that of a GPU does. The
    product is exact in fp64, where it rounds the product and the sum.
    """
    builder = interpreter.InterpreterBuilder
    before = builder.create_fma

    def create_fma(self, x, y, z):
        if z.data.dtype != "float32":
            return before(self, x, y, z)
        wide = x.data.astype("float64") * y.data + z.data
        return interpreter.TensorHandle(wide.astype("float32"), z.dtype.scalar)

    builder.create_fma = create_fma


if os.environ.get("TRITON_INTERPRET") == "1":
    fma_of_one_rounding()
    if triton.__version__.startswith("3.6."):
        index_of_one_element()
    if triton.__version__.startswith("3.9."):
        masks_of_booleans()


def lend_scratch() -> None:
    """Let kernels that make descriptors have the memory for them, in code that is not compiled:
    Triton has no allocator by itself. Inductor sets one, and an allocator of the user's stays.
    """
    if isinstance(_allocator.get(), NullAllocator):
        triton.set_allocator(scratch)


def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return empty_cuda((size,), (1,), torch.int8)


def launch_again(compiled, constants: tuple, programs: int, stream: int, args: tuple) -> None:
    """Launch a compiled kernel through Triton's launcher, which takes the constants, too."""
    lend_scratch()  # the backward may run in another thread, which has none yet
    # without a stream, Triton asks for the GPU as well
    compiled[programs, 1, 1](*args, *constants, stream=stream)


def has_hooks() -> bool:
    """Is a function of the user's, or of a profiler, called at each launch?"""
    known = triton.knobs.runtime
    enter, leave = known.launch_enter_hook, known.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: torch.device) -> int:
    return triton.runtime.driver.active.get_current_stream(device.index)


def triton_version() -> str:
    return triton.__version__
