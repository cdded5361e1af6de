"""On a GPU: a convolution with relu as one call of cuDNN is no further from fp64 than plain
Inductor's code, in every memory layout, and NaN stays NaN.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ALWAYS = {"fusion.gate": "always"}


class Layer(nn.Module):
    """relu(batch_norm(conv(x)) + z), or without the batch norm."""

    def __init__(self, c: int, o: int, norm: bool, **how):
        super().__init__()
        self.conv = nn.Conv2d(c, o, 3, bias=not norm, **how)
        self.norm = nn.BatchNorm2d(o) if norm else nn.Identity()
        if norm:
            for t, low, high in (("running_var", 0.5, 1.5), ("weight", 0.5, 1.5)):
                nn.init.uniform_(getattr(self.norm, t), low, high)
            for t in ("running_mean", "bias"):
                nn.init.normal_(getattr(self.norm, t))

    def forward(self, x, z):
        y = self.norm(self.conv(x))
        return F.relu(y if z is None else y + z)


def compared(layer: Layer, x, z, pattern: str, autocast: bool = False):
    """The relative errors of plain Inductor and of ours, and our result."""
    exact = copy.deepcopy(layer).double()(x.double(), None if z is None else z.double())
    errors = []
    for backend, options in (("inductor", None), ("fusion", ALWAYS)):
        torch._dynamo.reset()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            got = torch.compile(layer, backend=backend, options=options)(x, z)
        errors.append(((got.double() - exact).norm() / exact.norm()).item())
    (site,) = fusion_backend.report().fused
    assert (site.pattern, site.forward) == (pattern, "kernel"), site
    assert got.stride() == layer(x, z).stride()
    return *errors, got


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "dtype, norm, autocast",
    [
        (torch.float32, True, False),
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.bfloat16, False, False),
        (torch.float16, False, False),
    ],
)
@torch.no_grad()
def test_no_further_from_fp64(dtype, norm, autocast, residual, last):
    torch.manual_seed(0)
    layer = Layer(32, 48, norm, padding=1).to(CUDA, dtype).eval()
    x = torch.randn(4, 32, 19, 17, device=CUDA, dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    z = torch.randn(4, 48, 19, 17, device=CUDA, dtype=torch.bfloat16 if autocast else dtype)
    pattern = "conv_batch_norm_relu" if norm else "conv_relu"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cuDNN has no.*")
        plain, ours, _ = compared(layer, x, z if residual else None, pattern, autocast)
    assert ours <= 1.25 * plain, (ours, plain)


@pytest.mark.parametrize(
    "c, o, how",
    [
        (3, 64, dict(stride=2, padding=3)),
        (5, 7, {}),
        (1, 1, dict(padding=2, dilation=2)),
        (8, 8, dict(padding=(0, 1), stride=(1, 2))),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_odd_windows_and_channels(c, o, how, dtype):
    """If cuDNN has no kernel, plain torch computes the same."""
    torch.manual_seed(0)
    layer = Layer(c, o, dtype == torch.float32, **how).to(CUDA, dtype).eval()
    x = torch.randn(2, c, 31, 33, device=CUDA, dtype=dtype)
    pattern = "conv_batch_norm_relu" if dtype == torch.float32 else "conv_relu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, ours, _ = compared(layer, x, None, pattern)
    assert ours <= 1.25 * plain, (ours, plain)


@pytest.mark.parametrize("residual", [False, True])
@torch.no_grad()
def test_what_is_not_finite_stays_so(residual):
    """Memory full of NaN lies around: none of it may be read."""
    layer = Layer(16, 16, False, padding=1).to(CUDA, torch.bfloat16).eval()
    x = torch.randn(2, 16, 24, 24, device=CUDA, dtype=torch.bfloat16)
    z = torch.randn_like(x) if residual else None
    x[0, 3, 5, 5], x[1, 2, 7, 7] = torch.nan, torch.inf
    if residual:
        z[0, 0, 20, 20] = torch.nan
    spoiled = [torch.full_like(x, torch.nan) for _ in range(20)]
    del spoiled
    want = layer(x, z)
    got = torch.compile(layer, backend="fusion", options=ALWAYS)(x, z)
    (site,) = fusion_backend.report().fused
    assert site.pattern == "conv_relu"
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


@torch.no_grad()
def test_a_batch_of_none_is_left_alone():
    layer = Layer(8, 8, True).to(CUDA).eval()
    x = torch.randn(0, 8, 9, 9, device=CUDA)
    got = torch.compile(layer, backend="fusion", options=ALWAYS)(x, None)
    assert got.shape == (0, 8, 7, 7)
    report = fusion_backend.report()
    assert not report.fused and "x is empty" in [site.reason for site in report.sites]
