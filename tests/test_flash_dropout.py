"""Dropout in the flash attention kernels: its mask, its statistics, and graphs that draw, keep and
draw again.
"""

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import fusion_backend.decide.gate
from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import forward as flash
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.kernels.common.dropout import Dropout, tile_survives, tiles_kept
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import OPS
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import DEVICE, randn, runs_kernels
from tests.test_flash import SMALL, qkv


def seed(number: int) -> torch.Tensor:
    return torch.tensor([number], device=DEVICE)


# The mask


@triton.jit
def tile_kernel(
    SEED,
    OUT,
    row,
    col,
    M: tl.constexpr,
    N: tl.constexpr,
    THRESHOLD: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    kept = tile_survives(tl.load(SEED), row // 2, col // 2, M, N, THRESHOLD, TRANSPOSED)
    down, across = tl.arange(0, M), tl.arange(0, N)
    at = down[None, :] * N + across[:, None] if TRANSPOSED else down[:, None] * N + across[None, :]
    tl.store(OUT + at, kept.to(tl.int8))


@runs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, n", [(16, 16), (64, 16), (32, 128)])
def test_tiles_are_parts_of_one_matrix(m, n, transposed):
    whole = tiles_kept(seed(2**33 + 5), (192, 300), 0.4)
    for row, col in ((0, 0), (64, 160), (48, 16)):
        out = torch.empty(m, n, dtype=torch.int8, device=DEVICE)
        tile_kernel[(1,)](
            seed(2**33 + 5),
            out,
            row,
            col,
            M=m,
            N=n,
            THRESHOLD=round(0.4 * 2**32),
            TRANSPOSED=transposed,
        )
        assert torch.equal(out.bool(), whole[row : row + m, col : col + n])


@runs_kernels
def test_batches_and_heads_are_of_one_draw():
    """With values that pick out the probabilities, the result shows which are left, whatever the
    blocks are.
    """
    q, k, _ = qkv(40, 16, 16, h=3)
    v = torch.eye(16, device=DEVICE).expand(2, 3, 16, 16)
    masking = Masking(dropout=Dropout(seed(11), 0.4))
    want = tiles_kept(seed(11), (2, 3, 40, 16), 0.4)
    for config in (SMALL, dict(BM=16, BN=64, num_warps=4, num_stages=1), None):
        out, _ = flash.forward(q, k, v, masking, False, config)
        assert torch.equal(out != 0, want)


def within(mean: torch.Tensor, want: float, count: int) -> bool:
    return abs(mean.item() - want) <= 5 * (want * (1 - want) / count) ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_statistics(p):
    keep = tiles_kept(seed(7), (2, 3, 500, 700), p).double()
    assert within(keep.mean(), 1 - p, keep.numel())
    for axes in ((0, 1, 3), (0, 1, 2), (2, 3)):  # no query, no key, no head is special
        shares, count = keep.mean(axes), keep.numel() / keep.mean(axes).numel()
        assert (shares - (1 - p)).abs().max() <= 6 * (p * (1 - p) / count) ** 0.5
    others = [tiles_kept(seed(number), keep.shape, p) for number in (8, 7 + 2**32)]
    others += [
        keep.roll(by, axis)
        for axis, by in ((0, 1), (1, 1), (2, 1), (2, 8), (2, 16), (3, 1), (3, 8), (3, 16))
    ]
    for other in [*others, keep.roll((8, 8), (2, 3)), keep.roll((8, -8), (2, 3))]:
        assert within((keep * other).mean(), (1 - p) ** 2, keep.numel())


@runs_kernels
@pytest.mark.parametrize("p", [1e-12, 1.0])
def test_nothing_and_everything_dropped(p):
    q, k, v = qkv(20, 33, 16)
    masking = Masking(low=-5, scale=0.25, dropout=Dropout(seed(1), p))
    out, lse = flash.forward(q, k, v, masking, True, SMALL)
    plain, _ = flash.forward(q, k, v, masking._replace(dropout=None), True, SMALL)
    assert torch.allclose(out, plain if p < 1 else torch.zeros_like(plain), atol=1e-6)
    needs = dict(q=True, k=True, v=True, bias=False, sinks=False)
    found = flash_backward.backward(q, k, v, masking, out, lse, out + 1, needs, (SMALL, SMALL))[:3]
    assert all(g.isfinite().all() and bool(g.any()) is (p < 1) for g in found)


@runs_kernels
def test_the_operator_and_its_reference_drop_the_same():
    """Value and gradients of torch.ops.fusion.masked_attention by the kernels, and by the
    written-out reference.
    """
    op = operator_of(OPS["masked_attention"]).overload
    inputs = [t.requires_grad_() for t in (*qkv(20, 33, 16, h=4, kv=2), randn(1, 4, 20, 33))]
    inputs[1:3] = [t.detach()[:, :2].clone().requires_grad_() for t in inputs[1:3]]
    keys = torch.arange(33, device=DEVICE) < torch.tensor([[20], [33]], device=DEVICE)
    args = (
        *inputs,
        None,
        keys,
        seed(5),
        None,
        None,
        None,
        None,
        None,
        0.25,
        None,
        0.3,
        "zero",
        "seen",
    )
    do, found = randn(2, 4, 20, 16), []
    for provider in (
        dict(forward="kernel", backward="kernel"),
        dict(forward="reference", backward="vjp"),
    ):
        out, _ = op(*args, **provider)
        found.append([out, *torch.autograd.grad(out, inputs, do)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


# Compiled graphs. Without a GPU the gate takes the kernels as if there were one, and the
# interpreter runs them.

PADDING = torch.tensor([[1] * 20 + [0] * 12, [1] * 32], device=DEVICE)


def bert(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, PADDING.bool()[:, None, None], 0.3, scale=0.25)


def t5(q, k, v, bias):
    weights = F.dropout(torch.softmax(q @ k.mT + bias, -1), 0.3, True)
    return weights @ v


def windowed(q, k, v, bias):
    apart = torch.arange(32, device=q.device)[:, None] - torch.arange(32, device=q.device)
    s = (q @ k.mT * 0.25).masked_fill((apart < 0) | (apart > 7), -1e9)
    return torch.dropout(s.softmax(-1), 0.3, True) @ v


def example():
    """v picks out the probabilities."""
    eye = torch.eye(32, device=DEVICE).expand(2, 2, 32, 32).contiguous()
    return [t.requires_grad_() for t in (*qkv(32, 32, 32)[:2], eye, randn(1, 2, 32, 32))]


@pytest.fixture
def taken(monkeypatch):
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


def compiled(fn, inputs):
    collector = collect(fn, *inputs)
    torch.compiler.reset()
    how = (
        dict(backend=collector)
        if DEVICE == "cpu"
        else dict(backend="fusion", options={"fusion.gate": "always"})
    )
    return torch.compile(fn, fullgraph=True, dynamic=False, **how), collector


@runs_kernels
@pytest.mark.parametrize("fn", [bert, t5, windowed])
def test_graphs_draw_a_seed(fn, taken):
    inputs = example()
    run, collector = compiled(fn, inputs)
    (node,) = fused_nodes(collector.graphs[0])
    assert node.target is torch.ops.fusion.masked_attention.default
    assert node.args[6].target is torch.ops.aten.randint.low and node.kwargs["p"] == 0.3
    out = run(*inputs)
    mask = (out != 0) / 0.7
    do = randn(*out.shape)
    got = torch.autograd.grad(out, inputs, do, allow_unused=True)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:  # the same code with the mask that the result shows
        patch.setattr(F, "dropout", lambda x, p, train: x * mask)
        patch.setattr(torch, "dropout", lambda x, p, train: x * mask)
        patch.setattr(F, "scaled_dot_product_attention", written_out(mask))
        want = fn(*exact)
    seen = want.ne(0).sum().item() / mask.ne(0).numel() if fn is t5 else None
    assert seen is None or 0.6 < seen < 0.8
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-6)
    for g, w in zip(
        got, torch.autograd.grad(want, exact, do.double(), allow_unused=True), strict=True
    ):
        assert (g is None) == (w is None)
        if w is not None:
            torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)


def written_out(factors):
    def attention(q, k, v, keep, p, scale):
        return (torch.softmax((q @ k.mT * scale).masked_fill(~keep, -torch.inf), -1) * factors) @ v

    return attention


def agree(out, v) -> bool:
    """The gradient of v, of a loss that sums, is the sum of the probabilities that were left in the
    result.

    Without retain_graph, which torch refuses of a backward in its cache that another process has
    run without.
    """
    (grad,) = torch.autograd.grad(out.sum(), v)
    return torch.allclose(
        grad, out.detach().sum(2)[..., None].expand_as(grad), rtol=1e-4, atol=1e-5
    )


@runs_kernels
def test_sites_differ_and_seeds_repeat(taken):
    inputs = example()
    run, _ = compiled(lambda *t: (bert(*t), bert(*t)), inputs)

    def results(number):
        torch.manual_seed(number)
        a, b = run(*inputs)
        assert agree(b if number == 1 else a, inputs[2]) and not torch.equal(a, b)
        return a.detach()

    first, again, other = results(1), results(1), results(2)
    assert torch.equal(first, again) and not torch.equal(first, other)


@runs_kernels
@pytest.mark.parametrize("around", ["inside", "outside"])
def test_checkpoint_draws_the_same_again(around, taken):
    inputs = example()
    if around == "inside":  # AOTAutograd traces the reference there, not the interpreter
        options = {"fusion.gate": "always"}
        run = torch.compile(
            lambda *t: checkpoint(bert, *t, use_reentrant=False), backend="fusion", options=options
        )
    else:
        block, _ = compiled(bert, inputs)
        run = lambda *t: checkpoint(block, *t, use_reentrant=False)  # noqa: E731
    out = run(*inputs)
    assert around == "outside" or len(fusion_backend.report().fused) == 1
    assert agree(out, inputs[2]) and 0.3 < (out != 0).double().mean() < 0.7
    assert not torch.equal(out, run(*inputs))


def test_the_numbers_of_eager_when_they_are_asked_for(taken):
    inputs = example()
    with torch._inductor.config.patch(fallback_random=True):
        report = collect(bert, *inputs).report
    assert not report.fused and "fallback_random" in report.sites[0].reason


def test_without_dropout_nothing_is_drawn(taken):
    """One operator, with a seed or without."""
    (gm,) = collect(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias), *example()
    ).graphs
    (node,) = fused_nodes(gm)
    assert node.args[6] is None and node.kwargs["p"] is None
    assert not any(n.target is torch.ops.aten.randint.low for n in gm.graph.nodes)
