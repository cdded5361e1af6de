"""Layers that keep a state in place of attention: what surrounds their scans, with gated norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.language_parts import plain
from benchmarks.foreign_code.problems import Called, features, problem

TEXT, FEW = dict(n=4, seq=2048, width=2048), dict(n=2, seq=8, width=32)


@problem("transformers Mamba-2 mixer without its scan: the gate in front of the norm", TEXT, FEW)
def mamba2_mixer(n, seq, width):
    inner = 2 * width

    def gated_norm(weight, x, gate):
        h = x.to(torch.float32) * F.silu(gate.to(torch.float32))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * h.to(x.dtype)

    def forward(m, x):
        gate, h = m.inside(x).split([inner, inner], dim=-1)
        h = F.silu(m.conv(h.transpose(1, 2))[..., :seq].transpose(1, 2))
        return x + m.out(gated_norm(m.weight, h + h * m.d, gate))

    parts = plain(inside=(width, 2 * inner), out=(inner, width))
    parts |= dict(conv=nn.Conv1d(inner, inner, 4, groups=inner, padding=3))
    learnt = {name: nn.Parameter(torch.randn(inner)) for name in ("weight", "d")}
    return Called(forward, **parts, **learnt), (features(n, seq, width),)


@problem(
    "transformers Qwen3-Next linear attention without its delta rule: the gate behind the norm",
    TEXT,
    FEW,
)
def gated_delta_net(n, seq, width):
    d = max(8, width // 16)
    inner = 2 * width

    def gated_norm(weight, x, gate):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        h = weight * h.to(x.dtype)
        return (h * F.silu(gate.to(torch.float32))).to(x.dtype)

    def forward(m, x):
        q, v, z = m.qvz(x).split([inner, inner, inner], dim=-1)
        q, v, z = (t.reshape(n, seq, -1, d) for t in (q, v, z))
        q = q * torch.rsqrt((q * q).sum(dim=-1, keepdim=True) + 1e-6)
        beta = torch.sigmoid(m.beta(x))[..., None]
        o = (v * beta * q.sum(-1, keepdim=True)).reshape(-1, d)
        return x + m.out(gated_norm(m.weight, o, z.reshape(-1, d)).reshape(n, seq, -1))

    parts = plain(qvz=(width, 3 * inner), beta=(width, inner // d), out=(inner, width))
    return Called(forward, **parts, weight=nn.Parameter(torch.ones(d))), (features(n, seq, width),)


@problem("flash-linear-attention GLA output: an RMS norm of heads times swish, by hand", TEXT, FEW)
def swish_gate(n, seq, width):
    d = max(8, width // 8)

    def forward(m, x):
        o, g = m.og(x).view(n, seq, 2, -1, d).unbind(2)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-5) * m.weight
        return x + m.out((o * (g * torch.sigmoid(g))).flatten(-2))

    parts = plain(og=(width, 2 * width), out=(width, width))
    return Called(forward, **parts, weight=nn.Parameter(torch.ones(d))), (features(n, seq, width),)
