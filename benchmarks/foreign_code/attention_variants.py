"""Attention that is written out for proteins, molecules, sets, images and speech."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.attentions import joined
from benchmarks.foreign_code.encoders import split
from benchmarks.foreign_code.problems import Called, features, problem
from benchmarks.foreign_code.speech import lengths_mask

TEXT, FEW_TEXT = dict(n=16, seq=512, width=768), dict(n=2, seq=6, width=16)


def linears(width: int, names: str, bias: bool = True) -> dict[str, nn.Linear]:
    return {name: nn.Linear(width, width, bias=bias) for name in names.split()}


@problem(
    "Boltz AttentionPairBias: scores in fp32 by einsum, a bias of pairs, a mask that is added",
    dict(n=4, tokens=384, width=384, pair=128),
    dict(n=2, tokens=6, width=16, pair=8),
)
def pair_bias_attention(n, tokens, width, pair):
    heads = 16 if width > 16 else 2

    def forward(m, s, z, mask):
        q, k, v = (p(s).view(n, tokens, heads, -1) for p in (m.q, m.k, m.v))
        bias = m.bias(m.norm(z)).permute(0, 3, 1, 2)
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) / (width // heads) ** 0.5
        scores = scores + bias.float() + (1 - mask[:, None, None].float()) * -1e6
        o = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v.float()).to(v.dtype)
        return m.out(torch.sigmoid(m.gate(s)) * o.reshape(n, tokens, width))

    parts = linears(width, "q k v gate out") | dict(
        norm=nn.LayerNorm(pair), bias=nn.Linear(pair, heads, bias=False)
    )
    mask = lengths_mask(n, tokens).float()
    return Called(forward, **parts), (
        features(n, tokens, width),
        features(n, tokens, tokens, pair),
        mask,
    )


@problem(
    "OpenFold MSA row attention: five dimensions, biases of mask and pairs from a list",
    dict(rows=128, residues=256, c=256),
    dict(rows=3, residues=6, c=16),
)
def sequence_row_attention(rows, residues, c):
    heads = c // 32 if c > 16 else 2

    def forward(m, x, z, mask):
        h = m.norm(x)
        biases = [(1e9 * (mask - 1))[..., :, None, None, :], m.pair(z).permute(2, 0, 1)[None, None]]
        q, k, v = (p(h).view(*h.shape[:-1], heads, -1).transpose(-2, -3) for p in (m.q, m.k, m.v))
        a = torch.matmul(q / math.sqrt(c // heads), k.transpose(-1, -2))
        for b in biases:
            a = a + b
        o = torch.matmul(torch.softmax(a, dim=-1), v).transpose(-2, -3)
        g = torch.sigmoid(m.gate(h)).view(*h.shape[:-1], heads, -1)
        return x + m.out((o * g).flatten(-2))

    parts = linears(c, "q k v", False) | linears(c, "gate out")
    parts |= dict(norm=nn.LayerNorm(c), pair=nn.Linear(c, heads, bias=False))
    return Called(forward, **parts), (
        features(1, rows, residues, c),
        features(residues, residues, c),
        (torch.rand(1, rows, residues) > 0.1).float(),
    )


@problem(
    "fair-esm ESM-2 layer: rotary heads in the batch, padding filled, softmax in fp32",
    TEXT,
    FEW_TEXT,
)
def protein_language_layer(n, seq, width):
    heads = max(2, width // 64)
    d = width // heads

    def turned(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)

    def forward(m, x, padding, cos, sin):
        h = m.norm(x).transpose(0, 1)
        q, k, v = (
            p(h).contiguous().view(seq, n * heads, d).transpose(0, 1) for p in (m.q, m.k, m.v)
        )
        q = q * d**-0.5
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        scores = torch.bmm(q, k.transpose(1, 2)).view(n, heads, seq, seq)
        scores = scores.masked_fill(padding[:, None, None], float("-inf")).view(-1, seq, seq)
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
        y = torch.bmm(probs, v).transpose(0, 1).contiguous().view(seq, n, width)
        x = x + m.out(y).transpose(0, 1)
        h = m.up(m.second(x))
        return x + m.down(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))))

    angles = torch.arange(seq)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    angles = torch.cat((angles, angles), -1)[None]
    parts = linears(width, "q k v out") | dict(norm=nn.LayerNorm(width), second=nn.LayerNorm(width))
    parts |= dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))
    inputs = features(n, seq, width), ~lengths_mask(n, seq), angles.cos(), angles.sin()
    return Called(forward, **parts), inputs


@problem(
    "Graphormer attention: a bias of edges and distances, padding filled, heads in the batch",
    dict(n=64, nodes=128, width=512),
    dict(n=2, nodes=5, width=16),
)
def graph_bias_attention(n, nodes, width):
    heads = 32 if width > 16 else 2
    d = width // heads

    def forward(m, x, bias, distance, padding):
        q, k, v = (
            p(x).view(n, nodes, heads, d).transpose(1, 2).reshape(n * heads, nodes, d)
            for p in (m.q, m.k, m.v)
        )
        scores = torch.bmm(q * d**-0.5, k.transpose(1, 2))
        scores = scores + (bias + m.near(distance).permute(0, 3, 1, 2)).view(-1, nodes, nodes)
        scores = scores.view(n, heads, nodes, nodes)
        scores = scores.masked_fill(padding[:, None, None].bool(), float("-inf"))
        probs = F.softmax(scores.view(-1, nodes, nodes), dim=-1)
        y = torch.bmm(probs, v).view(n, heads, nodes, d)
        return m.norm(x + m.out(joined(y)))

    parts = linears(width, "q k v out") | dict(
        norm=nn.LayerNorm(width), near=nn.Embedding(512, heads)
    )
    return Called(forward, **parts), (
        features(n, nodes, width),
        features(n, heads, nodes, nodes),
        torch.randint(512, (n, nodes, nodes)),
        ~lengths_mask(n, nodes),
    )


@problem(
    "Set Transformer MAB: heads cut from the width and put into the batch, residual of queries",
    dict(n=64, inducing=64, points=1024, width=256),
    dict(n=2, inducing=3, points=6, width=16),
)
def set_attention(n, inducing, points, width):
    heads = 4 if width > 16 else 2

    def block(m, x, y):
        q, k, v = m[0](x), m[1](y), m[2](y)
        q_, k_, v_ = (torch.cat(t.split(width // heads, 2), 0) for t in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(width), 2)
        o = torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)
        o = m[4](o)
        return m[5](o + F.relu(m[3](o)))

    def forward(m, x):
        h = block(m.first, m.points.repeat(x.size(0), 1, 1), x)
        return block(m.second, x, h)

    def parts():
        four, two = (nn.Linear(width, width) for _ in range(4)), (nn.LayerNorm(width) for _ in "ab")
        return nn.ModuleList([*four, *two])

    seeds = nn.Parameter(torch.randn(1, inducing, width))
    return Called(forward, first=parts(), second=parts(), points=seeds), (
        features(n, points, width),
    )


@problem(
    "Non-local neural networks, embedded Gaussian: one head over all places, batch norm, residual",
    dict(n=16, c=512, size=28),
    dict(n=2, c=16, size=4),
)
def non_local_block(n, c, size):
    def forward(m, x):
        g = m.g(x).view(n, c // 2, -1).permute(0, 2, 1)
        theta = m.theta(x).view(n, c // 2, -1).permute(0, 2, 1)
        phi = m.phi(x).view(n, c // 2, -1)
        f = F.softmax(torch.matmul(theta, phi), dim=-1)
        y = torch.matmul(f, g).permute(0, 2, 1).contiguous().view(n, c // 2, size, size)
        return m.norm(m.w(y)) + x

    parts = {name: nn.Conv2d(c, c // 2, 1) for name in ("g", "theta", "phi")}
    return Called(forward, **parts, w=nn.Conv2d(c // 2, c, 1), norm=nn.BatchNorm2d(c)), (
        features(n, c, size, size),
    )


@problem(
    "SAGAN attention: queries and keys of an eighth of the channels, pooled keys, a learnt weight",
    dict(n=64, c=256, size=32),
    dict(n=2, c=16, size=4),
)
def image_self_attention(n, c, size):
    def forward(m, x):
        theta = m.theta(x).view(n, c // 8, size * size)
        phi = F.max_pool2d(m.phi(x), 2).view(n, c // 8, size * size // 4)
        g = F.max_pool2d(m.g(x), 2).view(n, c // 2, size * size // 4)
        beta = F.softmax(torch.bmm(theta.transpose(1, 2), phi), -1)
        o = m.o(torch.bmm(g, beta.transpose(1, 2)).view(n, c // 2, size, size))
        return m.gamma * o + x

    parts = dict(theta=nn.Conv2d(c, c // 8, 1, bias=False), phi=nn.Conv2d(c, c // 8, 1, bias=False))
    parts |= dict(g=nn.Conv2d(c, c // 2, 1, bias=False), o=nn.Conv2d(c // 2, c, 1, bias=False))
    return Called(forward, **parts, gamma=nn.Parameter(torch.ones(1))), (
        features(n, c, size, size),
    )


@problem(
    "Bahdanau attention: scores by tanh of sums, padding filled, a context for each step",
    dict(n=32, steps=64, frames=256, width=256),
    dict(n=2, steps=3, frames=6, width=16),
)
def additive_attention(n, steps, frames, width):
    def forward(m, q, memory, padding):
        energy = torch.tanh(m.q(q)[:, :, None] + m.k(memory)[:, None])
        scores = m.score(energy).squeeze(-1).masked_fill(padding[:, None], float("-inf"))
        context = torch.bmm(F.softmax(scores, dim=-1), memory)
        return torch.tanh(m.out(torch.cat((context, q), -1)))

    parts = linears(width, "q k", False) | dict(
        score=nn.Linear(width, 1), out=nn.Linear(2 * width, width)
    )
    return Called(forward, **parts), (
        features(n, steps, width),
        features(n, frames, width),
        ~lengths_mask(n, frames),
    )


@problem(
    "Gated attention unit: squared relu of scores by two affine maps of one projection",
    dict(n=16, seq=512, width=768),
    FEW_TEXT,
)
def gated_attention_unit(n, seq, width):
    wide, small = 2 * width, 128 if width > 16 else 8

    def forward(m, x):
        u, v, base = torch.split(F.silu(m.uv(m.norm(x))), [wide, wide, small], dim=-1)
        q, k = torch.unbind(base.unsqueeze(2) * m.gamma + m.beta, dim=2)
        kernel = torch.square(F.relu(torch.bmm(q, k.transpose(1, 2)) / seq))
        return x + m.out(u * torch.bmm(kernel, v))

    gamma, beta = (nn.Parameter(torch.randn(2, small) * 0.1 + i) for i in (1, 0))
    parts = dict(uv=nn.Linear(width, 2 * wide + small), out=nn.Linear(wide, width))
    return Called(forward, **parts, norm=nn.LayerNorm(width), gamma=gamma, beta=beta), (
        features(n, seq, width),
    )


@problem(
    "DETR decoder layer: places added to queries and keys, post-norms",
    dict(n=16, queries=100, places=850, width=256),
    dict(n=2, queries=4, places=6, width=16),
)
def detection_decoder_layer(n, queries, places, width):
    heads = 8 if width > 16 else 2

    def attend(m, q, k, v):
        q, k, v = (split(p(t), heads) for p, t in zip(m[:3], (q, k, v), strict=True))
        scores = torch.matmul(q * (width // heads) ** -0.5, k.transpose(2, 3))
        return m[3](joined(torch.matmul(F.softmax(scores, dim=-1), v)))

    def forward(m, x, memory, query_places, places):
        at = x + query_places
        x = m.norms[0](x + attend(m.own, at, at, x))
        x = m.norms[1](x + attend(m.cross, x + query_places, memory + places, memory))
        return m.norms[2](x + m.down(F.relu(m.up(x))))

    four = [nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(2)]
    norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
    parts = dict(up=nn.Linear(width, 8 * width), down=nn.Linear(8 * width, width), norms=norms)
    return Called(forward, own=four[0], cross=four[1], **parts), (
        features(n, queries, width),
        features(n, places, width),
        torch.randn(1, queries, width),
        torch.randn(n, places, width),
    )


@problem(
    "Perceiver IO: latents read bytes by one cross attention with padding, two norms in front",
    dict(n=8, latents=256, seq=2048, width=768),
    dict(n=2, latents=3, seq=6, width=16),
)
def latents_read_bytes(n, latents, seq, width):
    heads = 8 if width > 16 else 2

    def forward(m, x, mask):
        latent = m.latents.expand(n, -1, -1)
        h, x = m.first(latent), m.second(x)
        q, k, v = (split(p(t), heads) for p, t in ((m.q, h), (m.k, x), (m.v, x)))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(width // heads)
        scores = scores + (1.0 - mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        y = joined(torch.matmul(nn.functional.softmax(scores, dim=-1), v))
        y = latent + m.out(y)
        return y + m.down(F.gelu(m.up(m.third(y))))

    norms = dict.fromkeys(("first", "second", "third"))
    parts = linears(width, "q k v out") | {name: nn.LayerNorm(width) for name in norms}
    parts |= dict(up=nn.Linear(width, width), down=nn.Linear(width, width))
    latent = nn.Parameter(torch.randn(1, latents, width))
    return Called(forward, **parts, latents=latent), (features(n, seq, width), lengths_mask(n, seq))


@problem(
    "Linformer: keys and values projected over the length, then attention",
    dict(n=16, seq=2048, width=512),
    dict(n=2, seq=16, width=16),
)
def projected_length_attention(n, seq, width):
    heads = 8 if width > 16 else 2

    def forward(m, x):
        q, k, v = m.q(x), m.k(x), m.v(x)
        k, v = (torch.einsum("bnd,nk->bkd", t, m.shorter) for t in (k, v))
        q, k, v = (t.reshape(n, -1, heads, width // heads).transpose(1, 2) for t in (q, k, v))
        dots = torch.einsum("bhnd,bhkd->bhnk", q, k) * (width // heads) ** -0.5
        out = torch.einsum("bhnk,bhkd->bhnd", dots.softmax(dim=-1), v)
        return m.out(out.transpose(1, 2).reshape(n, seq, width))

    shorter = nn.Parameter(torch.randn(seq, seq // 8) * seq**-0.5)
    return Called(forward, **linears(width, "q k v out", False), shorter=shorter), (
        features(n, seq, width),
    )
