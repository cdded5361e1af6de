"""Gluon, the language below Triton's, in which a kernel says which warps do what, under one set of
names. It is no stable interface.

Each name was checked in 3.6, 3.8 and 3.9: tests/test_specialised.py compiles the kernels.
"""

# ruff: noqa: F401 (the imports are what this file is for)
from __future__ import annotations

from triton.compiler import ASTSource
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

if hasattr(tma, "async_load"):  # from 3.8 on
    load_tile, store_tile = tma.async_load, tma.async_store
else:
    load_tile, store_tile = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# of the warps of one partition; from 3.8 on as `barrier`
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# of a piece of shared memory, as another shape; public from 3.9 on
memory = gl.shared_memory_descriptor
reinterpret = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret


def source_class(kernel) -> type:
    """The class of the source that triton.compile takes for this kernel."""
    return GluonASTSource if kernel.is_gluon() else ASTSource
