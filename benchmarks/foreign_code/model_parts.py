"""Parts of models of 2023 to 2026: language, vision-language, speech, video, proteins, series."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm
from benchmarks.foreign_code.problems import ALL, BOTH_F32, Called, features, problem

TEXT, FEW = dict(n=8, seq=1024, width=1024), dict(n=2, seq=8, width=32)


def centred(*widths: int) -> nn.ModuleList:
    """Norms whose weights are what is added to one."""
    return nn.ModuleList(RMSNorm(width, plus_one=True) for width in widths)


@problem("Qwen3NextAttention: gates beside queries, a quarter of a head rotary", TEXT, FEW)
def output_gated_attention(n, seq, width):
    heads = max(2, width // 128)
    d, rot = width // heads, width // heads // 4

    def turned(x, cos, sin):
        moved, still = x[..., :rot], x[..., rot:]
        half = torch.cat((-moved[..., rot // 2 :], moved[..., : rot // 2]), dim=-1)
        return torch.cat([moved * cos + half * sin, still], dim=-1)

    def forward(m, x, cos, sin):
        q, gate = torch.chunk(m.q(x).view(n, seq, heads, 2 * d), 2, dim=-1)
        gate = gate.reshape(n, seq, -1)
        q = turned(m.norms[0](q).transpose(1, 2), cos, sin)
        k = turned(m.norms[1](m.k(x).view(n, seq, -1, d)).transpose(1, 2), cos, sin)
        v = m.v(x).view(n, seq, -1, d).transpose(1, 2)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        a = a.transpose(1, 2).reshape(n, seq, -1).contiguous()
        return m.o(a * torch.sigmoid(gate))

    sizes = dict(q=2 * width, k=width // 2, v=width // 2, o=width)
    parts = {k: nn.Linear(width, size, bias=False) for k, size in sizes.items()}
    turns = torch.outer(torch.arange(float(seq)), 1e6 ** -(torch.arange(0.0, rot, 2) / rot))
    turns = torch.cat((turns, turns), dim=-1)
    module = Called(forward, **parts, norms=centred(d, d))
    return module, (features(n, seq, width), turns.cos(), turns.sin())


@problem(
    "transformers Gemma3nTextMLP and LaurelBlock: gates below a normal quantile are cut to zero",
    dict(n=4, seq=1024, width=1024),
    FEW,
    ALL,
)
def sparse_gate_mlp(n, seq, width):
    def forward(m, x):
        h = m.norms[0](x)
        gate = m.gate(h)
        mean = torch.mean(gate, dim=-1, keepdim=True)
        std = torch.std(gate, dim=-1, keepdim=True, unbiased=False)
        gate = F.relu(gate - (mean + std * 1.6448536))
        y = m.down(F.gelu(gate, approximate="tanh") * m.up(h))
        laurel = h + m.norms[1](m.right(m.left(h)))
        return (x + m.norms[2](y) + laurel) / math.sqrt(2)

    sizes = dict(gate=(width, 4 * width), up=(width, 4 * width), down=(4 * width, width))
    sizes |= dict(left=(width, width // 16), right=(width // 16, width))
    parts = {k: nn.Linear(*pair, bias=False) for k, pair in sizes.items()}
    return Called(forward, **parts, norms=centred(width, width, width)), (features(n, seq, width),)


@problem(
    "DeepSeek-V3.2 Indexer, warmed up: weighted relu scores learn the sum of the heads' attention",
    dict(n=4, seq=1024, width=1024),
    FEW,
)
def indexer_warm_up(n, seq, width):
    heads, d = max(2, width // 64), max(8, width // 8)

    def forward(m, x, scores):
        mask = torch.full((seq, seq), float("-inf"), device=x.device).triu(1)
        q, k = m.q(x).view(n, seq, heads, d), m.k_norm(m.k(x))
        weights = m.weights(x) * heads**-0.5
        logits = torch.einsum("bshd,btd->bsht", q, k * d**-0.5)
        index = torch.einsum("bsht,bsh->bst", F.relu(logits), weights)
        with torch.no_grad():
            target = F.softmax(scores.float() + mask, dim=-1).sum(dim=1)
            target = target / target.sum(dim=-1, keepdim=True).clamp(min=1e-9)
        found = F.log_softmax(index.float() + mask, dim=-1).masked_fill(mask < 0, 0.0)
        return F.kl_div(found, target, reduction="sum") / (n * seq)

    parts = dict(q=nn.Linear(width, heads * d, bias=False), k=nn.Linear(width, d, bias=False))
    parts |= dict(k_norm=nn.LayerNorm(d), weights=nn.Linear(width, heads, bias=False))
    return Called(forward, **parts), (features(n, seq, width), torch.randn(n, 4, seq, seq))


@problem("RWKV-7 time mixing: removal keys of unit length, bonus, group norm, gate", TEXT, FEW)
def removal_key_mixing(n, seq, width):
    heads = max(2, width // 64)

    def low_rank(m, name, x, act=lambda h: h):
        return act(x @ m.downs[name]) @ m.ups[name]

    def forward(m, x, first, wkv):
        xx = F.pad(x, (0, 0, 1, -1)) - x
        xr, xw, xk, xv, xa, xg = (x + xx * mix for mix in m.mixes)
        r, k, v = m.r(xr), m.k(xk), m.v(xv)
        w = -F.softplus(-(m.biases[0] + low_rank(m, "w", xw, torch.tanh))) - 0.5
        v = v + (first - v) * torch.sigmoid(m.biases[1] + low_rank(m, "v", xv))
        a = torch.sigmoid(m.biases[2] + low_rank(m, "a", xa))
        g = low_rank(m, "g", xg, torch.sigmoid)
        kk = F.normalize((k * m.k_k).view(n, seq, heads, -1), dim=-1, p=2.0).view(n, seq, width)
        k = k * (1 + (a - 1) * m.k_a)
        y = m.ln_x(wkv.view(n * seq, width)).view(n, seq, width)
        bonus = (r.view(n, seq, heads, -1) * k.view(n, seq, heads, -1) * m.r_k).sum(-1, True)
        y = y + (bonus * v.view(n, seq, heads, -1)).view(n, seq, width)
        return m.o(y * g), torch.exp(-torch.exp(w)), -kk, kk * a

    rank = max(4, width // 16)
    parts = {name: nn.Linear(width, width, bias=False) for name in "rkvo"}
    downs = {k: nn.Parameter(torch.randn(width, rank) / width**0.5) for k in "wvag"}
    ups = {k: nn.Parameter(torch.randn(rank, width) / rank**0.5) for k in "wvag"}
    parts |= dict(downs=nn.ParameterDict(downs), ups=nn.ParameterDict(ups))
    parts |= dict(mixes=nn.Parameter(torch.rand(6, width)), k_k=nn.Parameter(torch.rand(width)))
    parts |= dict(biases=nn.Parameter(torch.randn(3, width)), k_a=nn.Parameter(torch.rand(width)))
    parts |= dict(r_k=nn.Parameter(torch.randn(heads, width // heads) * 0.1))
    return Called(forward, **parts, ln_x=nn.GroupNorm(heads, width, eps=64e-5)), tuple(
        features(n, seq, width) for _ in range(3)
    )


@problem(
    "transformers Gemma3MultiModalProjector: pooled patches, normed, put where the text has images",
    dict(n=16, side=64, inner=1152, width=2048),
    dict(n=2, side=8, inner=12, width=16),
)
def pooled_soft_tokens(n, side, inner, width):
    soft, seq = (side // 4) ** 2, (side // 4) ** 2 * 2

    def forward(m, patches, words):
        h = patches.transpose(1, 2).reshape(n, inner, side, side).contiguous()
        h = F.avg_pool2d(h, kernel_size=4, stride=4).flatten(2).transpose(1, 2)
        h = torch.matmul(m.norms[0](h), m.projection).type_as(patches)
        text = m.embed(words) * torch.tensor(width**0.5, dtype=h.dtype, device=h.device)
        mask = (words == 0).unsqueeze(-1).expand_as(text)
        return m.norms[1](text.masked_scatter(mask, h))

    words = torch.randint(1, 32 * width, (n, seq))
    words[:, 3 : 3 + soft] = 0
    parts = dict(projection=nn.Parameter(torch.randn(inner, width) / inner**0.5))
    parts |= dict(norms=centred(inner, width))
    module = Called(forward, **parts, embed=nn.Embedding(32 * width, width))
    return module, (features(n, side * side, inner), words)


@problem(
    "Kokoro AdaINResBlock1: norms over time steered by a style, learnt snakes, residual",
    dict(n=8, c=128, length=8192),
    dict(n=2, c=8, length=24),
)
def styled_snake_block(n, c, length):
    def styled(fc, x, style):
        gamma, beta = torch.chunk(fc(style).view(n, 2 * c, 1), chunks=2, dim=1)
        return (1 + gamma) * F.instance_norm(x, eps=1e-5) + beta

    def forward(m, x, style):
        for i in range(2):
            h = styled(m.styles[2 * i], x, style)
            h = h + (1 / m.alphas[2 * i]) * (torch.sin(m.alphas[2 * i] * h) ** 2)
            h = styled(m.styles[2 * i + 1], m.convs[2 * i](h), style)
            h = h + (1 / m.alphas[2 * i + 1]) * (torch.sin(m.alphas[2 * i + 1] * h) ** 2)
            x = m.convs[2 * i + 1](h) + x
        return x

    convs = [nn.Conv1d(c, c, 3, 1, d, d, bias=i % 2 == 1) for i, d in enumerate((1, 1, 3, 1))]
    styles = [nn.Linear(128, 2 * c) for _ in range(4)]
    alphas = [nn.Parameter(0.5 + torch.rand(1, c, 1)) for _ in range(4)]
    parts = dict(convs=nn.ModuleList(convs), styles=nn.ModuleList(styles))
    module = Called(forward, **parts, alphas=nn.ParameterList(alphas))
    return module, (features(n, c, length), features(n, 128))


@problem(
    "Wan 2.1 video autoencoder ResidualBlock: unit channels, silu, convolutions of earlier frames",
    dict(n=1, c=96, frames=8, side=128),
    dict(n=2, c=8, frames=3, side=6),
)
def causal_video_block(n, c, frames, side):
    def forward(m, x):
        h = m.shortcut(x)
        for conv, gamma in zip(m.convs, m.gammas, strict=True):
            x = F.normalize(x, dim=1) * x.shape[1] ** 0.5 * gamma
            x = conv(F.pad(F.silu(x), (1, 1, 1, 1, 2, 0)))
        return x + h

    convs = nn.ModuleList([nn.Conv3d(c, 2 * c, 3), nn.Conv3d(2 * c, 2 * c, 3)])
    gammas = nn.ParameterList(nn.Parameter(1 + torch.randn(k, 1, 1, 1) * 0.1) for k in (c, 2 * c))
    return Called(forward, convs=convs, gammas=gammas, shortcut=nn.Conv3d(c, 2 * c, 1)), (
        features(n, c, frames, side, side),
    )


@problem(
    "black-forest-labs Flux SingleStreamBlock: one product for heads and MLP, rotary by matrices",
    dict(n=4, seq=1024, width=1536),
    FEW,
)
def single_stream_block(n, seq, width):
    heads = max(2, width // 128)

    def rms(x, scale):
        rrms = torch.rsqrt(torch.mean(x.float() ** 2, dim=-1, keepdim=True) + 1e-6)
        return (x.float() * rrms).to(dtype=x.dtype) * scale

    def turned(x, pe):
        pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
        out = pe[..., 0] * pairs[..., 0] + pe[..., 1] * pairs[..., 1]
        return out.reshape(*x.shape).type_as(x)

    def forward(m, x, vec, pe):
        shift, scale, gate = m.modulation(F.silu(vec))[:, None, :].chunk(3, dim=-1)
        h = (1 + scale) * F.layer_norm(x, (width,), eps=1e-6) + shift
        qkv, mlp = torch.split(m.linear1(h), [3 * width, 4 * width], dim=-1)
        q, k, v = qkv.view(n, seq, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k = turned(rms(q, m.q_scale), pe), turned(rms(k, m.k_scale), pe)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, seq, width)
        return x + gate * m.linear2(torch.cat((a, F.gelu(mlp, approximate="tanh")), 2))

    parts = dict(linear1=nn.Linear(width, 7 * width), linear2=nn.Linear(5 * width, width))
    parts |= dict(modulation=nn.Linear(width, 3 * width))
    d = width // heads
    parts |= {k: nn.Parameter(1 + torch.randn(d) * 0.1) for k in ("q_scale", "k_scale")}
    turns = torch.outer(torch.arange(float(seq)), 10000 ** -(torch.arange(0.0, d, 2) / d))
    pe = torch.stack([turns.cos(), -turns.sin(), turns.sin(), turns.cos()], dim=-1)
    pe = pe.view(1, 1, seq, d // 2, 2, 2)
    return Called(forward, **parts), (features(n, seq, width), features(n, width), pe)


@problem(
    "Protenix ConditionedTransitionBlock: adaptive layer norm by a condition, gates in and out",
    dict(n=16, seq=768, width=768),
    FEW,
    ALL,
)
def conditioned_transition(n, seq, width):
    def forward(m, a, s):
        h, c = F.layer_norm(a, (width,)), m.s_norm(s)
        h = torch.sigmoid(m.scale(c)) * h + m.shift(c)
        b = F.silu(m.a1(h)) * m.a2(h)
        return a + torch.sigmoid(m.gate(s)) * m.out(b)

    parts = dict(s_norm=nn.LayerNorm(width // 2, bias=False), scale=nn.Linear(width // 2, width))
    parts |= dict(shift=nn.Linear(width // 2, width, bias=False), gate=nn.Linear(width // 2, width))
    parts |= {k: nn.Linear(width, 2 * width, bias=False) for k in ("a1", "a2")}
    nn.init.constant_(parts["gate"].bias, -2.0)
    return Called(forward, **parts, out=nn.Linear(2 * width, width, bias=False)), (
        features(n, seq, width),
        features(n, seq, width // 2),
    )


@problem(
    "ESM3 GeometricReasoningOriginalImpl: directions and distances of frames as attention scores",
    dict(n=4, seq=384, width=1024, heads=32),
    dict(n=2, seq=6, width=16, heads=2),
)
def geometric_attention(n, seq, width, heads):
    def forward(m, s, rotations, places, mask):
        vectors = m.proj(m.s_norm(s)).view(n, seq, 5 * heads, 3)
        vectors = torch.einsum("bsij,bshj->bshi", rotations, vectors)
        q_rot, k_rot, v, q_dist, k_dist = vectors.transpose(1, 2).chunk(5, dim=1)
        q_dist, k_dist = q_dist + places[:, None], k_dist + places[:, None]
        apart = (q_dist.unsqueeze(3) - k_dist.unsqueeze(2)).norm(dim=-1) / math.sqrt(3)
        turn = q_rot.matmul(k_rot.transpose(-1, -2)) / math.sqrt(3)
        weights = turn * F.softplus(m.turn_scale) - apart * F.softplus(m.distance_scale)
        weights = weights.masked_fill(~mask[:, None, None, :], torch.finfo(weights.dtype).min)
        out = torch.softmax(weights, dim=-1).matmul(v).transpose(1, 2)
        out = torch.einsum("bsji,bshj->bshi", rotations, out)
        return s + m.out(out.reshape(n, seq, 3 * heads) * mask[..., None])

    parts = dict(proj=nn.Linear(width, 15 * heads), s_norm=nn.LayerNorm(width, bias=False))
    scales = {k: nn.Parameter(torch.zeros(heads, 1, 1)) for k in ("turn_scale", "distance_scale")}
    rotations = torch.linalg.qr(torch.randn(n, seq, 3, 3))[0].contiguous()
    mask = torch.arange(seq)[None] < torch.linspace(seq // 2, seq, n).long()[:, None]
    return Called(forward, **parts, **scales, out=nn.Linear(3 * heads, width, bias=False)), (
        features(n, seq, width),
        rotations,
        torch.randn(n, seq, 3) * 3,
        mask,
    )


@problem(
    "Chronos-Bolt: masked scaling, inverse hyperbolic sine, patches and masks, quantile loss",
    dict(n=2048, length=512, width=512),
    dict(n=3, length=32, width=16),
    BOTH_F32,
)
def quantile_patch_forecast(n, length, width):
    def residual_block(parts, x):
        return parts[1](F.relu(parts[0](x))) + parts[2](x)

    def forward(m, context, mask, target):
        count = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        loc = (context * mask).sum(dim=-1, keepdim=True) / count
        scale = (((context - loc) * mask).square().sum(dim=-1, keepdim=True) / count).sqrt()
        scale = torch.where(scale == 0, torch.abs(loc) + 1e-5, scale)
        patches = torch.arcsinh((context - loc) / scale).unfold(-1, 16, 16)
        kept = mask.unfold(-1, 16, 16)
        h = residual_block(m.embed, torch.cat([torch.where(kept > 0, patches, 0.0), kept], dim=-1))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight
        seen = (kept.sum(dim=-1, keepdim=True) > 0).to(h.dtype)
        pooled = (h * seen).sum(dim=1) / seen.sum(dim=1)
        predicted = residual_block(m.head, pooled).view(n, 9, 64)
        target = torch.arcsinh((target - loc) / scale).unsqueeze(1)
        below = (target <= predicted).to(h.dtype) - m.quantiles.view(1, 9, 1)
        return (2 * torch.abs((target - predicted) * below)).mean(dim=-2).sum(dim=-1).mean(), pooled

    def block(a, b, c):
        return nn.ModuleList([nn.Linear(a, b), nn.Linear(b, c), nn.Linear(a, c)])

    parts = dict(embed=block(32, 2 * width, width), head=block(width, 2 * width, 9 * 64))
    module = Called(forward, **parts, weight=nn.Parameter(torch.ones(width)))
    module.register_buffer("quantiles", torch.arange(1, 10) / 10)
    mask = (torch.rand(n, length) < 0.9).float()
    mask[:, -1] = 1
    return module, (torch.randn(n, length).cumsum(-1), mask, torch.randn(n, 64))
