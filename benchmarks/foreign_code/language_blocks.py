"""Layers, heads and residual streams of language models, in the styles of several families."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm, angles, rotated
from benchmarks.foreign_code.encoders import heads_of, split
from benchmarks.foreign_code.molecules import linears
from benchmarks.foreign_code.problems import ALL, INFERENCE, Called, features, problem

TEXT, FEW = dict(n=8, seq=1024, width=1024), dict(n=2, seq=8, width=32)


def merged(x):
    """[n, heads, seq, d] -> [n, seq, width]"""
    return x.transpose(1, 2).contiguous().flatten(2)


def with_angles(module: nn.Module, seq: int, d: int) -> nn.Module:
    for name, value in zip(("cos", "sin"), angles(seq, d), strict=True):
        module.register_buffer(name, value)
    return module


@problem("transformers Falcon layer: one head of keys, attention and MLP of one norm", TEXT, FEW)
def multi_query_layer(n, seq, width):
    heads = heads_of(width)
    d = width // heads

    def forward(m, x):
        h = m.norm(x)
        fused = m.qkv(h).view(n, seq, heads + 2, d)
        q, k, v = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        q, k = rotated(q, m.cos, m.sin), rotated(k, m.cos, m.sin)
        k, v = (y.expand(n, heads, seq, d) for y in (k, v))
        a = m.dense(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        y = m.down(F.gelu(m.up(h)))
        y += a
        return F.dropout(y, 0.0, m.training) + x

    parts = linears(qkv=(width, width + 2 * d), dense=(width, width))
    parts |= linears(up=(width, 4 * width), down=(4 * width, width))
    module = Called(forward, **parts, norm=nn.LayerNorm(width))
    return with_angles(module, seq, d), (features(n, seq, width),)


@problem(
    "transformers Cohere layer: layer norm without bias in fp32, interleaved rotary, parallel",
    TEXT,
    FEW,
)
def command_layer(n, seq, width):
    heads = heads_of(width)
    d = width // heads

    def norm(x, weight):
        wide = x.to(torch.float32)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        wide = (wide - mean) * torch.rsqrt(variance + 1e-5)
        return (weight.to(torch.float32) * wide).to(x.dtype)

    def turned(x, cos, sin):
        wide = x.float()
        half = torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2)
        return (wide * cos + half * sin).to(dtype=x.dtype)

    def forward(m, x):
        h = norm(x, m.weight)
        q, k, v = (split(p(h), heads) for p in (m.q, m.k, m.v))
        q, k = norm(q, m.q_norm[:, None]), norm(k, m.k_norm[:, None])
        cos, sin = m.cos.repeat_interleave(2, -1), m.sin.repeat_interleave(2, -1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        a = m.o(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + a + m.down(F.silu(m.gate(h)) * m.up(h))

    wide = 2 * width
    parts = {k: nn.Linear(width, width, bias=False) for k in "qkvo"}
    parts |= {k: nn.Linear(width, wide, bias=False) for k in ("gate", "up")}
    parts |= dict(down=nn.Linear(wide, width, bias=False), weight=nn.Parameter(torch.ones(width)))
    parts |= {f"{k}_norm": nn.Parameter(torch.ones(heads, d)) for k in "qk"}
    module = Called(forward, **parts)
    cos, sin = angles(seq, d)
    module.register_buffer("cos", cos[:, : d // 2].contiguous())
    module.register_buffer("sin", sin[:, : d // 2].contiguous())
    return module, (features(n, seq, width),)


@problem(
    "allenai OLMo layer: layer norms without weights, clipped projections, swiglu of one product",
    TEXT,
    FEW,
    ALL,
)
def weightless_norm_layer(n, seq, width):
    heads = heads_of(width)

    def forward(m, x):
        h = F.layer_norm(x.to(torch.float32), (width,), None, None, eps=1e-5).to(x.dtype)
        qkv = m.att(h).clamp_(min=-8.0, max=8.0)
        q, k, v = (split(y, heads) for y in qkv.split((width, width, width), dim=-1))
        q, k = rotated(q, m.cos, m.sin), rotated(k, m.cos, m.sin)
        x = x + m.out(merged(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        h = F.layer_norm(x.to(torch.float32), (width,), None, None, eps=1e-5).to(x.dtype)
        y, gate = m.ff(h).chunk(2, dim=-1)
        return x + m.ff_out(F.silu(gate) * y)

    sizes = dict(att=(1, 3), out=(1, 1), ff=(1, 8), ff_out=(4, 1))
    parts = {k: nn.Linear(a * width, b * width, bias=False) for k, (a, b) in sizes.items()}
    return with_angles(Called(forward, **parts), seq, width // heads), (features(n, seq, width),)


@problem(
    "transformers Granite layer: multipliers of embedding, attention and residual, scaled logits",
    dict(n=4, seq=1024, width=1024, words=32000),
    dict(n=2, seq=8, width=32, words=40),
)
def multiplier_layer(n, seq, width, words):
    heads = heads_of(width)

    def forward(m, ids):
        x = m.embed(ids) * 12.0
        h = m.norm1(x)
        q, k, v = (split(p(h), heads) for p in (m.q, m.k, m.v))
        q, k = rotated(q, m.cos, m.sin), rotated(k, m.cos, m.sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.0078125)
        x = x + m.o(merged(a)) * 0.22
        h = m.norm2(x)
        x = x + m.down(F.silu(m.gate(h)) * m.up(h)) * 0.22
        return F.linear(m.norm3(x), m.embed.weight) / 16.0

    parts = {k: nn.Linear(width, width, bias=False) for k in "qkvo"}
    parts |= {k: nn.Linear(width, 4 * width, bias=False) for k in ("gate", "up")}
    parts |= dict(down=nn.Linear(4 * width, width, bias=False), embed=nn.Embedding(words, width))
    parts |= {f"norm{i}": RMSNorm(width) for i in (1, 2, 3)}
    module = with_angles(Called(forward, **parts), seq, width // heads)
    return module, (torch.randint(words, (n, seq)),)


@problem(
    "transformers Phi layer: rotary on two fifths of a head, norms of heads, tanh gelu, parallel",
    TEXT,
    FEW,
)
def partial_rotary_layer(n, seq, width):
    heads = heads_of(width)
    turned = width // heads // 2

    def part(x, cos, sin):
        rot, passed = x[..., :turned], x[..., turned:]
        return torch.cat((rotated(rot, cos, sin), passed), dim=-1)

    def forward(m, x):
        h = m.norm(x)
        q, k, v = (split(p(h), heads) for p in (m.q, m.k, m.v))
        q, k = part(m.q_norm(q), m.cos, m.sin), part(m.k_norm(k), m.cos, m.sin)
        scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(2, 3))
        scores = scores / math.sqrt(width // heads) + m.mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        a = m.dense(merged(torch.matmul(weights, v)))
        y = m.fc1(h)
        y = 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (y + 0.044715 * torch.pow(y, 3.0))))
        return a + m.fc2(y) + x

    parts = {k: nn.Linear(width, width) for k in ("q", "k", "v", "dense")}
    parts |= dict(fc1=nn.Linear(width, 4 * width), fc2=nn.Linear(4 * width, width))
    parts |= {f"{k}_norm": nn.LayerNorm(width // heads) for k in "qk"}
    module = with_angles(Called(forward, **parts, norm=nn.LayerNorm(width)), seq, turned)
    mask = torch.full((seq, seq), torch.finfo(torch.bfloat16).min).triu(1)
    module.register_buffer("mask", mask)
    return module, (features(n, seq, width),)


@problem(
    "transformers Longformer: overlapping chunks of scores padded into diagonals, masked, global 0",
    dict(n=4, seq=4096, heads=12, d=64, window=256),
    dict(n=2, seq=16, heads=2, d=8, window=4),
)
def sliding_chunks(n, seq, heads, d, window):
    chunks = seq // window

    def forward(m, q, k, v, mask):
        q = (q / math.sqrt(d)).view(n, chunks, window, heads, d)
        pads = (0, 0, 0, 0, window, window)
        k = F.pad(k, pads).unfold(1, 3 * window, window)
        v = F.pad(v, pads, value=-1.0).unfold(1, 3 * window, window)
        keep = F.pad(mask, (window, window)).unfold(1, 3 * window, window)
        scores = torch.einsum("bcxhd,bchdy->bchxy", q, k)
        scores = scores.masked_fill(~m.near, float("-inf"))
        hidden = (1.0 - keep.type_as(scores)) * torch.finfo(scores.dtype).min
        scores = scores + hidden[:, :, None, None, :]
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
        weights = torch.masked_fill(weights, ~mask.bool().view(n, chunks, 1, window, 1), 0.0)
        out = torch.einsum("bchxy,bchdy->bcxhd", weights.type_as(v), v)
        return out.reshape(n, seq, heads * d)

    module = Called(forward)
    x, y = torch.arange(window)[:, None] + window, torch.arange(3 * window)[None]
    module.register_buffer("near", (x - y).abs() <= window)
    mask = torch.arange(seq)[None] < torch.linspace(seq // 2, seq, n)[:, None]
    return module, (*(features(n, seq, heads, d) for _ in range(3)), mask.float())


@problem(
    "microsoft RetNet retention: decays for a mask, sums of rows clamped, weightless norm, gate",
    dict(n=8, seq=1024, width=1024),
    FEW,
)
def retention(n, seq, width):
    heads = max(2, width // 256)

    def forward(m, x):
        h = m.norm(x)
        q, k, v = (split(p(h), heads) for p in (m.q, m.k, m.v))
        k = k * (width // heads) ** -0.5
        qk = (q @ k.transpose(-1, -2)) * m.decay
        qk = qk / qk.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1, max=5e4)
        y = torch.matmul(qk, v).transpose(1, 2)
        y = (y.float() * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(y)
        return x + m.o(F.silu(m.g(h)) * y.reshape(n, seq, width))

    parts = {k: nn.Linear(width, width, bias=False) for k in "qkvgo"}
    module = Called(forward, **parts, norm=RMSNorm(width))
    logs = torch.log(1 - 2 ** (-5 - torch.arange(float(heads))))
    apart = torch.arange(float(seq))[:, None] - torch.arange(float(seq))[None]
    decay = torch.exp(apart.clamp(min=0) * logs[:, None, None]) * (apart >= 0)
    module.register_buffer("decay", decay / decay.sum(dim=-1, keepdim=True).sqrt())
    return module, (features(n, seq, width),)


@problem(
    "flash-linear-attention gated DeltaNet: short convolutions, unit queries, gates, gated norm",
    TEXT,
    FEW,
)
def delta_net_gates(n, seq, width):
    heads = max(2, width // 256)

    def unit(x):
        return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)

    def forward(m, x):
        mixed = m.conv(m.qkv(x).transpose(1, 2))[:, :, :seq]
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in F.silu(mixed).transpose(1, 2).chunk(3, -1))
        q, k = unit(q), unit(k)
        beta = m.b(x).sigmoid()
        g = -m.a_log.float().exp() * F.softplus(m.a(x).float() + m.dt_bias)
        k_beta, decay = k * beta.unsqueeze(-1), g.cumsum(1).clamp(min=-8.0).exp().type_as(x)
        o = v * beta.unsqueeze(-1) + (q * k_beta).sum(-1, keepdim=True) * decay.unsqueeze(-1)
        z = m.z(x).unflatten(-1, (heads, -1))
        wide = o.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        wide = m.weight * wide.to(x.dtype)
        wide = wide * F.silu(z.to(torch.float32))
        return m.o(wide.to(x.dtype).flatten(2))

    parts = {k: nn.Linear(width, width, bias=False) for k in "zo"}
    parts |= {k: nn.Linear(width, heads, bias=False) for k in "ab"}
    parts |= dict(qkv=nn.Linear(width, 3 * width, bias=False))
    parts |= dict(conv=nn.Conv1d(3 * width, 3 * width, 4, padding=3, groups=3 * width, bias=False))
    parts |= {k: nn.Parameter(torch.rand(heads)) for k in ("a_log", "dt_bias")}
    parts |= dict(weight=nn.Parameter(torch.ones(width // heads)))
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "answerdotai ModernBERT layer: GeGLU, norms without bias, an additive mask of a local window",
    dict(n=16, seq=512, width=768),
    FEW,
)
def local_encoder_layer(n, seq, width):
    heads = heads_of(width)

    def forward(m, x, mask):
        lowest = torch.finfo(x.dtype).min
        keep = mask[:, None, None, :] & m.near
        bias = torch.zeros(keep.shape, dtype=x.dtype, device=x.device).masked_fill(~keep, lowest)
        h = F.layer_norm(x, (width,), m.weight1, None, 1e-5)
        qkv = m.qkv(h).view(n, -1, 3, heads, width // heads)
        q, k, v = qkv.transpose(3, 1).unbind(dim=2)
        q, k = rotated(q, m.cos, m.sin), rotated(k, m.cos, m.sin)
        x = x + m.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
        h = F.layer_norm(x, (width,), m.weight2, None, 1e-5)
        inner, gate = m.wi(h).chunk(2, dim=-1)
        return x + m.wo(F.gelu(inner) * gate)

    sizes = dict(qkv=(2, 6), o=(2, 2), wi=(2, 6), wo=(3, 2))
    parts = {
        k: nn.Linear(a * width // 2, b * width // 2, bias=False) for k, (a, b) in sizes.items()
    }
    parts |= {f"weight{i}": nn.Parameter(torch.ones(width)) for i in (1, 2)}
    module = with_angles(Called(forward, **parts), seq, width // heads)
    places = torch.arange(seq)
    module.register_buffer("near", (places[:, None] - places[None]).abs() <= max(2, seq // 8))
    mask = places[None] < torch.linspace(seq // 2, seq, n)[:, None]
    return module, (features(n, seq, width), mask)


@problem("NVIDIA nGPT: normalised states, learnt step sizes on the hypersphere", TEXT, FEW)
def hypersphere_layer(n, seq, width):
    heads = heads_of(width)
    d = width // heads

    def unit(x):
        dtype, x = x.dtype, x.float()
        return (x / x.norm(p=2, dim=-1, keepdim=True)).to(dtype=dtype)

    def moved(x, branch, alpha):
        a, b = unit(x), unit(branch)
        return unit(a + torch.abs(alpha * (0.05 / 0.03)) * (b - a))

    def forward(m, x):
        q, k, v = (p(x).view(n, seq, heads, d) for p in (m.q, m.k, m.v))
        sqk = (m.sqk * (1.0 / 0.03)).view(1, 1, heads, d)
        q, k = sqk * unit(q), sqk * unit(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d**0.5)
        x = moved(x, m.o(merged(a)), m.alpha1)
        uv = m.suv * ((1.0 / 1.0) * width**0.5) * m.fc(x)
        u, v = torch.chunk(uv, 2, dim=-1)
        return moved(x, m.proj(u * F.silu(v)), m.alpha2)

    parts = {k: nn.Linear(width, width, bias=False) for k in "qkvo"}
    parts |= dict(fc=nn.Linear(width, 8 * width, bias=False))
    parts |= dict(proj=nn.Linear(4 * width, width, bias=False))
    parts |= dict(sqk=nn.Parameter(torch.full((width,), 0.03)))
    parts |= dict(suv=nn.Parameter(torch.ones(8 * width)))
    parts |= {f"alpha{i}": nn.Parameter(torch.full((width,), 0.03)) for i in (1, 2)}
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "hyper-connections: four residual streams, widths and depths mixed by tanh of a normed state",
    dict(n=4, seq=1024, width=1024),
    FEW,
)
def hyper_connections(n, seq, width):
    streams = 4

    def forward(m, x):
        normed = m.norm(x)
        alpha = torch.tanh(normed @ m.dynamic_alpha) * m.alpha_scale + m.static_alpha
        beta = torch.tanh(normed @ m.dynamic_beta) * m.beta_scale + m.static_beta
        mixed = alpha.transpose(-1, -2) @ x
        h = m.down(F.silu(m.up(m.branch_norm(mixed[..., 0, :]))))
        return torch.einsum("bld,bln->blnd", h, beta) + mixed[..., 1:, :]

    static = torch.cat([torch.ones(streams, 1) / streams, torch.eye(streams)], dim=1)
    parts = dict(static_alpha=nn.Parameter(static), static_beta=nn.Parameter(torch.ones(streams)))
    parts |= dict(dynamic_alpha=nn.Parameter(torch.randn(width, streams + 1) * 0.02))
    parts |= dict(dynamic_beta=nn.Parameter(torch.randn(width) * 0.02))
    parts |= {f"{k}_scale": nn.Parameter(torch.tensor(0.1)) for k in ("alpha", "beta")}
    parts |= linears(up=(width, 4 * width), down=(4 * width, width))
    parts |= {k: nn.RMSNorm(width) for k in ("norm", "branch_norm")}
    return Called(forward, **parts), (features(n, seq, streams, width),)


@problem(
    "DeepSeek-V3 multi-token prediction: norms of state and next embedding, joined, one product",
    TEXT,
    FEW,
    ALL,
)
def next_token_projection(n, seq, width):
    def forward(m, x, embedded):
        h = m.proj(torch.cat([m.enorm(embedded), m.hnorm(x)], dim=-1))
        return h + m.down(F.silu(m.gate(m.norm(h))) * m.up(m.norm(h)))

    sizes = dict(proj=(2, 1), gate=(1, 2), up=(1, 2), down=(2, 1))
    parts = {k: nn.Linear(a * width, b * width, bias=False) for k, (a, b) in sizes.items()}
    norms = {k: RMSNorm(width) for k in ("enorm", "hnorm", "norm")}
    return Called(forward, **parts, **norms), (features(n, seq, width), features(n, seq, width))


@problem(
    "transformers generation: repetition penalty, temperature, top-p by sorted sums, renormalised",
    dict(n=128, words=128256, seen=256),
    dict(n=3, words=40, seen=5),
    INFERENCE,
)
def nucleus(n, words, seen):
    def forward(m, logits, ids):
        score = torch.gather(logits, 1, ids)
        score = torch.where(score < 0, score * 1.2, score / 1.2)
        logits = logits.scatter(1, ids, score).float() / 0.7
        ordered, at = torch.sort(logits, descending=False)
        total = ordered.softmax(dim=-1).cumsum(dim=-1)
        remove = total <= 1 - 0.9
        remove[..., -1:] = 0
        logits = logits.masked_fill(remove.scatter(1, at, remove), -float("inf"))
        return torch.softmax(logits, dim=-1)

    return Called(forward), (torch.randn(n, words) * 4, torch.randint(words, (n, seen)))
