"""What all kernels have in common: they compile without a GPU, leave symbolic sizes alone and
refuse what they cannot read.
"""

from types import SimpleNamespace

import pytest
import torch
import triton

from benchmarks.launches.layouts import mixed_tiles, torn_tiles
from benchmarks.records.runs import Run
from fusion_backend.kernels.common.inputs import as_rows
from fusion_backend.kernels.common.launch import trial
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from tests.kernel_checks import randn, symbolic
from tests.without_interpreter import output_of

pytestmark = pytest.mark.usefixtures("poisoned_empties")


def test_guards_and_launchers_leave_symbolic_sizes_alone():
    """The number of rows may be a symbol: no guard is added, and the grid is an
    expression of it.
    """
    env, (x, row) = symbolic(torch.empty(48, 5, 64), torch.empty(64))
    with x.fake_mode:
        flat = x.new_empty((x.shape[0] * x.shape[1], 64))
        narrow = dict(dtype=torch.bfloat16)
        half, weight = flat.new_empty(flat.shape, **narrow), x.new_empty((64, 32), **narrow)
        sites = {
            "add_mul": (x, x, 2.0),
            "add_mul_exp": (x, x, 2.0),
            "quantize_int8": (x, 2.0, None),
            "layer_norm": (flat, row, row, 1e-5),
            "gated_linear": (half, weight, None, weight, None, "sigmoid"),
            "dropout_add": (flat, flat, 0.1),
            "dropout_add_layer_norm": (flat, flat, row, row, 0.1, 1e-5),
        }
        for name, args in sites.items():
            pattern, grids = FUSION_RULES[name], []
            assert not isinstance(pattern.guard_fn(*args), Reject), pattern.guard_fn(*args)
            if pattern.worthwhile_fn:
                pattern.worthwhile_fn(*args, True)
            with trial(lambda kernel, grid, values, options, grids=grids: grids.append(grid)):
                seed = {k: x.new_empty(1, dtype=torch.int64) for k in pattern.seed_arguments}
                out = pattern.launched((*args, *seed.values()), save=True)
                out = out if isinstance(out, tuple) else (out,)
                outs = out[: pattern.outputs]
                if pattern.backward_fn:
                    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
                    kept = dict(zip(pattern.saves, out[pattern.outputs :], strict=True))
                    result, needs = (
                        outs if pattern.outputs > 1 else outs[0],
                        dict.fromkeys(inputs, True),
                    )
                    saved = SimpleNamespace(**inputs, **seed, **kept, result=result, needs=needs)
                    pattern.backward_fn(saved, *map(torch.empty_like, outs))
            # the programs of a product walk through the tiles, however many there are
            assert isinstance(grids[0][0], int if name == "gated_linear" else torch.SymInt), name
    assert not env.guards, [str(g.expr) for g in env.guards]


