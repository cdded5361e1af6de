"""Attention inside the body of a higher-order operator, with a mask that is made outside of it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.frontends.explain import Collector

B, H, S, D = 2, 2, 12, 16
sdpa = F.scaled_dot_product_attention


def causal():
    return torch.arange(S) <= torch.arange(S)[:, None]


def checkpointed(fn, *args):
    return checkpoint(fn, *args, use_reentrant=False)


def by_hand(q, k, v, mask):
    return torch.softmax(q @ k.mT * 0.25 + torch.where(mask, 0.0, float("-inf")), -1) @ v


def layers(q, k, v, x):
    mask = causal()
    return checkpointed(by_hand, checkpointed(sdpa, q, k, v, mask), k, v, mask)


def nested(q, k, v, x):
    mask = causal()[None, None]
    return checkpointed(lambda q: checkpointed(lambda q: sdpa(q.sin(), k, v, mask), q.cos()), q)


def added(q, k, v, x):
    mask = torch.where(causal(), 0.0, torch.finfo(torch.float32).min)
    return checkpointed(lambda q: torch.softmax(q @ k.mT * 0.25 + mask, -1) @ v, q)


def written_before(q, k, v, x):
    mask = causal()
    mask[3:] = mask[3:] & (x[3:] > 0)
    return checkpointed(sdpa, q, k, v, mask)


def written_after(q, k, v, x):
    mask = causal()
    out = checkpointed(sdpa, q, k, v, mask)
    mask[:, 0] = False
    return out + mask.sum()


@torch.compiler.nested_compile_region
def region(q, k, v, mask):
    return sdpa(q, k, v, mask)


def masks_that_differ(q, k, v, x):
    return region(q, k, v, causal()) + region(q.sin(), k, v, causal() & (x > 0))


def one_mask(q, k, v, x):
    mask = causal()
    return region(q, k, v, mask) + region(q.sin(), k, v, mask)


def branches(q, k, v, x):
    return torch.cond(
        x.sum() > 0,
        lambda q, k, v, m: sdpa(q, k, v, m),
        lambda q, k, v, m: by_hand(q, k, v, m),
        (q, k, v, causal()),
    )


def padding(q, k, v, x):
    return checkpointed(sdpa, q, k, v, causal() & (x[0] > -3))


DROPPED = {
    "layers": layers,
    "nested": nested,
    "added": added,
    "branches": branches,
    "one mask": one_mask,
}
STAYS = {"written before": written_before, "written after": written_after,
    "masks that differ": masks_that_differ,
         "padding": padding}  # fmt: skip


def run(fn, inputs, train=True):
    leaves = [t.clone().requires_grad_(train) for t in inputs[:3]]
    out = fn(*leaves, inputs[3])
    if train:
        out.square().sum().backward()
    return [out.detach(), *(t.grad for t in leaves if train)]


@pytest.mark.parametrize("name", [*DROPPED, *STAYS])
def test_a_mask_from_around_the_body(name):
    fn = DROPPED.get(name) or STAYS[name]
    torch.manual_seed(0)
    inputs = [*(torch.randn(B, H, S, D) for _ in "qkv"), torch.randn(S, S)]
    torch.compiler.reset()
    fusion_backend.reset()
    collector = Collector({})
    regions = name in ("one mask", "masks that differ")  # the Collector's graph would not run
    # Plain Inductor 2.13 gives wrong gradients for a region that is called twice; autograd refuses
    # the write.
    train = not regions and name != "written after"
    compiled = torch.compile(fn, backend="fusion" if regions else collector)
    have = run(compiled, inputs, train)
    report = fusion_backend.report() if regions else collector.report
    for got, want in zip(have, run(fn, inputs, train), strict=True):
        assert torch.allclose(got, want, atol=1e-5)
    sites = [s for s in report.sites if s.pattern == "attention"]
    assert sites and not any(g.error for g in report.graphs), report
    for s in sites:
        assert s.fused == (name in DROPPED), s
        assert s.reason.startswith(
            "causal, proven from test_masks_around_bodies.py:" if s.fused else "its mask stays: "
        ), s


@pytest.mark.parametrize("name", ["layers", "padding"])
def test_through_inductor(name):
    fn = DROPPED.get(name) or STAYS[name]
    torch.manual_seed(0)
    inputs = [*(torch.randn(B, H, S, D) for _ in "qkv"), torch.randn(S, S)]
    torch.compiler.reset()
    fusion_backend.reset()
    for have, want in zip(
        run(torch.compile(fn, backend="fusion"), inputs), run(fn, inputs), strict=True
    ):
        assert torch.allclose(have, want, atol=1e-5)
    sites = [s for s in fusion_backend.report().sites if s.pattern == "attention"]
    assert sites and all(s.fused == (name in DROPPED) for s in sites), fusion_backend.report()
