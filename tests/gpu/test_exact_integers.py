"""On a GPU: the integers of quantised tensors are eager's, and those of normalised rows
next to it.
"""

import pytest
import torch

import fusion_backend
from fusion_backend.frontends.loading import patterns

pytestmark = pytest.mark.gpu
INT8, NORM, TOKEN = (
    next(p for p in patterns() if p.name == name)
    for name in ("quantize_int8", "rms_norm_quantize", "quantize_per_token")
)
SPECIAL = [float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, float("nan")]


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, ties among them, and special values as far as there is room; a single number
    is a normal one.
    """
    x = torch.randn(size, device="cuda") * 4
    if size > 1000:
        x[: len(SPECIAL)] = torch.tensor(SPECIAL)
        x[100:700] = (torch.arange(-300, 300, device="cuda") + 0.5) / 16
    return x.to(dtype)


def agrees(got, x, scale, zero_point):
    """Eager computes 16 bits rounded after each step, the kernel in fp32; torch does not define the
    int8 of NaN.
    """
    want = INT8.reference(x.float(), scale, zero_point)
    assert got.dtype == torch.int8 and torch.equal(got[~x.isnan()], want[~x.isnan()])
    assert not got[x.isnan()].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 1003, 10_000_000])
def test_quantize_int8(size, dtype):
    x = values(size, dtype)
    for scale in (0.05, 1 / 3, 0.0625, 1e-3, 7.0):
        for zero_point in (None, 3.0, -7.0):
            agrees(INT8.kernel_fn(x, scale, zero_point), x, scale, zero_point)


@pytest.mark.parametrize("zero_point", [None, -7.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_int8_compiled(dtype, zero_point):
    """Through Inductor, which hands numbers to kernels as fp64."""
    fusion_backend.reset()
    torch.compiler.reset()
    options = {"fusion.gate": "always", "fusion.only": ["quantize_int8"]}
    compiled = torch.compile(
        lambda x: INT8.reference(x, 0.037, zero_point),
        backend="fusion",
        options=options,
        dynamic=False,
    )
    x = values(10_000_000, dtype)
    agrees(compiled(x), x, 0.037, zero_point)
    (site,) = fusion_backend.report().fused
    assert site.forward == "kernel", site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, n", [(8192, 4096), (7, 100), (256, 2049), (64, 8192)])
@pytest.mark.parametrize("by", ["scale", "reciprocal", "inverse"])
def test_rms_norm_quantize(rows, n, dtype, by):
    """Against the reference in fp64: roundings move a scale, and a quotient that is near a half."""
    x, w = (
        torch.randn(rows, n, device="cuda").to(dtype),
        (torch.rand(n, device="cuda") + 0.5).to(dtype),
    )
    q, scale = NORM.launched((x, w, None, 1e-6, 1e-5, by, "largest"), save=False)
    _, want = NORM.reference(x.double(), w.double(), None, 1e-6, 1e-5, by, "largest")
    # some roundings on either side; one step of bf16
    step = 5e-7 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(scale.double(), want, rtol=step, atol=0)
    y = torch.nn.functional.rms_norm(x.double(), (n,), None, 1e-6) * w.double()
    # of the scale as returned
    expected = y * scale.double() if by == "inverse" else y / scale.double()
    expected = expected.round().clamp(-128, 127)
    apart = (q.double() - expected).abs()
    assert apart.max() <= 1 and (apart > 0).sum() <= max(1, x.numel() // 1000)


@pytest.mark.parametrize("by", ["scale", "reciprocal", "inverse"])
@pytest.mark.parametrize("n", [100, 4096, 131072])
def test_quantize_per_token_at_ties(n, by):
    """The inverse is rounded once more than the scale, which shows half way between integers."""
    scale = torch.rand(64, 1, device="cuda") + 0.5
    steps = (torch.arange(n - 1, device="cuda") % 254 - 127 + 0.5) * scale
    args = torch.cat([127 * scale, steps], 1), None, by, "largest", "none"
    for got, want in zip(TOKEN.launched(args, save=False), TOKEN.reference(*args), strict=True):
        assert torch.equal(got, want)
