"""Language models as they are served: heads that draft, decoding steps with a cache, eight bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm
from benchmarks.foreign_code.language_parts import plain
from benchmarks.foreign_code.problems import INFERENCE, Called, features, problem


@problem(
    "Medusa: a residual block and a head of words for each step ahead, discounted losses",
    dict(n=2, seq=512, width=1024, words=32000),
    dict(n=2, seq=8, width=16, words=40),
)
def draft_heads(n, seq, width, words):
    def forward(m, x, tokens):
        loss = 0.0
        for i, (block, head) in enumerate(zip(m.blocks, m.heads, strict=True)):
            logits = head(x + F.silu(block(x)))[:, : -(2 + i)].contiguous()
            labels = tokens[..., 2 + i :].contiguous().view(-1)
            step = F.cross_entropy(logits.view(-1, words).float(), labels, ignore_index=-100)
            loss += step * 0.8**i * 0.2
        return loss

    blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    heads = nn.ModuleList(nn.Linear(width, words, bias=False) for _ in range(3))
    tokens = torch.randint(words, (n, seq))
    tokens[:, : seq // 4] = -100
    return Called(forward, blocks=blocks, heads=heads), (features(n, seq, width), tokens)


@problem(
    "gpt-fast: one token, a cache written at its place, interleaved rotary, int8 weights",
    dict(n=16, seq=4096, width=2048),
    dict(n=2, seq=8, width=32),
    INFERENCE,
)
def cached_decoding_step(n, seq, width):
    heads, d = max(2, width // 128), width // max(2, width // 128)
    sizes = dict(wqkv=(2 * width, width), wo=(width, width))
    sizes |= dict(w1=(3 * width, width), w3=(3 * width, width), w2=(width, 3 * width))

    def product(m, name, x):
        return F.linear(x, getattr(m, name).to(dtype=x.dtype)) * getattr(m, f"{name}_scales")

    def norm(x, weight):
        wide = x.float()
        wide = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * weight

    def rotary(x, turns):
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turns = turns.view(1, pairs.size(1), 1, pairs.size(3), 2)
        a, b, cos, sin = pairs[..., 0], pairs[..., 1], turns[..., 0], turns[..., 1]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3).type_as(x)

    def forward(m, x, at):
        mask, turns = m.mask[None, None, at], m.turns[at]
        h = norm(x, m.weight1)
        q, k, v = product(m, "wqkv", h).split([width, width // 2, width // 2], dim=-1)
        q, k, v = (y.view(n, 1, -1, d) for y in (q, k, v))
        q, k, v = (y.transpose(1, 2) for y in (rotary(q, turns), rotary(k, turns), v))
        m.k_cache[:, :, at], m.v_cache[:, :, at] = k, v
        k = m.k_cache.repeat_interleave(2, dim=1)
        v = m.v_cache.repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        x = x + product(m, "wo", y.transpose(1, 2).contiguous().view(n, 1, width))
        h = norm(x, m.weight2)
        return x + product(m, "w2", F.silu(product(m, "w1", h)) * product(m, "w3", h))

    module = Called(forward, **{f"weight{i}": nn.Parameter(torch.ones(width)) for i in (1, 2)})
    for name, shape in sizes.items():
        module.register_buffer(name, torch.randint(-127, 128, shape, dtype=torch.int8))
        module.register_buffer(f"{name}_scales", torch.rand(shape[0]) / 73 / shape[1] ** 0.5)
    for name in ("k_cache", "v_cache"):
        module.register_buffer(name, torch.randn(n, heads // 2, seq, d))
    module.register_buffer("mask", torch.ones(seq, seq, dtype=torch.bool).tril())
    turns = torch.outer(torch.arange(float(seq)), 10000 ** -(torch.arange(0.0, d, 2) / d))
    module.register_buffer("turns", torch.stack([turns.cos(), turns.sin()], dim=-1))
    return module, (torch.randn(n, 1, width), torch.tensor([3 * seq // 4]))


@problem(
    "DeepSeek-V3 inference: queries moved into the latent space, one cache for all heads",
    dict(n=32, seq=4096, width=2048),
    dict(n=2, seq=8, width=32),
    INFERENCE,
)
def absorbed_latent_step(n, seq, width):
    heads, d = max(2, width // 128), width // max(2, width // 128)
    rank, turn = width // 4, d // 2

    def rotary(x, turns):
        a, b = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = turns.float().unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3).to(x.dtype)

    def forward(m, x, at):
        q = m.q_b(m.q_norm(m.q_a(x))).view(n, 1, heads, d + turn)
        q_nope, q_pe = torch.split(q, [d, turn], dim=-1)
        kv, k_pe = torch.split(m.kv_a(x), [rank, turn], dim=-1)
        q_pe, k_pe = rotary(q_pe, m.turns[at]), rotary(k_pe.unsqueeze(2), m.turns[at])
        kv_b = m.kv_b.weight.view(heads, -1, rank)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, kv_b[:, :d])
        m.kv_cache[:, at], m.pe_cache[:, at] = m.kv_norm(kv), k_pe.squeeze(2)
        scores = torch.einsum("bshc,btc->bsht", q_nope, m.kv_cache)
        scores = scores + torch.einsum("bshr,btr->bsht", q_pe, m.pe_cache)
        scores = scores * (d + turn) ** -0.5
        later = torch.arange(seq, device=x.device) > at
        scores = scores.masked_fill(later, float("-inf"))
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        y = torch.einsum("bsht,btc->bshc", scores, m.kv_cache)
        y = torch.einsum("bshc,hdc->bshd", y, kv_b[:, -d:])
        return x + m.o(y.flatten(2))

    parts = plain(q_a=(width, 3 * rank), q_b=(3 * rank, heads * (d + turn)), o=(width, width))
    parts |= plain(kv_a=(width, rank + turn), kv_b=(rank, 2 * width))
    module = Called(forward, **parts, q_norm=RMSNorm(3 * rank), kv_norm=RMSNorm(rank))
    module.register_buffer("kv_cache", torch.randn(n, seq, rank))
    module.register_buffer("pe_cache", torch.randn(n, seq, turn))
    turns = torch.outer(torch.arange(float(seq)), 10000 ** -(torch.arange(0.0, turn, 2) / turn))
    module.register_buffer("turns", torch.stack([turns.cos(), turns.sin()], dim=-1)[:, None])
    return module, (torch.randn(n, 1, width), torch.tensor([3 * seq // 4]))


@problem(
    "DeepSeek-V3 fp8 MLP in torch: e4m3 activations by 128 channels, weights by blocks",
    dict(tokens=4096, width=2048),
    dict(tokens=6, width=32),
    INFERENCE,
)
def eight_bit_blocks(tokens, width):
    block = width // 16

    def rounded(x):
        blocks = x.view(x.shape[0], -1, block).float()
        scale = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4) / 448.0
        y = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return (y.float() * scale).view_as(x).to(x.dtype)

    def weight(m, name):
        w, scale = getattr(m, name), getattr(m, f"{name}_scale_inv")
        w = w.view(w.shape[0] // block, block, w.shape[1] // block, block)
        return (w * scale[:, None, :, None]).view(-1, w.shape[2] * block)

    def forward(m, x):
        h = rounded(m.norm(x))
        h = F.silu(F.linear(h, weight(m, "gate"))) * F.linear(h, weight(m, "up"))
        return x + F.linear(rounded(h), weight(m, "down"))

    module = Called(forward, norm=RMSNorm(width))
    sizes = dict(gate=(2 * width, width), up=(2 * width, width), down=(width, 2 * width))
    for name, (rows, columns) in sizes.items():
        w = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn).float()
        scale = (0.5 + torch.rand(rows // block, columns // block)) / 100 / columns**0.5
        module.register_buffer(name, w)
        module.register_buffer(f"{name}_scale_inv", scale)
    return module, (torch.randn(tokens, width),)
