"""Layer norms whose rows are the channels of signals: a transposed view is read as it lies, and
the result lies likewise.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm import channel_norm
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Unmeasured
from fusion_backend.testing import assert_fuses, collect
from tests.kernel_checks import FLOATS, check, check_training, randn, runs_kernels
from tests.measured_cases import Answers, as_on_a_gpu, decided

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "layer_norm"
PATTERN = FUSION_RULES[NAME]


def rows(*shape, dtype=torch.float32):
    """`[n, t, c]` of a tensor `[n, c, t]`."""
    n, t, c = shape
    return randn(n, c, t, dtype=dtype).transpose(1, 2)


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 9, 12), (3, 1, 7), (1, 2049, 3), (2, 3, 300)])
@pytest.mark.parametrize("vectors", ["both", "weight", "none"])
def test_value_and_gradients(shape, dtype, vectors):
    x = rows(*shape, dtype=dtype)
    weight = randn(shape[-1], dtype=dtype) if vectors != "none" else None
    bias = randn(shape[-1], dtype=dtype) if vectors == "both" else None
    check(NAME, x, weight, bias, 1e-5, like=x)


@runs_kernels
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_result_that_is_read_in_16_bits(narrow):
    x = rows(2, 9, 12)
    check(NAME, x, randn(12), randn(12), 1e-5, narrow=narrow, like=x)


def test_which_rows_are_channels():
    found = channel_norm.channels_of_rows
    x = torch.randn(2, 12, 9)
    assert found(x.transpose(1, 2)).data_ptr() == x.data_ptr()
    assert found(x.transpose(1, 2)).shape == x.shape
    for other in (
        x,
        torch.randn(2, 12, 9, 5).permute(0, 2, 3, 1),
        x.transpose(0, 1),
        x[..., ::2].transpose(1, 2),
        x[0].t(),
        x.transpose(0, 2),
        torch.randn(2, 6, 9).expand(2, 6, 9)[:, :, None].expand(2, 6, 4, 9).transpose(1, 3),
    ):
        assert found(other) is None


def test_what_the_guard_refuses():
    x, weight = rows(2, 9, 12), torch.randn(12)
    assert PATTERN.guard_fn(x, weight, None, 1e-5) is None
    assert "bfloat16" in str(PATTERN.guard_fn(x.bfloat16(), weight, None, 1e-5))
    assert "1025 channels" in str(PATTERN.guard_fn(rows(1, 3, 1025), None, None, 1e-5))
    assert PATTERN.guard_fn(x.contiguous(), weight, None, 1e-5) is None
    strided = torch.randn(2, 12, 9)[..., ::2].transpose(1, 2)
    assert "apart" in str(PATTERN.guard_fn(strided, weight, None, 1e-5))


@runs_kernels
def test_a_speech_model_trains():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv1d(4, 12, 3), nn.Conv1d(12, 5, 3)
            self.norm = nn.LayerNorm(12)

        def forward(self, x):
            h = F.relu(self.first(x)).transpose(1, 2)
            return self.second(F.dropout(self.norm(h), 0.0).transpose(1, 2))

    check_training(NAME, Layer(), torch.randn(2, 4, 21), False)


READERS = {
    "returned": (lambda y, w: y, True),
    "elementwise code that is returned": (lambda y, w: y.sin(), True),
    "a convolution": (lambda y, w: F.conv1d(F.dropout(y, 0.0).transpose(1, 2), w), False),
}


@pytest.mark.parametrize(("read", "copied"), READERS.values(), ids=READERS)
def test_who_sees_the_layout_gets_a_copy(read, copied):
    """On a GPU, as fakes have it. In eager the result of a transposed view is contiguous."""
    options = {"fusion.gate": "always", "fusion.only": NAME}
    with FakeTensorMode(), trial(lambda *launch: None):
        x, w = torch.empty(2, 12, 9, device="cuda"), torch.empty(5, 12, 3, device="cuda")
        torch.compiler.reset()
        collector = collect(
            lambda x, w: read(F.layer_norm(x.transpose(1, 2), (12,)), w), x, w, options=options
        )
    assert {s.forward for s in collector.report.fused} == {"kernel"}, str(collector.report)
    assert any("clone" in str(n.target) for n in collector.graphs[0].graph.nodes) is copied


def test_the_tables_have_not_timed_it():
    x = torch.empty(16, 256, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, dtype=torch.bfloat16, device="meta")
    assert isinstance(
        PATTERN.worthwhile_fn(x.transpose(1, 2), weight, None, 1e-5, False), Unmeasured
    )
    assert PATTERN.worthwhile_fn(x.view(16, 4096, 256), weight, None, 1e-5, False) is None


@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_the_gate_measures_it(monkeypatch, tmp_path, ratio):
    norm, x = nn.LayerNorm(256).bfloat16(), torch.randn(16, 256, 4096).bfloat16()
    conv = nn.Conv1d(256, 8, 1).bfloat16()
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(layer_norm=ratio)), torch.no_grad():
        record = decided(lambda x: conv(norm(x.transpose(1, 2)).transpose(1, 2)), x)
    (site,) = (s for s in record.sites if s.pattern == NAME)
    assert site.fused is (ratio > 1), site


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: F.layer_norm(x.transpose(1, 2), (12,), w, b).transpose(1, 2),
        lambda x, w, b: F.layer_norm(x.permute(0, 2, 1), (12,), w, b),
    ],
)
def test_spellings(fn):
    assert_fuses(fn, torch.randn(2, 12, 9), torch.randn(12), torch.randn(12), pattern=NAME)
