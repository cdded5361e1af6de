"""Autocast on CUDA casts more than on a CPU: softmax, sums and losses compute in fp32. Fakes stand
for tensors of a GPU.
"""

import math

import pytest
import torch
import torch.cuda.amp.common
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_backend.capture.autocast import casts_of, casts_of_roundings
from fusion_backend.kernels.common import rows
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm import group_norm_rows
from fusion_backend.testing import collect, fused_nodes

pytestmark = pytest.mark.filterwarnings("ignore:fusion:RuntimeWarning")  # no GPU: no kernel
HALF = [torch.bfloat16, torch.float16]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def autocast_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def cuda(*shape, dtype=torch.float32, grad=True):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


IN_FP32 = {
    "softmax": (aten.softmax.int, -1),
    "log_softmax": (aten.log_softmax.int, -1),
    "sum": (aten.sum.default,),
    "sum of rows": (aten.sum.dim_IntList, [-1]),
    "norm": (aten.linalg_vector_norm.default, 2, [-1]),
    "layer_norm": (aten.layer_norm.default, [8]),
    "pow": (aten.pow.Tensor_Scalar, 2),
    "logsumexp": (aten.logsumexp.default, [-1]),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("op, rest", [(op, rest) for op, *rest in IN_FP32.values()], ids=IN_FP32)
def test_what_is_computed_in_fp32(op, rest, dtype):
    x = cuda(4, 8, dtype=dtype)
    assert casts_of(op, (x, *rest), {}, "cuda", dtype) == {0: torch.float32}


@pytest.mark.parametrize("dtype", HALF)
def test_class_weights_are_cast_late(dtype):
    x, target = cuda(4, 8, dtype=dtype), cuda(4, dtype=torch.int64, grad=False)
    args = x, target, cuda(8, dtype=dtype, grad=False)
    fp32 = torch.float32
    assert casts_of(aten.cross_entropy_loss.default, args, {}, "cuda", dtype) == {0: fp32, 2: fp32}


def test_an_operator_that_rounds_what_it_has_is_not_understood():
    x = cuda(4, 8, dtype=torch.bfloat16)
    log = [(aten._to_copy.default, (x,), {"dtype": torch.float16}, x)]
    known = aten.cross_entropy_loss.default, [x], None, "cuda", torch.bfloat16, log, x
    assert casts_of_roundings(*known) is None


@pytest.mark.parametrize("dtype", HALF)
def test_nothing_is_cast_that_autocast_leaves(dtype):
    x = cuda(4, 8, dtype=dtype)
    for op, *rest in (
        (aten.mul.Tensor, x),
        (aten.relu.default,),
        (aten.softmax.int, -1, torch.float32),
        (aten.mean.dim, [-1]),
    ):
        assert casts_of(op, (x, *rest), {}, "cuda", dtype) == {}, op


def by_hand(x, w):
    q, k, v = (x @ w).view(2, 9, 3, 2, 16).permute(2, 0, 3, 1, 4)
    return (q @ k.mT / math.sqrt(16)).softmax(-1) @ v


def with_a_mask(x, w):
    q, k, v = (x @ w).view(2, 9, 3, 2, 16).permute(2, 0, 3, 1, 4)
    hidden = torch.ones(9, 9, dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ k.mT / math.sqrt(16)).masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def labels(x, w):
    return F.cross_entropy((x @ w).flatten(0, 1), torch.zeros(18, dtype=torch.int64, device="cuda"))


def tokens(x, w):
    index = torch.zeros(2, 9, 1, dtype=torch.int64, device="cuda")
    return F.log_softmax(x @ w, -1).gather(-1, index)


def distilled(x, w):
    return F.kl_div(F.log_softmax(x @ w, -1), F.softmax(x @ w.flip(0), -1), reduction="sum")


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "fn, pattern",
    [
        (by_hand, "attention"),
        (with_a_mask, "attention"),
        (lambda x, w: torch.softmax(x @ w, -1), "softmax"),
        (labels, "linear_cross_entropy"),
        (tokens, "token_log_probs"),
        (distilled, "distillation_loss"),
    ],
)
def test_found(fn, pattern, dtype):
    with torch.autocast("cuda", dtype):
        report = collect(fn, cuda(2, 9, 8), cuda(8, 96)).report
    assert pattern in {s.pattern for s in report.sites}, str(report)


def convolutions(x, w):
    y = F.conv2d(x, w, padding=1)
    return F.conv2d(F.silu(F.group_norm(y, 4, weight(32), weight(32))), w, padding=1)


def layers(x, w):
    return F.linear(F.layer_norm(F.linear(x, w), (32,), weight(32), weight(32)), w)


def residual_stream(x, w):
    vectors, h = [weight(32), weight(32)], x + F.linear(x, w)
    return F.linear(F.layer_norm(h, (32,), *vectors), w) + h


def modulated(x, w):
    scale = F.linear(x[:, :1], w)
    return F.linear(F.layer_norm(x, (32,)) * (1 + scale) + scale, w)


def weight(n):
    return torch.ones(n, device="cuda")


IMAGE, ROWS = ((2, 32, 6, 6), (32, 32, 3, 3)), ((2, 9, 32), (32, 32))
FP32 = torch.float32


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "fn, shapes, name, given",
    [
        (convolutions, IMAGE, "group_norm", ["half", FP32, FP32]),
        (layers, ROWS, "layer_norm", ["half", FP32, FP32]),
        (residual_stream, ROWS, "add_layer_norm", [FP32, "half", FP32, FP32]),
        (modulated, ROWS, "modulated_norm", [FP32, "half", "half"]),
    ],
)
def test_norms_read_and_write_16_bits(fn, shapes, name, given, dtype, monkeypatch):
    """A norm reads the result of a layer before its cast to fp32, and writes what layers read."""
    for module in (rows, group_norm_rows):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    only = {"fusion.gate": "always", "fusion.only": name}
    with torch.autocast("cuda", dtype), trial(lambda *launch: None):
        collector = collect(fn, *(cuda(*shape) for shape in shapes), options=only)
    (node,) = fused_nodes(collector.graphs[0])
    assert node.kwargs["narrow"] == str(dtype).removeprefix("torch.")
    read = [a.meta["example_value"].dtype for a in node.args if isinstance(a, torch.fx.Node)]
    assert read == [dtype if d == "half" else d for d in given]
