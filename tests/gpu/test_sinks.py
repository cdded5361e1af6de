"""On a GPU: attention with sinks in compiled layers, against fp64."""

import pytest
import torch
from torch import nn

from tests.gpu.test_on_gpu import ALWAYS, as_close_as_eager, fused, profiled, ran
from tests.test_attention import repeat_kv
from tests.test_sinks import weights

pytestmark = pytest.mark.gpu
HEADS, KV, HEAD = 8, 2, 64


class Layer(nn.Module):
    """Attention of gpt-oss, with a window or without."""

    def __init__(self, window):
        super().__init__()
        self.window = window
        self.project = nn.Linear(256, (HEADS + 2 * KV) * HEAD)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        b, n, _ = x.shape
        heads = self.project(x).view(b, n, -1, HEAD).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV, KV), 1)
        k, v = repeat_kv(k, HEADS // KV), repeat_kv(v, HEADS // KV)
        apart = torch.arange(n, device=x.device)[:, None] - torch.arange(n, device=x.device)
        seen = (apart >= 0) if self.window is None else (apart >= 0) & (apart < self.window)
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        mask = torch.where(seen, zero, torch.finfo(x.dtype).min)
        return weights(q @ k.mT * HEAD**-0.5 + mask, self.sinks) @ v


def layer(window, dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = Layer(window).to("cuda", dtype)
    return made, torch.randn(2, 517, 256, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 33])
def test_a_layer_trains(window, dtype):
    module, x = layer(window, dtype)
    compiled = torch.compile(module, backend="fusion", options=ALWAYS, fullgraph=True)
    as_close_as_eager(module, compiled, x)
    (site,) = fused()["attention"]
    assert (site.forward, site.backward) == ("kernel", "kernel") and "with sinks" in site.reason
    kernels, host = profiled(lambda: compiled(x).sum().backward())
    assert ran("flash_kernel", kernels) and ran("flash_keys_kernel", kernels), kernels
    assert not [name for name in host if name.startswith("fusion::")], "an opaque op"


def test_cuda_graphs():
    module, x = layer(33)
    compiled = torch.compile(
        module, backend="fusion", options=ALWAYS | {"triton.cudagraphs": True}, fullgraph=True
    )
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn_like(x)
            got, want = compiled(x).clone(), module.double()(x.double())
            module.to(torch.bfloat16)
            assert (got.double() - want).norm() <= 1e-2 * want.norm()
