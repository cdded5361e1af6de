"""Attention over images in other spellings than scaled_dot_product_attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.attentions import FEW, joined, projections
from benchmarks.foreign_code.problems import ALL, Called, features, problem


@problem(
    "timm LeViT attention: products with batch norms, indexed biases, hardswish",
    dict(n=256, side=14, heads=4, d=16),
    dict(n=2, side=3, heads=2, d=4),
    ALL,
)
def levit_attention(n, side, heads, d):
    seq = side * side

    class LinearNorm(nn.Module):
        def __init__(self, a: int, b: int):
            super().__init__()
            self.linear, self.norm = nn.Linear(a, b, bias=False), nn.BatchNorm1d(b)

        def forward(self, x):
            y = self.linear(x)
            return self.norm(y.flatten(0, 1)).reshape_as(y)

    def forward(m, x):
        q, k, v = m.qkv(x).view(n, seq, heads, -1).split([d, d, 2 * d], dim=3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        attn = (q @ k * d**-0.5 + m.biases[:, m.at]).softmax(dim=-1)
        x = x + m.proj(F.hardswish((attn @ v).transpose(1, 2).reshape(n, seq, -1)))
        return x + m.mlp(x)

    width = 2 * heads * d
    mlp = nn.Sequential(LinearNorm(width, 2 * width), nn.Hardswish(), LinearNorm(2 * width, width))
    parts = dict(qkv=LinearNorm(width, 4 * heads * d), proj=LinearNorm(2 * heads * d, width))
    module = Called(forward, **parts, mlp=mlp, biases=nn.Parameter(torch.randn(heads, seq)))
    rows, columns = torch.arange(seq) // side, torch.arange(seq) % side
    far = (rows[:, None] - rows).abs() * side + (columns[:, None] - columns).abs()
    module.register_buffer("at", far)
    return module, (features(n, seq, width),)


@problem(
    "Segment Anything: windows with decomposed relative positions, heads of 80",
    dict(n=50, side=14, heads=8, d=80),
    dict(n=2, side=3, heads=2, d=8),
)
def decomposed_position_attention(n, side, heads, d):
    seq = side * side

    def forward(m, x):
        h = m.norm(x)
        qkv = m.qkv(h).reshape(n, seq, 3, heads, d).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, n * heads, seq, d).unbind(0)
        attn = (q * d**-0.5) @ k.transpose(-2, -1)
        r_q = q.reshape(n * heads, side, side, d)
        high = torch.einsum("bhwc,hkc->bhwk", r_q, m.high[m.at])
        wide = torch.einsum("bhwc,wkc->bhwk", r_q, m.wide[m.at])
        attn = attn.view(-1, side, side, side, side) + high[..., None] + wide[..., None, :]
        attn = attn.view(n * heads, seq, seq).softmax(dim=-1)
        y = (attn @ v).view(n, heads, side, side, d).permute(0, 2, 3, 1, 4)
        return x + m.proj(y.reshape(n, side, side, -1))

    width = heads * d
    tables = {k: nn.Parameter(torch.randn(2 * side - 1, d) * 0.1) for k in ("high", "wide")}
    parts = dict(norm=nn.LayerNorm(width, eps=1e-6), qkv=nn.Linear(width, 3 * width))
    module = Called(forward, **parts, **tables, proj=nn.Linear(width, width))
    places = torch.arange(side)
    module.register_buffer("at", places[:, None] - places[None] + side - 1)
    return module, (features(n, side, side, width),)


@problem(
    "Swin Transformer V2: cosine attention with a learnt scale, norms behind the branches",
    dict(n=512, seq=64, heads=6, d=32),
    FEW,
)
def cosine_attention(n, seq, heads, d):
    def forward(m, x, hidden):
        q, k, v = m.qkv(x).reshape(n, seq, 3, heads, d).permute(2, 0, 3, 1, 4).unbind(0)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(m.scale, max=math.log(100.0)).exp()
        attn = attn + 16 * torch.sigmoid(m.bias)[None]
        attn = attn.view(n // 2, 2, heads, seq, seq) + hidden[None, :, None]
        attn = attn.view(-1, heads, seq, seq).softmax(dim=-1)
        x = x + m.norm1(m.proj(joined(attn @ v)))
        return x + m.norm2(m.mlp(x))

    width = heads * d
    mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    parts = dict(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width), mlp=mlp)
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    learnt = dict(scale=nn.Parameter(torch.full((heads, 1, 1), math.log(10.0))))
    learnt |= dict(bias=nn.Parameter(torch.randn(heads, seq, seq)))
    sides = torch.arange(seq) < seq // 2
    hidden = torch.stack((torch.zeros(seq, seq), -100.0 * (sides[:, None] ^ sides[None])))
    return Called(forward, **parts, **norms, **learnt), (features(n, seq, width), hidden)


@problem(
    "timm XCiT: attention between channels of normalised tokens, temperature, layer scale",
    dict(n=64, seq=784, heads=8, d=48),
    FEW,
    ALL,
)
def cross_covariance_attention(n, seq, heads, d):
    def forward(m, x):
        qkv = m.qkv(m.norm(x)).reshape(n, seq, 3, heads, d).permute(2, 0, 3, 4, 1)
        q, k, v = qkv.unbind(0)
        q, k = F.normalize(q, p=2.0, dim=-1), F.normalize(k, p=2.0, dim=-1)
        attn = ((q @ k.transpose(-2, -1)) * m.temperature).softmax(dim=-1)
        y = (attn @ v).permute(0, 3, 1, 2).reshape(n, seq, heads * d)
        return x + m.gamma * m.proj(y)

    width = heads * d
    parts = dict(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width))
    learnt = dict(temperature=nn.Parameter(torch.ones(heads, 1, 1)))
    learnt |= dict(gamma=nn.Parameter(torch.ones(width)), norm=nn.LayerNorm(width, eps=1e-6))
    return Called(forward, **parts, **learnt), (features(n, seq, width),)


@problem(
    "LoFTR encoder layer: linear attention by elu + 1, the message beside the features",
    dict(n=8, seq=4800, heads=8, d=32),
    FEW,
)
def linear_attention(n, seq, heads, d):
    def forward(m, x, source):
        q = F.elu(m.q(x).view(n, -1, heads, d)) + 1
        k = F.elu(m.k(source).view(n, -1, heads, d)) + 1
        v = m.v(source).view(n, -1, heads, d)
        length = v.size(1)
        kv = torch.einsum("nshd,nshv->nhdv", k, v / length)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
        message = torch.einsum("nlhd,nhdv,nlh->nlhv", q, kv, z) * length
        message = m.norm1(m.o(message.contiguous().view(n, -1, heads * d)))
        message = m.norm2(m.mlp(torch.cat([x, message], dim=2)))
        return x + message

    width = heads * d
    layers = nn.Linear(2 * width, 2 * width, bias=False), nn.ReLU(True)
    mlp = nn.Sequential(*layers, nn.Linear(2 * width, width, bias=False))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **projections(width, False), mlp=mlp, **norms), (
        features(n, seq, width),
        features(n, seq, width),
    )


@problem(
    "CLIP ResNet AttentionPool2d: the mean as the only query",
    dict(n=128, c=2048, side=7),
    dict(n=2, c=16, side=3),
    ALL,
)
def attention_pool(n, c, side):
    heads = max(2, c // 64)

    def forward(m, x):
        x = x.flatten(2).permute(2, 0, 1)
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0)
        x = x + m.places[:, None, :]
        q = m.q(x[:1]).view(1, n * heads, -1).transpose(0, 1)
        k, v = (f(x).view(-1, n * heads, c // heads).transpose(0, 1) for f in (m.k, m.v))
        probs = torch.bmm(q * (c // heads) ** -0.5, k.transpose(1, 2)).softmax(-1)
        y = torch.bmm(probs, v).transpose(0, 1).reshape(1, n, c)
        return m.o(y).squeeze(0)

    parts = projections(c) | dict(o=nn.Linear(c, c // 2))
    places = nn.Parameter(torch.randn(side * side + 1, c) / c**0.5)
    return Called(forward, **parts, places=places), (features(n, c, side, side),)
