"""Small models around one recognised site: a kernel that wins alone may lose next to its
neighbours.

They are written after operators and networks that were not made for this project, where sites were
slower than under plain Inductor. Each function takes nothing and returns (model, inputs), as
`benchmarks.models --module` wants it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32


class Residual(nn.Module):
    """Two convolutions with batch norms, the residual and the activation: a block of a ResNet."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


def batch_norm_in_a_residual_block():
    return nn.Sequential(*(Residual(64) for _ in range(4))).eval(), torch.randn(32, 64, 56, 56)


def batch_norm_between_convolutions():
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 128, 3, 2, 1),
        nn.BatchNorm2d(128),
    ]
    return nn.Sequential(*layers, nn.Conv2d(128, 128, 1)).eval(), torch.randn(32, 3, 224, 224)


def batch_norm_depthwise():
    blocks = []
    for _ in range(3):
        blocks += [
            nn.Conv2d(96, 96, 3, padding=1, groups=96, bias=False),
            nn.BatchNorm2d(96),
            nn.ReLU6(),
        ]
        blocks += [nn.Conv2d(96, 96, 1, bias=False), nn.BatchNorm2d(96)]
    return nn.Sequential(*blocks).eval(), torch.randn(32, 96, 56, 56)


def gelu_before_pooling():
    layers = nn.Conv2d(64, 128, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers).to(BF16), torch.randn(128, 64, 64, 64, dtype=BF16)


def gelu_before_group_norm():
    layers = nn.Conv2d(64, 128, 3), nn.GELU(), nn.GroupNorm(8, 128)
    return nn.Sequential(*layers).to(BF16), torch.randn(128, 64, 64, 64, dtype=BF16)


def gelu_around_transposed_convolutions():
    layers = (
        nn.ConvTranspose2d(64, 128, 4, stride=2),
        nn.GELU(),
        nn.ConvTranspose2d(128, 64, 4, stride=2),
        nn.GELU(),
    )
    return nn.Sequential(*layers).to(BF16), torch.randn(64, 64, 32, 32, dtype=BF16)


class Called(nn.Module):
    """A function with parameters of its own."""

    def __init__(self, fn, **parts: nn.Module):
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.fn(self, *args)


def layer_norm_of_a_sum_read_once():
    x, y = torch.randn(2, 16384, 4096, dtype=BF16)
    return Called(lambda m, x, y: m.norm(x + y), norm=nn.LayerNorm(4096)).to(BF16), (x, y)


def rms_norm_of_a_sum_read_once():
    x, y = torch.randn(2, 16384, 4096, dtype=BF16)
    return Called(lambda m, x, y: m.norm(x + y), norm=nn.RMSNorm(4096, eps=1e-6)).to(BF16), (x, y)


def softmax_of_long_rows():
    return nn.Softmax(-1), torch.randn(512, 131072)


def layer_norm_small():
    return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256)), torch.randn(
        65536, 256
    )


def l2_norm_in_fp32():
    return Called(lambda m, x: F.normalize(x, dim=-1)), torch.randn(16384, 4096)


def rms_norm_before_swiglu():
    def block(m, x):
        h = m.norm(x)
        return x + m.down(F.silu(m.gate(h)) * m.up(h))

    sizes = {"gate": (1024, 2816), "up": (1024, 2816), "down": (2816, 1024)}
    parts = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    return Called(block, norm=nn.RMSNorm(1024, eps=1e-6), **parts).to(BF16), torch.randn(
        16, 1024, 1024, dtype=BF16
    )


def rotated(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def rms_norm_before_rotary_attention():
    def block(m, x, cos, sin):
        q, k, v = (y.unflatten(-1, (16, 64)).transpose(1, 2) for y in m.qkv(m.norm(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True
        )
        return x + m.out(a.transpose(1, 2).flatten(2))

    parts = dict(
        norm=nn.RMSNorm(1024, eps=1e-6), qkv=nn.Linear(1024, 3072), out=nn.Linear(1024, 1024)
    )
    angles = torch.outer(torch.arange(1024.0), 10000 ** -(torch.arange(32.0) / 32))
    cos, sin = (f(torch.cat((angles, angles), -1)).to(BF16) for f in (torch.cos, torch.sin))
    return Called(block, **parts).to(BF16), (torch.randn(16, 1024, 1024, dtype=BF16), cos, sin)


def summed(build):
    """The model with a scalar loss, for training."""

    def with_loss():
        return (*build(), lambda out: out.float().square().mean())

    return with_loss


BOTH = [
    layer_norm_of_a_sum_read_once,
    rms_norm_of_a_sum_read_once,
    layer_norm_small,
    gelu_before_pooling,
    gelu_before_group_norm,
    gelu_around_transposed_convolutions,
    rms_norm_before_swiglu,
    rms_norm_before_rotary_attention,
]
BATCH_NORMS = [
    batch_norm_in_a_residual_block,
    batch_norm_between_convolutions,
    batch_norm_depthwise,
]
# The name of each function for benchmarks.models --module, and the function.
INFERENCE = {
    build.__name__: build for build in (*BATCH_NORMS, *BOTH, softmax_of_long_rows, l2_norm_in_fp32)
}
TRAINING = {f"train_{build.__name__}": summed(build) for build in BOTH}
