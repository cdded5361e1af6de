"""The patterns dropout_mlp and dropout_gated_mlp, feed-forward blocks in training with dropout of
their hidden layer: which blocks are found, what is dropped, values and gradients against fp64, and
what is kept.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.common.dropout import Dropout, dropped, kept
from fusion_backend.kernels.gemm.epilogue import LOWEST
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.tiles import Tile
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import collect
from tests.kernel_checks import (
    DEVICE,
    SEED,
    assert_close,
    check,
    distance,
    exact,
    randn,
    runs_kernels,
)

ACTS = ["relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu"]
HALF = [torch.bfloat16, torch.float16]
SMALL, IN_HALVES = Tile(64, 32, 32, 4, 2, 1, 1), Tile(64, 64, 16, 4, 2, 1, 2, group=2)
ALWAYS = {"fusion.gate": "always"}


def weight(k, n, dtype=torch.half):
    return (randn(n, k, dtype=dtype) * k**-0.5).t()


class Gated(nn.Module):
    """The feed-forward block of T5 1.1."""

    def __init__(self, width=24, inner=48, p=0.3):
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(width, inner, False) for _ in range(2))
        self.wo, self.dropout = nn.Linear(inner, width, False), nn.Dropout(p)
        self.act = partial(F.gelu, approximate="tanh")

    def forward(self, x):
        return self.wo(self.dropout(self.act(self.wi_0(x)) * self.wi_1(x)))


class Block(nn.Module):
    """The feed-forward block of torch.nn.TransformerEncoderLayer."""

    def __init__(self, width=24, inner=48, bias=True, act=F.relu, p=0.3):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        self.act, self.dropout = act, nn.Dropout(p)

    def forward(self, x):
        return self.linear2(self.dropout(self.act(self.linear1(x))))


# The kernels


@runs_kernels
@pytest.mark.parametrize("tile", [SMALL, IN_HALVES], ids=["whole", "in halves"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("act", ACTS)
def test_what_the_product_drops(act, dtype, tile):
    """Rows and columns beyond a tile; the mask is that of the seed; marks are where it drops."""
    x, w, b = randn(70, 40, dtype=dtype), weight(40, 72, dtype), randn(72, dtype=dtype)
    for bias in (b, None):
        y = exact(x) @ exact(w) + (0 if bias is None else exact(b))
        out, pre, _ = linear(
            x, w, bias, act, save=(True, False), dropout=Dropout(SEED, 0.3), tile=tile
        )
        assert_close(out, dropped(activate(y, act), SEED, 0.3), dtype)
        keep = kept(SEED, y.shape, 0.3)
        assert (out[~keep] == 0).all() and (pre[~keep] == LOWEST.value).all()
        assert_close(pre[keep], (exact(x) @ exact(w))[keep], dtype)
        alone = linear(x, w, bias, act, dropout=Dropout(SEED, 0.3), tile=tile)
        assert torch.equal(alone[0], out) and not alone[1].numel()


@runs_kernels
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("act", ACTS)
def test_marks_have_no_gradient_and_survivors_the_scaled_one(act, dtype):
    dy, w, b = randn(70, 40, dtype=dtype), weight(40, 72, dtype), randn(72, dtype=dtype)
    pre, keep = randn(70, 72, dtype=dtype), kept(SEED, (70, 72), 0.3)
    marked = torch.where(keep, pre, LOWEST.value).to(dtype)
    for tile, bias in ((SMALL, None), (IN_HALVES, b)):
        leaf = (exact(pre) if bias is None else exact(pre) + exact(b)).requires_grad_()
        out = dropped(activate(leaf, act), SEED, 0.3)
        (want,) = torch.autograd.grad(out, leaf, exact(dy) @ exact(w))
        d, sums = hidden_gradient(dy, w, marked, bias, act, True, tile, 1 / 0.7)
        assert_close(d, want, dtype)
        assert not d[~keep].any()
        by_tanh = act == "gelu" and dtype == torch.bfloat16  # rounds to 2^-11
        assert_close(sums, want.sum(0), torch.float32, factor=100 if by_tanh else 1)


@runs_kernels
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so(act, value):
    """0 · inf is NaN, dropped or not, as in eager code."""
    x, w = torch.full((16, 8), value, dtype=torch.half, device=DEVICE), weight(8, 16).abs()
    out, pre, _ = linear(
        x, w, None, act, save=(True, False), dropout=Dropout(SEED, 0.5), tile=SMALL
    )
    assert not out.isfinite().any() and not pre.isfinite().any()


@runs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_values_and_gradients(act, bias):
    def b(n):
        return randn(n, dtype=torch.half) if bias else None

    args = (
        randn(2, 35, 40, dtype=torch.half),
        weight(40, 24),
        b(24),
        weight(24, 16),
        b(16),
        act,
        0.3,
    )
    check("dropout_mlp", *args)
    for needs in (["w1"], ["x"], ["w2", *(["b1"] if bias else [])]):
        check("dropout_mlp", *args, needs=needs)


@runs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu"])
def test_values_and_gradients_of_gates(act, bias):
    def b(n):
        return randn(n, dtype=torch.half) if bias else None

    x, w, v = randn(2, 35, 40, dtype=torch.half), weight(40, 24), weight(40, 24)
    args = x, w, b(24), v, b(24), weight(24, 16), b(16), act, 0.3
    check("dropout_gated_mlp", *args)
    for needs in (["w1"], ["w3"], ["w2", *(["b1"] if bias else [])]):
        check("dropout_gated_mlp", *args, needs=needs)


@runs_kernels
@pytest.mark.parametrize("p", [0.0, 0.999, 1.0])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_extreme_shares_and_few_rows(p, rows):
    args = randn(rows, 8, dtype=torch.half), weight(8, 24), None, weight(24, 8), None, "gelu", p
    check("dropout_mlp", *args)


@runs_kernels
def test_only_what_backward_reads_is_kept():
    args = randn(9, 8, dtype=torch.half), weight(8, 24), None, weight(24, 8), None
    for act, save, size in (("gelu", True, 216), ("gelu", False, 0), ("relu", True, 0)):
        _, pre, _ = FUSION_RULES["dropout_mlp"].launched((*args, act, 0.3, SEED), save)
        assert pre.numel() == size, (act, save)


def test_refused():
    x, w, v = randn(5, 24, dtype=torch.half), weight(24, 48), weight(48, 24)

    def guard(x, w, v):
        return FUSION_RULES["dropout_mlp"].guard_fn(x, w, None, v, None, "gelu", 0.3)

    assert guard(x, w, v) is None
    assert "take bf16 and fp16" in guard(x.float(), w.float(), v.float()).reason
    for given in ((x, w, v.bfloat16()), (x, w, v[:, :23].contiguous()), (x, w[::2, ::2], v[::2])):
        assert isinstance(guard(*given), Reject)


# Blocks of users


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [F.relu, F.gelu, partial(F.gelu, approximate="tanh"), F.silu])
def test_a_block_trains(act, bias):
    """The gradients are those of the mask that was drawn, which a second weight shows."""
    m = Block(bias=bias, act=act).half().to(DEVICE)
    x = randn(3, 5, 24, dtype=torch.half)
    with torch.no_grad():
        m.linear2.weight.copy_(torch.eye(48)[:24])  # the result is half of the hidden layer
        if bias:
            m.linear2.bias.zero_()
    compiled = torch.compile(m, backend="fusion", options=ALWAYS)
    out = compiled(x)
    assert [site.pattern for site in fusion_backend.report().fused] == ["dropout_mlp"]
    hidden = m.act(m.linear1(x)).detach()[..., :24]
    keep = out.detach() != 0
    assert 0.55 < keep[hidden != 0].double().mean() < 0.85
    assert distance(out[keep], hidden[keep] / 0.7) < 0.01
    out.float().sum().backward()
    double = m.linear1.weight.detach().double().requires_grad_()
    b = 0 if m.linear1.bias is None else m.linear1.bias.double()
    want = (m.act(x.double() @ double.t() + b)[..., :24] * keep / 0.7).sum()
    (want,) = torch.autograd.grad(want, double)
    assert distance(m.linear1.weight.grad[:24], want[:24]) < 0.02


@pytest.mark.usefixtures("eager_kernels")
def test_a_block_with_a_gate_trains():
    m = Gated().half().to(DEVICE)
    x = randn(3, 5, 24, dtype=torch.half)
    with torch.no_grad():
        m.wo.weight.copy_(torch.eye(48)[:24])
    out = torch.compile(m, backend="fusion", options=ALWAYS)(x)
    assert [site.pattern for site in fusion_backend.report().fused] == ["dropout_gated_mlp"]
    keep = out.detach() != 0
    doubles = [w.weight.detach().double().requires_grad_() for w in (m.wi_0, m.wi_1)]
    want = m.act(x.double() @ doubles[0].t()) * (x.double() @ doubles[1].t())
    want = want[..., :24] * keep / 0.7
    assert 0.55 < keep.double().mean() < 0.85 and distance(out, want) < 0.01
    out.float().sum().backward()
    for w, g in zip((m.wi_0, m.wi_1), torch.autograd.grad(want.sum(), doubles), strict=True):
        assert distance(w.weight.grad[:24], g[:24]) < 0.02


@pytest.mark.usefixtures("eager_kernels")
def test_a_layer_of_torch_trains():
    """Its other dropouts, behind the attention and behind the block, are fused as before."""
    torch.manual_seed(0)
    m = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True, dtype=torch.bfloat16)
    compiled = torch.compile(m.to(DEVICE), backend="fusion", options=ALWAYS)
    out = compiled(randn(2, 7, 32, dtype=torch.bfloat16))
    out.float().square().sum().backward()
    assert "dropout_mlp" in [site.pattern for site in fusion_backend.report().fused]
    assert all(p.grad.isfinite().all() for p in m.parameters())


def found(m, *inputs, train=True):
    m.train(train)
    return [site.pattern for site in collect(m, *inputs, options=ALWAYS).report.fused]


def test_other_blocks_are_left_alone():
    x = randn(3, 5, 24, dtype=torch.half)
    assert found(Block().half(), x) == ["dropout_mlp"]
    assert "dropout_mlp" not in found(Block().half(), x, train=False)
    assert found(Block(p=0.0).half(), x) == ["mlp"]

    class Shown(Block):
        def forward(self, x):
            h = self.dropout(self.act(self.linear1(x)))
            return self.linear2(h), h

    class Twice(Block):
        def forward(self, x):
            h = self.act(self.linear1(x))
            return self.linear2(self.dropout(h)) + self.linear2(h)

    class Before(Block):
        def forward(self, x):
            return self.linear2(self.act(self.dropout(self.linear1(x))))

    class Rows(Block):
        def forward(self, x):
            return self.linear2(F.dropout1d(self.act(self.linear1(x)), 0.3, True))

    class Behind(Block):
        def forward(self, x):
            return self.dropout(self.linear2(self.act(self.linear1(x))))

    assert found(Gated().half(), x) == ["dropout_gated_mlp"]
    assert found(Gated(p=0.0).half(), x) == ["gated_mlp"]

    class OfTheGate(Gated):
        def forward(self, x):
            return self.wo(self.act(self.dropout(self.wi_0(x))) * self.wi_1(x))

    class Sum(Gated):
        def forward(self, x):
            return self.wo(self.dropout(self.act(self.wi_0(x)) + self.wi_1(x)))

    for other in (OfTheGate, Sum):
        assert "dropout_gated_mlp" not in found(other().half(), x), other
    for other in (Shown, Twice, Before, Rows, Behind):
        assert "dropout_mlp" not in found(other().half(), x), other


@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_drops_the_same_again(inside):
    m = Block(act=F.gelu, bias=False).half().to(DEVICE)
    with torch.no_grad():
        m.linear2.weight.copy_(torch.eye(48)[:24])
    x = randn(4, 24, dtype=torch.half).requires_grad_()
    if inside:
        fn = torch.compile(
            lambda x: checkpoint(m, x, use_reentrant=False), backend="fusion", options=ALWAYS
        )
    else:
        block = torch.compile(m, backend="fusion", options=ALWAYS)
        fn = partial(checkpoint, block, use_reentrant=False)
    out = fn(x)
    (grad,) = torch.autograd.grad(out.sum(), m.linear1.weight)
    assert [site.pattern for site in fusion_backend.report().fused] == ["dropout_mlp"]
    # d of a hidden element is its slope where it was kept, and zero where it was dropped
    y = (x @ m.linear1.weight.t()).detach().double()[:, :24].requires_grad_()
    (d,) = torch.autograd.grad((F.gelu(y) * (out != 0) / 0.7).sum(), y)
    assert distance(grad[:24], d.t() @ exact(x)) < 0.02


@pytest.mark.usefixtures("eager_kernels")
def test_without_gradients_it_drops_as_well():
    """As for uncertainty by many passes."""
    m = Block(act=F.gelu).half().to(DEVICE)
    compiled = torch.compile(m, backend="fusion", options=ALWAYS)
    x = randn(4, 24, dtype=torch.half)
    with torch.no_grad():
        first, second = compiled(x), compiled(x)
        mean = torch.stack([compiled(x) for _ in range(200)]).double().mean(0)
        assert [site.pattern for site in fusion_backend.report().fused] == ["dropout_mlp"]
        assert not torch.equal(first, second)
        assert distance(mean, m.eval()(x)) < 0.15


class AddedApart(Block):
    """With biases that are added after the products."""

    def forward(self, x):
        h = self.dropout(self.act(F.linear(x, self.linear1.weight) + self.linear1.bias))
        return F.linear(h, self.linear2.weight) + self.linear2.bias


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("block", [Block, AddedApart])
def test_trains_under_autocast(block):
    """Where biases are added apart, the hidden layer is fp32, and cast for the second product."""
    m, x = block(act=F.gelu, p=1e-12).to(DEVICE), randn(3, 5, 24)  # so that eager code compares
    compiled, grads = torch.compile(m, backend="fusion", options=ALWAYS), []
    for run in (compiled, m):
        with torch.autocast(DEVICE, torch.float16):
            loss = run(x).float().square().mean()
        grads.append(torch.autograd.grad(loss, list(m.parameters())))
    assert [site.pattern for site in fusion_backend.report().fused] == ["dropout_mlp"]
    for ours, theirs in zip(*grads, strict=True):
        assert ours.dtype == theirs.dtype and distance(ours, theirs) < 2e-3
