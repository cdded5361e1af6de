"""Classes of kernels, and what a profile and a Chrome trace say about a step."""

import gzip
import json

import pytest
import torch

from benchmarks.measure import trace
from benchmarks.measure.timing import Clock
from benchmarks.pattern_runs.measuring import Bench, measure
from benchmarks.records.rows import (
    FAILED,
)
from benchmarks.workloads.work import Work
from fusion_backend.frontends.loading import patterns

PNG = b"\x89PNG\r\n\x1a\n"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128>", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matmul"),
        ("triton_tem_fused_mm_3", "matmul"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6", "attention"),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>",
            "attention",
        ),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_poi_fused_add_layer_norm_mm_2", "pointwise"),
        ("triton_red_fused__scaled_dot_product_attention_0", "norm, softmax, reduction"),
        ("triton_per_fused_native_layer_norm_5", "norm, softmax, reduction"),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>",
            "norm, softmax, reduction",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
            "norm, softmax, reduction",
        ),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copy"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
            "copy",
        ),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "pointwise",
        ),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "other"),
        ("softmax_kernel", "ours"),
        ("softmax_kernel_0", "ours"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert trace.kind_of(kernel, {"softmax_kernel"}) == kind


def test_our_kernels_are_those_in_triton_and_in_gluon():
    patterns()
    ours = trace.our_kernels()
    assert {"norm_kernel", "linear_kernel", "specialised_linear_kernel"} <= ours, ours


def test_our_kernels_are_known_by_name():
    patterns()
    ours = trace.our_kernels()
    assert {"add_mul_exp_kernel", "quantize_int8_kernel"} <= ours
    assert not any(
        trace.kind_of(name, set()) == "matmul" for name in ours if "linear" not in name
    ), ours


def test_a_trace_of_a_gpu_is_read(tmp_path):
    """Two steps; host events, and regions drawn on the device's line, are not kernels."""
    events = [
        dict(cat="kernel", name="nvjet_x", dur=300.0),
        dict(cat="kernel", name="nvjet_x", dur=500.0),
        dict(cat="kernel", name="triton_poi_fused_add_0", dur=100.0),
        dict(cat="gpu_memcpy", name="Memcpy DtoD", dur=100.0),
        dict(cat="cpu_op", name="aten::mm", dur=9000.0),
        dict(cat="gpu_user_annotation", name="step", dur=9000.0),
        dict(name="process_name", ph="M"),
    ]
    for path, opened in ((tmp_path / "t.json", open), (tmp_path / "t.json.gz", gzip.open)):
        with opened(path, "wt") as file:
            json.dump(dict(traceEvents=events), file)
        found = trace.read_trace(path, calls=2)
        assert [(k.name, k.calls, k.ms) for k in found.kernels[:1]] == [("nvjet_x", 1, 0.4)]
        assert found.ms == pytest.approx(0.5) and found.shares() == pytest.approx(
            {"matmul": 0.8, "pointwise": 0.1, "copy": 0.1}
        )
    assert "80.0%" in found.table(rows=1) and "2 more" in found.table(rows=1)


def test_profile_of_a_cpu(tmp_path):
    a, path = torch.randn(64, 64), tmp_path / "deep" / "trace.json"
    found = trace.profile(lambda: torch.softmax(a @ a, -1), CPU, calls=2, trace=path)
    names = {k.name: k for k in found.kernels}
    assert names["aten::mm"].kind == "matmul" and names["aten::mm"].calls == 1
    assert names["aten::_softmax"].kind == "norm, softmax, reduction"
    assert json.loads(path.read_text())["traceEvents"]


def test_traces_of_patterns(tmp_path, capsys):
    def refuse(*_):
        raise ValueError("no such kernel")

    patterns()
    bench = Bench(Clock(CPU), 1e10, 1e12, 1, trace=tmp_path)
    makes = {"eager": lambda reference: reference, "failing": lambda reference: refuse}
    row = measure(Work("softmax", dict(rows=8, n=16), torch.float32, train=True), bench, makes)
    assert [one.status for one in row.contenders] == ["ok", FAILED]
    assert [path.name for path in tmp_path.iterdir()] == [
        "softmax-f32-rows=8-n=16-train-eager.json.gz"
    ]
    assert "aten::_softmax_backward_data" in capsys.readouterr().out
