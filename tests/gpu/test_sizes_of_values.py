"""On a GPU: attention whose values have heads of another size, in compiled layers, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.test_on_gpu import ALWAYS, as_close_as_eager, fused, profiled, ran
from tests.test_sizes_of_values import (  # noqa: F401
    test_grouped_heads,
    test_head_sizes,
    test_layouts,
    test_masks,
    test_only_wanted_gradients,
)

pytestmark = pytest.mark.gpu
HEADS = 4


class Layer(nn.Module):
    """Attention as DeepSeek has it, but for its rotary embedding; with padding or without."""

    def __init__(self, d, e, padded):
        super().__init__()
        self.d, self.padded = d, padded
        self.project = nn.Linear(256, HEADS * (2 * d + e))

    def forward(self, x):
        b, n, _ = x.shape
        heads = self.project(x).view(b, n, HEADS, -1).transpose(1, 2)
        q, k, v = heads.split((self.d, self.d, heads.shape[-1] - 2 * self.d), -1)
        place = torch.arange(n, device=x.device)
        mask = place < n - 100 if self.padded else place <= place[:, None]
        return F.scaled_dot_product_attention(q, k, v, mask.expand(b, 1, n, n))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", [(192, 128), (96, 64), (40, 17), (64, 200)])
def test_a_layer_trains(sizes, padded, dtype):
    torch.manual_seed(0)
    module = Layer(*sizes, padded).to("cuda", dtype)
    x = torch.randn(2, 517, 256, device="cuda", dtype=dtype, requires_grad=True)
    compiled = torch.compile(module, backend="fusion", options=ALWAYS, fullgraph=True)
    # with the last of the sizes plain Inductor is further from fp64 than eager
    plain = torch.compile(module, fullgraph=True) if sizes == (64, 200) else None
    as_close_as_eager(module, compiled, x, plain)
    (site,) = fused()["attention"]
    kernels, host = profiled(lambda: compiled(x).sum().backward())
    assert not [name for name in host if name.startswith("fusion::")], "an opaque op"
    if not padded and sizes != (40, 17):
        assert site.forward == "library" and not any("softmax" in name for name in kernels), kernels
        return
    assert (site.forward, site.backward) == ("kernel", "kernel") and "with values of" in site.reason
    assert ran("flash_kernel", kernels) and ran("flash_keys_kernel", kernels), kernels
