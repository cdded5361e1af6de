"""Attention as other people write it: heads folded into the batch, no dimension for the heads,
scores in fp32, the scale after the mask, the largest score subtracted. Kernels are interpreted,
against fp64.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.decide.gate
from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import DEVICE, distance, randn, runs_kernels

pytestmark = [
    pytest.mark.usefixtures("poisoned_empties"),
    pytest.mark.skipif(DEVICE == "cuda", reason="these decisions are for fake tensors"),
]
B, H, S, M, D = 2, 3, 18, 21, 16
LEAST = torch.finfo(torch.float32).min


def split(x, h=H):
    """[b, n, h * d] -> [b * h, n, d]"""
    b, n, _ = x.shape
    return x.view(b, n, h, -1).permute(0, 2, 1, 3).reshape(b * h, n, -1)


def joined(y, h=H):
    n = y.shape[1]
    return y.reshape(-1, h, n, y.shape[-1]).permute(0, 2, 1, 3).reshape(-1, n, h * y.shape[-1])


def causal(n=S, m=S):
    return torch.arange(m) <= torch.arange(n)[:, None]


def scores_of(q, k, scale=0.25):
    return torch.baddbmm(
        torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device),
        q,
        k.transpose(-1, -2),
        beta=0,
        alpha=scale,
    )


def bloom(q, k, v, alibi, mask=None):
    """transformers BloomAttention: the bias is added by the product, the mask with heads."""
    b, n, h = q.shape[0], q.shape[1], H
    q, k, v = split(q), split(k), split(v)
    s = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.25).view(b, h, n, n)
    mask = torch.where(causal(n, n), 0.0, LEAST).to(s.dtype) if mask is None else mask
    p = F.softmax(s + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(p.view(b * h, n, n), v).view(b, h, n, -1).transpose(1, 2).flatten(2)


def alibi(b=B, h=H, m=S):
    return (torch.arange(1.0, b * h + 1) / 8)[:, None, None] * torch.arange(m)


# Heads in the batch: q [B, S, H * D], k and v [B, S or M, H * D], and an operand more.
FOLDED = {
    "bmm": (
        lambda q, k, v, x: joined(
            torch.softmax(torch.bmm(split(q), split(k).mT) / 4, -1) @ split(v)),
        None, M),
    "einsum": (
        lambda q, k, v, x: joined(torch.einsum(
            "b i j, b j d -> b i d",
            (torch.einsum("b i d, b j d -> b i j", split(q), split(k)) * 0.25).softmax(-1),
            split(v))),
        None, M),
    "baddbmm without a bias": (
        lambda q, k, v, x: joined(torch.bmm(scores_of(split(q), split(k)).softmax(-1), split(v))),
        None, M),
    "the scale in q": (
        lambda q, k, v, x: joined(torch.bmm(
            torch.softmax(torch.bmm(split(q * 0.5) * 0.5, split(k).transpose(1, 2)), -1),
            split(v))),
        None, M),
    "a causal mask of two dimensions": (
        lambda q, k, v, x: joined(torch.bmm(
            scores_of(split(q), split(k)).masked_fill(~causal(), -math.inf).softmax(-1), split(v))),
        None, S),
    "bloom": (bloom, alibi, S),
    "seen otherwise afterwards": (
        lambda q, k, v, x: torch.bmm(
            scores_of(split(q), split(k)).softmax(-1), split(v)).view(-1, H, D, S),
        None, M),
    "a mask of every head": (
        lambda q, k, v, x: joined(torch.bmm(
            scores_of(split(q), split(k)).masked_fill(x > 1, -1e9).softmax(-1), split(v))),
        lambda: randn(B * H, S, M), M),
    "a bias of every head": (
        lambda q, k, v, x: joined(torch.bmm(
            torch.softmax(scores_of(split(q), split(k)) + x, -1), split(v))),
        lambda: randn(B * H, S, S), S),
    "the mask with heads": (
        lambda q, k, v, x: joined(torch.bmm(
            (scores_of(split(q), split(k)).view(B, H, S, M) + x).view(B * H, S, M).softmax(-1),
            split(v))),
        lambda: torch.where(torch.arange(M) < torch.tensor([[15], [M]]), 0.0, -3.0)[:, None, None],
        M),
}  # fmt: skip

# One head: q [B, S, D], k and v [B, S or M, D], and an operand more.
ONE = {
    "nanoGPT's first head": (
        lambda q, k, v, x: torch.softmax(
            (q @ k.transpose(-2, -1) * 0.25).masked_fill(~causal(), float("-inf")), -1) @ v,
        None, S),
    "bmm": (
        lambda q, k, v, x: torch.bmm(torch.bmm(q, k.transpose(1, 2)).div(4).softmax(2), v),
        None, M),
    "no scale": (lambda q, k, v, x: (q @ k.mT).softmax(-1) @ v, None, M),
    "a bias of each batch": (
        lambda q, k, v, x: ((q @ k.mT) / 4 + x).softmax(-1) @ v, lambda: randn(B, S, M), M),
    "a bias of all batches": (
        lambda q, k, v, x: ((q @ k.mT) / 4 + x).softmax(-1) @ v, lambda: randn(S, M), M),
    "a sum of a bias and a causal mask": (
        lambda q, k, v, x: (
            (q @ k.mT) / 4 + (x + torch.where(causal(), 0.0, LEAST).to(x.dtype))).softmax(-1) @ v,
        lambda: randn(B, S, S), S),
    "padding": (
        lambda q, k, v, x: ((q @ k.mT) / 4).masked_fill((x < 0)[:, None], -1e9).softmax(-1) @ v,
        lambda: torch.linspace(-0.4, 1, B * M).view(B, M), M),
    "CLIP's pool": (
        lambda q, k, v, x: torch.bmm(
            torch.bmm(q.transpose(0, 1) * 0.25, k.permute(1, 2, 0)).softmax(-1), v.transpose(0, 1)
        ).transpose(0, 1).reshape(q.shape[1], -1),
        None, M),
}  # fmt: skip

# Heads: q [B, H, S, D], k and v [B, H, S or M, D].
OTHER = {
    "GPT-J": (
        lambda q, k, v, x: F.softmax(
            torch.where(causal(), q.float() @ k.float().transpose(-1, -2),
                        torch.full([], LEAST)) / 4, -1).to(v.dtype) @ v,
        None, S),
    "GPT-Neo": (
        lambda q, k, v, x: F.dropout(F.softmax(
            torch.where(causal(), q.to(torch.float32) @ k.to(torch.float32).mT,
                        torch.tensor(LEAST)), -1).to(v.dtype), 0.1, False) @ v,
        None, S),
    "the scale after the mask": (
        lambda q, k, v, x: ((q @ k.mT).masked_fill(~causal(), -math.inf) * 0.25).softmax(-1) @ v,
        None, S),
    "a temperature of each head": (
        lambda q, k, v, x: (
            F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            * torch.clamp(x, max=2.0).exp()).softmax(-1) @ v,
        lambda: randn(H, 1, 1).requires_grad_(), M),
    "divided by a temperature, under a mask": (
        lambda q, k, v, x: ((q @ k.mT) / x).masked_fill(~causal(), -math.inf).softmax(-1) @ v,
        lambda: (randn(1) + 8).squeeze(), S),
    "a factor of each query": (
        lambda q, k, v, x: (x * (q @ k.mT)).softmax(-1) @ v, lambda: randn(B, 1, S, 1) / 4, M),
    "the largest subtracted": (
        lambda q, k, v, x: (lambda s: (s - s.amax(-1, keepdim=True).detach()).softmax(-1) @ v)(
            q @ k.mT / 4),
        None, M),
    "the largest by max, of a bias too": (
        lambda q, k, v, x: (lambda s: (s - s.max(dim=-1, keepdim=True).values).softmax(-1) @ v)(
            q @ k.mT / 4 + x),
        lambda: randn(1, H, S, M), M),
    "einsum in fp32, the largest subtracted": (
        lambda q, k, v, x: torch.einsum("bhij,bhjd->bhid", (lambda s: (
            s - s.amax(-1, keepdim=True).detach()).softmax(-1, dtype=torch.float32).to(s.dtype))(
                torch.einsum("bhid,bhjd->bhij", q * 0.25, k)), v),
        None, M),
}  # fmt: skip

FORMS = {
    **{f"heads in the batch, {k}": (*v, "folded") for k, v in FOLDED.items()},
    **{f"one head, {k}": (*v, "one") for k, v in ONE.items()},
    **{k: (*v, "heads") for k, v in OTHER.items()},
}


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


def inputs_of(name, dtype=torch.float32, needs=False):
    fn, extra, m, layout = FORMS[name]
    torch.manual_seed(0)
    first = (1, B) if "pool" in name else (B, S)
    lengths = [first, *[(m, B) if "pool" in name else (B, m)] * 2]
    if layout == "folded":
        given = [randn(*a, H * D, dtype=dtype) for a in lengths]
    elif layout == "one":
        given = [randn(*a, D, dtype=dtype) for a in lengths]
    else:
        given = [randn(b, n, H, D, dtype=dtype).transpose(1, 2) for b, n in lengths]
    given = [t.requires_grad_(needs) for t in given]
    return fn, given if extra is None else [*given, extra().to(dtype)]


def called(fn, given):
    return fn if len(given) == 4 else lambda q, k, v: fn(q, k, v, None)


def results(fn, given):
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
    out = fn(*leaves)
    if not out.requires_grad:
        return [out]
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    wanted = [t for t in leaves if t.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)]


def assert_right(fn, given, backend, **options):
    """Value and gradients at most twice as far from fp64 as eager."""
    exactly = [t.detach().double().requires_grad_(t.requires_grad) for t in given]
    compiled = torch.compile(fn, backend=backend, **options)
    both = zip(results(compiled, given), results(fn, given), results(fn, exactly), strict=True)
    for have, eager, want in both:
        assert have.dtype == eager.dtype and have.shape == eager.shape
        room = 3 * torch.finfo(have.dtype).eps if have.dtype != torch.float32 else 2e-6
        assert distance(have, want) <= 2 * distance(eager, want) + room


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("needs", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", FORMS)
def test_one_site(name, needs, dtype, on_gpu):
    fn, given = inputs_of(name, dtype, needs)
    fn = called(fn, given)
    collector = collect(fn, *given)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert site.fused, collector.report
    targets = {str(n.target).split(".")[-2:][0] for n in collector.graphs[0].graph.nodes}
    assert targets.isdisjoint({"bmm", "baddbmm", "matmul", "softmax", "einsum"}), targets
    for node in fused_nodes(collector.graphs[0]):
        assert node.kwargs["forward"] == "kernel", node.kwargs
    assert_right(fn, given, collector)  # which has compiled it


@pytest.mark.parametrize("name", [k for k, form in FORMS.items() if form[1] is None])
def test_dynamic_batches_need_no_other_graph(name):
    fn, given = inputs_of(name)
    fn, batch = called(fn, given), 1 if "pool" in name else 0
    torch.compiler.reset()
    collector = Collector({"fusion.gate": "always"})
    compiled = torch.compile(fn, backend=collector)
    for b in (B, B + 3):
        more = [torch.cat([t] * 3, batch).narrow(batch, 0, b) for t in given]
        for t in more:
            torch._dynamo.mark_dynamic(t, batch)
        with torch._dynamo.config.patch(error_on_recompile=b != B):
            torch.testing.assert_close(compiled(*more), fn(*more), rtol=1e-4, atol=1e-5)
    assert [s.fused for s in collector.report.sites if s.pattern == "attention"] == [True]


def test_a_fill_that_overflows(on_gpu):
    """−3.4e38 / 0.5 is −inf in fp32: a row that sees nothing is NaN, as in eager."""

    def fn(q, k, v, keep):
        return (torch.where(keep, q @ k.mT, LEAST) / 0.5).softmax(-1) @ v

    keep = torch.ones(B, 1, S, S, dtype=torch.bool)
    keep[0, 0, 3] = False
    given = [*(randn(B, H, S, D) for _ in "qkv"), keep]
    torch.compiler.reset()
    out = torch.compile(fn, backend=Collector({"fusion.gate": "always"}))(*given)
    assert torch.equal(out.isnan(), fn(*given).isnan()) and out.isnan().any()


def test_padding_of_one_head_is_read_as_a_vector(on_gpu):
    fn, given = inputs_of("one head, padding")
    (node,) = fused_nodes(collect(fn, *given).graphs[0])
    bias, keep, keys = node.args[3:6]
    assert bias is None and keep is None and keys.meta["example_value"].shape == (B, M), node
