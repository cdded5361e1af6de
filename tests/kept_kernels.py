"""Prints the kernels that Inductor keeps with a graph in its cache, where those of the given name
are ours, the types and sizes of the arguments that each of them is launched with, and whether
Inductor would launch it in C++: `python -m tests.kept_kernels copy_kernel`.
"""

import json
import pickle
import sys
from unittest import mock

import torch
import triton
import triton.language as tl
from torch._inductor import config
from torch._inductor.async_compile import CompiledTritonKernels
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, user_autotune
from torch._inductor.triton_bundler import TritonBundler

from fusion_backend.compat import launchers

GPU = DeviceProperties(type="cuda", index=0, multi_processor_count=132, cc=90, warp_size=32)


def as_inductor_writes_it(name: str):
    return user_autotune(
        configs=[{"num_warps": 4, "num_stages": 3}],
        inductor_meta={"kernel_name": name, "backend_hash": "any"},
        triton_meta={
            "signature": {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
            "device": GPU,
            "constants": {"BLOCK": 128},
            "configs": [{(0,): [["tt.divisibility", 16]]}],
        },
        filename=__file__,
        custom_kernel=True,
    )


@as_inductor_writes_it("copy_kernel_0")
@triton.jit
def copy_kernel_0(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n), at < n)


@as_inductor_writes_it("described_copy_kernel_0")
@triton.jit
def described_copy_kernel_0(x, y, n, BLOCK: tl.constexpr):
    """Its descriptors lie in scratch memory."""
    left = tl.program_id(0) * BLOCK
    source = tl.make_tensor_descriptor(x, [1, n], [n, 1], [1, BLOCK])
    target = tl.make_tensor_descriptor(y, [1, n], [n, 1], [1, BLOCK])
    target.store([0, left], source.load([0, left]))


KERNELS = {"copy_kernel": copy_kernel_0, "described_copy_kernel": described_copy_kernel_0}


def arguments(kernel) -> list:
    """Types and sizes (of numbers, the number) of those that 2 · 3 programs are launched with."""
    launched = []

    def launch(function, x, y, z, warps, shared, types, args, stream):
        sizes = [a.numel() if isinstance(a, torch.Tensor) else a for a in args]
        launched.append([types, sizes])

    kernel.function = 1  # as if loaded
    kernel.__dict__["C_impl"] = mock.Mock(_launch_kernel=launch)
    with mock.patch.object(
        launchers, "scratch", lambda size, alignment, stream: torch.empty(size, dtype=torch.int8)
    ):
        kernel.run(2, 3, 1, 0, torch.empty(10), torch.empty(10), 10)
    return launched[0]


def has_fast_launcher(kernel: CachingAutotuner, static) -> bool:
    """Would Inductor launch it in C++, past `run`?"""
    build = getattr(kernel, "_build_fast_launcher", None)  # from torch 2.14 on
    launcher = eval("lambda *args: runner(*args)", {"runner": static.run})
    launcher._is_static = True
    return build is not None and build(launcher) is not None


def main(ours: str) -> None:
    without_gpu = (
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(CachingAutotuner, "_make_launchers", lambda tuner: None),
    )
    found = {}
    with without_gpu[0], without_gpu[1], config.patch(bundle_triton_into_fx_graph_cache=True):
        TritonBundler.begin_compile()
        with launchers.inductors_launcher(lambda: {ours}):
            KERNELS[ours if ours in KERNELS else "copy_kernel"].precompile(
                static_triton_bundle_key="key"
            )
        bundle, _ = TritonBundler.collect()
        read = TritonBundler.read_and_emit(pickle.loads(pickle.dumps(bundle)))
        for name in read.statically_launched_kernel_names:
            kernel = CompiledTritonKernels._cache["key"].static_autotuner
            static = kernel.compile_results[0].kernel
            found[name] = [*arguments(static), has_fast_launcher(kernel, static)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
