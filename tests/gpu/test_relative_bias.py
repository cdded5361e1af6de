"""On a GPU: the relative position bias of a decoder, its index computed in the graph,
in training.
"""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

import fusion_backend

pytestmark = pytest.mark.gpu


def bucket(n: int) -> torch.Tensor:
    """As T5's decoder has it: nothing for keys to come, logarithmic for those far behind."""
    place = torch.arange(n, device="cuda")
    apart = place[None, :] - place[:, None]
    apart = -torch.min(apart, torch.zeros_like(apart))
    far = 16 + (torch.log(apart.float() / 16) / math.log(128 / 16) * 16).to(torch.long)
    return torch.where(apart < 16, apart, torch.min(far, torch.full_like(far, 31)))


def step(weight, q, k, v):
    bias = F.embedding(bucket(q.shape[2]), weight).permute(2, 0, 1)[None]
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device="cuda").tril()
    bias = bias + torch.where(causal, 0.0, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder(dtype):
    weight = torch.randn(32, 8, device="cuda", dtype=dtype, requires_grad=True)
    q, k, v = (torch.randn(2, 8, 512, 64, device="cuda", dtype=dtype) / 8 for _ in range(3))
    dy = torch.randn_like(v)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a graph that went to Inductor as it was
        compiled = torch.compile(step, backend="fusion", options={"fusion.gate": "always"})
        (mine,) = torch.autograd.grad(compiled(weight, q, k, v), weight, dy)
    sites = [site for graph in fusion_backend.report().graphs for site in graph.sites]
    assert any(site.pattern == "relative_bias" and site.fused for site in sites), sites
    (eager,) = torch.autograd.grad(step(weight, q, k, v), weight, dy)
    wide = [x.detach().double() for x in (weight, q, k, v)]
    wide[0].requires_grad_()
    (exact,) = torch.autograd.grad(step(*wide), wide[0], dy.double())
    distance = [(found - exact).abs().max() for found in (mine, eager)]
    assert distance[0] <= 4 * distance[1] + exact.abs().max() * torch.finfo(dtype).eps * 8, distance
