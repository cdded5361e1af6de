"""Triton's names beyond its language and its public functions.

Each was checked in 3.6 and 3.9: `versions.py` says how.
"""

# ruff: noqa: F401 (the imports are what this file is for)
from __future__ import annotations

import triton
from triton import AsyncCompileMode, FutureKernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

SM_90 = GPUTarget("cuda", 90, 32)


def set_driver(driver) -> None:
    """Have Triton ask `driver` which GPU there is."""
    triton.runtime.driver.set_active(driver)


def forget_compiled(kernel) -> None:
    """Have a kernel compiled again at its next launch."""
    kernel.device_caches.clear()
