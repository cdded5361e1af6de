"""On a GPU: the kernels of short attention, and layers that train with them, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.test_on_gpu import ALWAYS, as_close_as_eager, fused, profiled, ran
from tests.test_short_attention import (  # noqa: F401
    launchers,
    test_head_sizes,
    test_heads_and_batches_that_share_a_bias,
    test_layouts,
    test_longer_ones_with_the_gradient_of_a_bias,
    test_masks,
    test_only_wanted_gradients,
)

pytestmark = pytest.mark.gpu
BATCH, HEADS, HEAD = 70, 4, 32


class Layer(nn.Module):
    """Attention with a learned bias, or with padding."""

    def __init__(self, n, biased):
        super().__init__()
        self.project = nn.Linear(96, 3 * HEADS * HEAD)
        self.bias = nn.Parameter(torch.randn(HEADS, n, n)) if biased else None
        self.register_buffer("real", (torch.arange(n) < n - 9).repeat(BATCH, 1))

    def forward(self, x):
        heads = self.project(x).view(*x.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        mask = self.real[:, None, None, :] if self.bias is None else self.bias[None]
        return F.scaled_dot_product_attention(*heads.unbind(0), mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n, biased", [(64, True), (60, False), (100, True), (100, False)])
def test_a_layer_trains(n, biased, dtype):
    torch.manual_seed(0)
    module = Layer(n, biased).to("cuda", dtype)
    x = torch.randn(BATCH, n, 96, device="cuda", dtype=dtype, requires_grad=True)
    compiled = torch.compile(module, backend="fusion", options=ALWAYS, fullgraph=True)
    as_close_as_eager(module, compiled, x)
    (site,) = fused()["attention"]
    assert (site.forward, site.backward) == ("kernel", "kernel")
    kernels, host = profiled(lambda: compiled(x).sum().backward())
    assert ran("flash_short_kernel", kernels) == (n <= 64), kernels
    assert ran("flash_short_gradients_kernel", kernels) == (n <= 64 or biased), kernels
    assert not [name for name in host if name.startswith("fusion::")], "an opaque op"
