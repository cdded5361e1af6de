"""On a GPU: dropout of a hidden layer by the product that makes it, launched directly and through
Inductor, against fp64 with the mask of the seed.
"""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.dropout import Dropout, dropped, kept
from fusion_backend.kernels.gemm.epilogue import LOWEST
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.specialised_gated_gradient import ACTIVATIONS as GATES
from fusion_backend.kernels.gemm.specialised_gradient import ACTIVATIONS as GRADIENT_ACTS
from fusion_backend.kernels.gemm.specialised_linear import specialises
from fusion_backend.kernels.gemm.tiles import SPECIALISED, candidates
from tests.gpu.test_on_gpu import ALWAYS, fused, profiled, ran
from tests.gpu.test_products import (
    DTYPES,
    FeedForward,
    close,
    close_twice,
    product,
    tensor,
    weight,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", GRADIENT_ACTS)
@pytest.mark.parametrize("m, k, n", [(1, 8, 8), (5000, 200, 776)])
def test_dropout_of_a_hidden_layer(m, k, n, act, dtype):
    """The same elements whatever the tile is; those of the seed; marked for the backward."""
    seed, p = torch.tensor([4567890123456789012], device="cuda"), 0.3
    x, w, b = tensor(m, k, dtype=dtype), weight(k, n, dtype), tensor(n, dtype=dtype)
    want, keep = dropped(activate(product(x, w, b), act), seed, p), kept(seed, (m, n), p)
    takes = specialises(x, w, None, act)
    for tile in (*candidates(1, 2), *([SPECIALISED[1]] if takes else [])):
        y, pre, _ = linear(x, w, b, act, save=(True, False), dropout=Dropout(seed, p), tile=tile)
        close_twice(y, want)
        assert not y[~keep].any() and (pre[~keep] == LOWEST.value).all()
        close(pre[keep], product(x, w)[keep])
        alone = linear(x, w, b, act, dropout=Dropout(seed, p), tile=tile)[0]
        assert torch.equal(alone, y)
    w2 = weight(k, n, dtype)
    for tile in (candidates(2, 2)[0], SPECIALISED[2]):
        y, gate, up = linear(
            x, w, b, act, w2=w2, save=(True, True), dropout=Dropout(seed, p), tile=tile
        )
        close_twice(y, want * product(x, w2))
        assert (gate[~keep] == LOWEST.value).all()
        close(up, product(x, w2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", GRADIENT_ACTS)
def test_gradients_of_what_was_dropped(act, dtype):
    dy, w, b = tensor(5000, 200, dtype=dtype), weight(200, 776, dtype), tensor(776, dtype=dtype)
    seed = torch.tensor([7], device="cuda")
    pre, up = (tensor(5000, 776, dtype=dtype) for _ in range(2))
    keep = kept(seed, pre.shape, 0.3)
    marked = torch.where(keep, pre, LOWEST.value).to(dtype)
    leaf, factor = (pre.double() + b.double()).requires_grad_(), up.double().requires_grad_()
    (want,) = torch.autograd.grad(dropped(activate(leaf, act), seed, 0.3), leaf, product(dy, w))
    for tile in (candidates(1, 2)[0], SPECIALISED[1]):
        d, sums = hidden_gradient(dy, w, marked, b, act, True, tile, 1 / 0.7)
        close_twice(d, want)
        close_twice(sums.to(dtype), want.sum(0))
        assert not d[~keep].any()
    if act in GATES:
        h = dropped(activate(leaf, act) * factor, seed, 0.3)
        wants = torch.autograd.grad(h, (leaf, factor), product(dy, w))
        found = gated_gradient(dy, w, marked, b, up, None, act, True, SPECIALISED[1], 1 / 0.7)
        for got, want in zip(found, (*wants, h.detach()), strict=True):
            close_twice(got, want)
            assert not got[~keep].any()


@pytest.mark.parametrize("gated", [False, True])
def test_dropout_inside_a_block_runs_our_kernels(gated):
    """Through Inductor: the gradient of the first weight is that of the mask that was drawn, which
    an identity as second weight shows.
    """
    m = FeedForward(gated, True, 1024, 4096, p=0.3).to("cuda", torch.bfloat16)
    with torch.no_grad():
        m.down.weight.copy_(torch.eye(4096)[:1024])
        m.down.bias.zero_()
    compiled, x = torch.compile(m, backend="fusion", options=ALWAYS), tensor(16384, 1024)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    (got,) = torch.autograd.grad(second.sum(), m.up.weight)
    assert list(fused()) == ["dropout_gated_mlp" if gated else "dropout_mlp"]
    keep = second != 0
    assert abs(keep.double().mean() - 0.7) < 0.01
    w = m.up.weight.double().requires_grad_()
    h = x.double() @ w.t() + m.up.bias.double()
    if gated:
        h = h * F.silu(x.double() @ m.gate.weight.double().t() + m.gate.bias.double())
    else:
        h = F.gelu(h)
    want = h[:, :1024] * keep / 0.7
    close_twice(second, want)
    (want,) = torch.autograd.grad(want.sum(), w)
    close_twice(got[:1024], want[:1024])
    kernels, _ = profiled(lambda: compiled(x).sum().backward())
    kind = "gated_gradient" if gated else "gradient"
    assert ran("specialised_linear_kernel", kernels) and ran(f"specialised_{kind}_kernel", kernels)
