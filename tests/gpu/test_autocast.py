"""On a GPU under autocast: attention by hand, losses and log-probabilities are found, and are as
near to fp32 as eager is.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend
from tests.kernel_checks import distance

pytestmark = pytest.mark.gpu
B, S, WIDTH, HEADS, V = 4, 130, 128, 2, 1000
KERNELS = ("kernel", "kernel")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, V)
        self.register_buffer("mask", torch.tril(torch.ones(S, S)))
        self.register_buffer("weight", torch.linspace(0.5, 1.5, V))

    def forward(self, x, y):
        q, k, v = self.qkv(x).view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(self.mask == 0, -math.inf)
        x = x + (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(B, S, WIDTH)
        logits = self.head(x)
        weighted = F.cross_entropy(logits.flatten(0, 1), y.flatten(), self.weight)
        taken = self.head(x * 0.5).log_softmax(-1).gather(-1, y[..., None])
        soft = F.kl_div(
            F.log_softmax(self.head(x * 2) / 2, -1), F.softmax(self.head(-x), -1), reduction="sum"
        )
        return weighted + taken.mean() + soft / (B * S)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_and_its_losses(dtype):
    torch.manual_seed(0)
    layer = Layer().cuda()
    x, y = torch.randn(B, S, WIDTH, device="cuda"), torch.randint(V, (B, S), device="cuda")
    options = {
        "fusion.gate": "always",
        "fusion.only": "attention, cross_entropy, token_log_probs, distillation_loss",
    }
    compiled = torch.compile(layer, backend="fusion", options=options, dynamic=False)

    def computed(run, enabled=True):
        with torch.autocast("cuda", dtype, enabled=enabled):
            out = run(x, y)
        # as a gradient scaler does, or fp16 has no digits left for the gradients of logits
        return out.detach(), *torch.autograd.grad(out * 1024.0, list(layer.parameters()))

    got, eager, want = computed(compiled), computed(layer), computed(layer, enabled=False)
    found = sorted(s.pattern for s in fusion_backend.report().fused)
    assert found == ["attention", "cross_entropy", "distillation_loss", "token_log_probs"]
    for mine, its, right in zip(got, eager, want, strict=True):
        assert distance(mine, right) <= 1.5 * distance(its, right) + 1e-3


class Block(nn.Module):
    """A residual stream in fp32 whose norms only linear layers read."""

    def __init__(self, norm: type):
        super().__init__()
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        self.left, self.right = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x)
        x = x + self.down(self.left(y) * self.right(y))
        return x + self.out(self.second(x))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_a_residual_stream(norm, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Block(norm), Block(norm), norm(WIDTH), nn.Linear(WIDTH, V)).cuda()
    x = torch.randn(B, S, WIDTH, device="cuda")
    name = "layer_norm" if norm is nn.LayerNorm else "rms_norm"
    only = {"fusion.gate": "always", "fusion.only": f"{name}, add_{name}"}
    compiled = torch.compile(model, backend="fusion", options=only, dynamic=False)

    def computed(run, enabled=True):
        with torch.autocast("cuda", dtype, enabled=enabled):
            out = run(x)
        weighted = (out * torch.linspace(-1, 1, V, device="cuda")).sum()
        return out.detach(), *torch.autograd.grad(weighted, list(model.parameters()))

    got, eager, want = computed(compiled), computed(model), computed(model, enabled=False)
    sites = fusion_backend.report().fused
    assert sorted(s.pattern for s in sites) == [f"add_{name}"] * 4 + [name]
    assert all((s.forward, s.backward) == KERNELS for s in sites)
    for mine, its, right in zip(got, eager, want, strict=True):
        assert distance(mine, right) <= 1.5 * distance(its, right) + 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norms_between_convolutions(layout, dtype):
    torch.manual_seed(0)
    convolution = dict(kernel_size=3, padding=1)
    parts = [nn.Conv2d(32, 64, **convolution), nn.GroupNorm(4, 64), nn.SiLU()]
    parts += [nn.Conv2d(64, 64, **convolution), nn.GroupNorm(8, 64), nn.Conv2d(64, 8, 1)]
    model = nn.Sequential(*parts).cuda().to(memory_format=layout)
    x = torch.randn(2, 32, 17, 19, device="cuda").to(memory_format=layout)
    options = {"fusion.gate": "always", "fusion.only": "group_norm"}
    compiled = torch.compile(model, backend="fusion", options=options, dynamic=False)

    def computed(run, enabled=True):
        with torch.autocast("cuda", dtype, enabled=enabled):
            out = run(x)
        weighted = (out * torch.linspace(-1, 1, 19, device="cuda")).sum()
        return out.detach(), *torch.autograd.grad(weighted, list(model.parameters()))

    got, eager, want = computed(compiled), computed(model), computed(model, enabled=False)
    sites = fusion_backend.report().fused
    assert [(s.pattern, s.forward, s.backward) for s in sites] == [("group_norm", *KERNELS)] * 2
    assert got[0].stride() == eager[0].stride()
    for mine, its, right in zip(got, eager, want, strict=True):
        assert distance(mine, right) <= 1.5 * distance(its, right) + 1e-3
