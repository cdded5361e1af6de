"""Prints the kernels that Inductor keeps with a graph in its cache, of a graph with `copy_kernel`,
where the kernels of the given name are ours: `python -m tests.kept_kernels copy_kernel`.
"""

import json
import pickle
import sys
from unittest import mock

import triton
import triton.language as tl
from torch._inductor import config
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, user_autotune
from torch._inductor.triton_bundler import TritonBundler

from fusion_backend.compat.launchers import inductors_launcher

GPU = DeviceProperties(type="cuda", index=0, multi_processor_count=132, cc=90, warp_size=32)


@user_autotune(  # as Inductor writes it
    configs=[{"num_warps": 4, "num_stages": 3}],
    inductor_meta={"kernel_name": "copy_kernel_0", "backend_hash": "any"},
    triton_meta={
        "signature": {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        "device": GPU,
        "constants": {"BLOCK": 128},
        "configs": [{(0,): [["tt.divisibility", 16]]}],
    },
    filename=__file__,
    custom_kernel=True,
)
@triton.jit
def copy_kernel_0(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n), at < n)


def main(ours: str) -> None:
    without_gpu = (
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(CachingAutotuner, "_make_launchers", lambda tuner: None),
    )
    with without_gpu[0], without_gpu[1], config.patch(bundle_triton_into_fx_graph_cache=True):
        TritonBundler.begin_compile()
        with inductors_launcher(lambda: {ours}):
            copy_kernel_0.precompile(static_triton_bundle_key="key")
        bundle, _ = TritonBundler.collect()
        read = TritonBundler.read_and_emit(pickle.loads(pickle.dumps(bundle)))
    print(json.dumps(read.statically_launched_kernel_names))


if __name__ == "__main__":
    main(sys.argv[1])
