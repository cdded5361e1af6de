"""On a GPU: attention in shifted windows, compiled, against fp64."""

import pytest
import torch
from torch import nn

from tests.gpu.test_on_gpu import ALWAYS, as_close_as_eager, fused, profiled, ran
from tests.test_windows import apart, together

pytestmark = pytest.mark.gpu
HEADS, HEAD, SIDE = 3, 32, 7


class Windows(nn.Module):
    """Attention of Swin, in windows that are shifted or not, with a learned bias."""

    def __init__(self, windows):
        super().__init__()
        n = SIDE * SIDE
        self.project = nn.Linear(96, 3 * HEADS * HEAD)
        self.bias = nn.Parameter(torch.randn(HEADS, n, n))
        other = torch.rand(windows or 1, n, n) > 0.7
        self.register_buffer("masks", other * -100.0 if windows else None)

    def forward(self, x):
        heads = self.project(x).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        s = (q * HEAD**-0.5) @ k.transpose(-2, -1) + self.bias
        s = s if self.masks is None else together(apart(s, self.masks))
        return torch.softmax(s, -1) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("windows", [None, 16])
def test_windows_train(windows, dtype):
    torch.manual_seed(0)
    module = Windows(windows).to("cuda", dtype)
    x = torch.randn(8 * 16, SIDE * SIDE, 96, device="cuda", dtype=dtype, requires_grad=True)
    compiled = torch.compile(module, backend="fusion", options=ALWAYS, fullgraph=True)
    as_close_as_eager(module, compiled, x)
    (site,) = fused()["attention"]
    assert (site.forward, site.backward) == ("kernel", "kernel")
    assert ("masks of 16 windows" in site.reason) == (windows is not None)
    kernels, host = profiled(lambda: compiled(x).sum().backward())
    names = ["flash_short_kernel", "flash_short_gradients_kernel"]
    names = ["flash_kernel", "flash_bias_kernel"] if dtype == torch.float32 else names
    assert all(ran(name, kernels) for name in names), kernels
    assert not [name for name in host if name.startswith("fusion::")], "an opaque op"
