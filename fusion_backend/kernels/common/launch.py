"""Launch a Triton kernel, whoever is asking: Inductor while it compiles, eager code, the
interpreter, or a trial.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.library import wrap_triton

from fusion_backend.compat.inductor import ANALYSED
from fusion_backend.compat.torch import assert_all as assert_on_device
from fusion_backend.compat.triton import InterpretedFunction, lend_scratch
from fusion_backend.kernels.common.target import TARGET

# Takes a launch in place of the GPU: the kernel, the grid, the arguments, the options.
Record = Callable[[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]], None]
TRIAL: contextvars.ContextVar[Record | None] = contextvars.ContextVar("fusion_trial", default=None)


def interpreting() -> bool:
    """Do kernels defined now run in Triton's interpreter?"""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_gpu(tensor: torch.Tensor) -> bool:
    """Can a compiled kernel read it, here or on the GPU that decisions are made for?"""
    return tensor.is_cuda or TARGET.get() is not None


def interpreted(kernel: object) -> bool:
    """Does this kernel run in Triton's interpreter (TRITON_INTERPRET=1 when it was defined)?"""
    return isinstance(kernel, InterpretedFunction)


def launch(kernel: Any, grid: tuple[Any, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)`: args are those of the kernel that are no constants,
    options its constants by name, num_warps and num_stages.

    Under torch.compile the launch becomes a node that Inductor calls from its own wrapper. In the
    interpreter, which torch refuses to wrap, and in a trial, which compiles and does not run, the
    kernel is called directly. While decisions are made for another GPU, nothing is launched.
    """
    trial = TRIAL.get()
    if TARGET.get() is not None:  # decisions for a GPU that is not here: results are fakes
        return
    if not interpreted(kernel):
        ANALYSED.setdefault(kernel, {})
        lend_scratch()
    if trial is not None:
        trial(kernel, grid, args, options)
    elif interpreted(kernel):
        kernel[grid](*args, **options)
    else:
        wrap_triton(kernel)[grid](*args, **options)


def directly(kernel: Any, grid: tuple[Any, ...], *args: Any, **options: Any) -> Any:
    """Launch from inside an operator that no compiler opens up: there is nobody to hand the launch
    to. Returns the compiled kernel.
    """
    if interpreted(kernel):
        options.pop("num_warps")
    else:
        lend_scratch()
    return kernel[grid](*args, **options)


def assert_all(condition: torch.Tensor, message: str) -> None:
    """An assertion where the tensor lives; none in a trial, which computes no results."""
    if TRIAL.get() is None:
        assert_on_device(condition, message)


@contextlib.contextmanager
def trial(record: Record) -> Iterator[None]:
    """Inside, launches go to `record(kernel, grid, args, options)` and run nothing."""
    token = TRIAL.set(record)
    try:
        yield
    finally:
        TRIAL.reset(token)