def test_guards_refuse_symbolic_rows_and_scalars():
    env, (x,) = symbolic(torch.empty(48, 64))
    assert (
        "the row length is dynamic"
        in FUSION_RULES["layer_norm"].guard_fn(x, None, None, 1e-5).reason
    )
    half = x.bfloat16()
    refused = FUSION_RULES["gated_linear"].guard_fn(half, half, None, half, None, "sigmoid")
    assert "w1 has a dynamic shape" in refused.reason
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource("s")
    s = env.create_symbol(0.5, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    s = env.create_symfloatnode(s, hint=0.5, source=source)
    assert "s is dynamic" in FUSION_RULES["add_mul_exp"].guard_fn(x, x, s).reason
    assert not env.guards


def test_as_rows_copies_only_what_it_must():
    x = torch.randn(4, 6, 8)
    assert as_rows(x)[0] is x and as_rows(x)[1:] == (24, 8)
    assert as_rows(x[..., :5])[1:] == (24, 8)  # padded rows
    assert as_rows(x[:, ::2])[1:] == (12, 16)
    assert as_rows(x[:, :3])[0].is_contiguous()  # uneven distances
    assert as_rows(x.mT)[0].is_contiguous()
    assert as_rows(x[0, 0])[1:] == (1, 8)


def compile_kernels(*options: str) -> None:
    output_of("-m", "benchmarks.compile_kernels", *options)


def test_every_kernel_compiles_without_a_gpu(tmp_path):
    """For sm_90, without spilling, each tile in one layout; what other versions of Triton made of
    them stays in the file.
    """
    other = dict(kernel="add_mul_kernel", triton="3.0.0", registers=7)
    Run("compile_kernels", dict(torch="2.5.0", triton="3.0.0"), [other]).save(
        tmp_path / "compiled.json"
    )
    compile_kernels("--each-kernel", "--out", str(tmp_path / "compiled.json"))
    run = Run.load(tmp_path / "compiled.json")
    assert run.rows[0] == other and run.about["triton"] == f"3.0.0, {triton.__version__}"
    assert {"flash_kernel", "norm_backward_shared_kernel"} < {row["kernel"] for row in run.rows[1:]}


MIXED = """
import os
os.environ["TRITON_INTERPRET"] = "0"
from benchmarks.launches.launches import all_launches
from benchmarks.launches.resources import usage

for one in all_launches(["channel_norm"]):
    if one.launch.name == "channel_norm_backward_kernel" and one.work == "b=32 c=768 n=7":
        print(one.dtype, usage(one.launch).mixed)
"""


def test_channels_of_odd_planes_are_not_mixed():
    """Triton 3.6 added up different channels of planes of 7 x 7 in fp32."""
    told = output_of("-c", MIXED).splitlines()
    assert told[-2:] == ["bf16 []", "fp32 []"]


def test_mixed_tiles():
    layouts = (
        "#blocked = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [32, 1], "
        "warpsPerCTA = [8, 1], order = [0, 1]}>\n"
        "#blocked1 = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], "
        "warpsPerCTA = [8, 1], order = [1, 0]}>\n"
    )
    line = (
        "%1 = tt.reshape %g_46 allow_reorder efficient_layout : tensor<512x16xf32, #{}> "
        "-> tensor<512x1x16xf32, #blocked2> loc(#loc205)\n"
    )
    assert mixed_tiles(layouts + line.format("blocked")) == [(512, 16)]
    assert not mixed_tiles(layouts + line.format("blocked1"))
    assert not mixed_tiles(layouts)


def test_torn_tiles():
    line = "%0 = arith.{} %1, %2 : tensor<{}xf32, #{}> loc(#loc1)\n"
    one = line.format("addf", "8x128", "blocked") + line.format("mulf", "8x128", "blocked")
    assert not torn_tiles(one + line.format("mulf", "16x128", "blocked1"))
    torn = one + line.format("subf", "8x128", "blocked1")
    assert torn_tiles(torn) == [(8, 128)]
    assert not torn_tiles(torn + "tt.dot")
    for beside in ("8x1", "1x128", "1x4096", "4x64"):
        assert not torn_tiles(torn.replace("8x128", beside))


@pytest.mark.full
def test_torch_sees_what_every_kernel_writes():
    compile_kernels("--mutations")


def test_refusals():
    x, w = randn(4, 6), randn(6)
    for name, args, sentence in [
        (
            "softmax",
            (randn(2, 1, 1, 4, 6), None, randn(6), None, None),
            "x has 5 dimensions and a mask; the kernel takes up to 4",
        ),
        ("softmax", (x.t(), None, None, None, None), "the elements of a row are"),
        ("add_rms_norm", (x, randn(6), w, None, 1e-5), "x has shape (4, 6) and residual (6,)"),
        ("rms_norm", (x, randn(4, 6), None, 1e-5), "is not a plain vector"),
        ("dropout_add", (x, randn(6), 0.1), "x has shape (4, 6) and residual (6,)"),
        ("dropout_add", (randn(), randn(), 0.1), "x is a single number"),
        ("dropout_add_layer_norm", (x, x, w.half(), w, 0.1, 1e-5), "weight is torch.float16"),
        (
            "cross_entropy",
            (x, torch.zeros(8, dtype=torch.long)[::2], None, -100, 0.0, "mean", "none"),
            "target has shape",
        ),
        ("quantize_per_token", (x.double(), None, "scale", "largest", "none"), "float64"),
    ]:
        answer = FUSION_RULES[name].guard_fn(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason, answer
