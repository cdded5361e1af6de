"""Attention over text in other spellings than scaled_dot_product_attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.decoders import RMSNorm, angles, rotated
from benchmarks.foreign_code.encoders import split
from benchmarks.foreign_code.problems import ALL, BOTH, Called, features, problem

TEXT, FEW = dict(n=8, seq=512, heads=8, d=64), dict(n=2, seq=8, heads=2, d=8)
LEAST = torch.finfo(torch.float32).min


def joined(x):
    """[n, heads, seq, d] -> [n, seq, heads * d]"""
    return x.transpose(1, 2).flatten(2)


def projections(width: int, bias: bool = True) -> dict[str, nn.Linear]:
    return {name: nn.Linear(width, width, bias=bias) for name in "qkvo"}


def causal(seq: int) -> torch.Tensor:
    return torch.ones(seq, seq, dtype=torch.bool).tril()


@problem(
    "x-transformers style attention: einsum, the largest score subtracted by hand, heads of 96",
    dict(n=8, seq=512, heads=8, d=96),
    FEW,
    ALL,
)
def einsum_attention(n, seq, heads, d):
    def forward(m, x, keep):
        q, k, v = (split(y, heads) for y in m.qkv(x).chunk(3, dim=-1))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q * d**-0.5, k)
        sim = sim.masked_fill(~keep, -torch.finfo(sim.dtype).max)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        attn = sim.softmax(dim=-1, dtype=torch.float32).to(sim.dtype)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return m.out(joined(out))

    width = heads * d
    parts = dict(qkv=nn.Linear(width, 3 * width, bias=False), out=nn.Linear(width, width))
    return Called(forward, **parts), (features(n, seq, width), causal(seq))


@problem(
    "diffusers AttnProcessor: baddbmm into an empty tensor, 77 words, heads of 80",
    dict(n=8, seq=1024, words=77, heads=8, d=80),
    dict(n=2, seq=8, words=5, heads=2, d=8),
)
def baddbmm_cross_attention(n, seq, words, heads, d):
    def to_batch(x):
        return x.reshape(n, -1, heads, d).permute(0, 2, 1, 3).reshape(n * heads, -1, d)

    def forward(m, x, text):
        q, k, v = to_batch(m.q(x)), to_batch(m.k(text)), to_batch(m.v(text))
        empty = torch.empty(n * heads, seq, words, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=d**-0.5)
        probs = scores.softmax(dim=-1).to(q.dtype)
        y = torch.bmm(probs, v).reshape(n, heads, seq, d).permute(0, 2, 1, 3)
        return (m.o(y.reshape(n, seq, heads * d)) + x) / 1.0

    width = heads * d
    parts = dict(q=nn.Linear(width, width, bias=False), o=nn.Linear(width, width))
    parts |= dict(k=nn.Linear(768, width, bias=False), v=nn.Linear(768, width, bias=False))
    return Called(forward, **parts), (features(n, seq, width), torch.randn(n, words, 768))


@problem("transformers BloomAttention: ALiBi by baddbmm, fused heads, residual", TEXT, FEW)
def bloom_attention(n, seq, heads, d):
    def forward(m, x, alibi, mask):
        q, k, v = m.qkv(x).view(n, seq, heads, 3, d).unbind(-2)
        q = q.transpose(1, 2).reshape(n * heads, seq, d)
        k = k.permute(0, 2, 3, 1).reshape(n * heads, d, seq)
        v = v.transpose(1, 2).reshape(n * heads, seq, d)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=1 / math.sqrt(d))
        scores = scores.view(n, heads, seq, seq) + mask
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        y = torch.bmm(probs.view(n * heads, seq, seq), v).view(n, heads, seq, d)
        return x + F.dropout(m.o(joined(y)), 0.0, m.training)

    width = heads * d
    slopes = 2.0 ** -torch.linspace(1, 8, heads).repeat(n)
    alibi = slopes[:, None, None] * torch.arange(seq)
    mask = torch.zeros(1, 1, seq, seq).masked_fill(~causal(seq), torch.finfo(torch.bfloat16).min)
    parts = dict(qkv=nn.Linear(width, 3 * width), o=nn.Linear(width, width))
    return Called(forward, **parts), (features(n, seq, width), alibi, mask)


def turned_pairs(x):
    """Each even value and its odd neighbour, turned by a right angle."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@problem(
    "transformers GPT-J: rotary of interleaved pairs in a part of each head, scores in fp32",
    dict(n=8, seq=512, heads=4, d=256),
    FEW,
)
def gptj_attention(n, seq, heads, d):
    part = d // 4

    def rotary(x, sin, cos):
        sin, cos = (y[None, :, None].repeat_interleave(2, 3) for y in (sin, cos))
        turn, rest = x[..., :part], x[..., part:]
        return torch.cat((turn * cos + turned_pairs(turn) * sin, rest), dim=-1)

    def forward(m, x, sin, cos, keep):
        h = m.norm(x)
        q, k, v = (project(h).view(n, seq, heads, d) for project in (m.q, m.k, m.v))
        q, k = (rotary(y, sin, cos).permute(0, 2, 1, 3) for y in (q, k))
        scores = q.to(torch.float32) @ k.to(torch.float32).transpose(-1, -2)
        scores = torch.where(keep, scores, torch.full([], LEAST, device=x.device)) / m.scale
        probs = F.softmax(scores, dim=-1).to(v.dtype)
        y = (probs @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3).reshape(n, seq, heads * d)
        return m.o(y) + m.down(F.gelu(m.up(h), approximate="tanh")) + x

    width = heads * d
    parts = dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))
    module = Called(forward, **projections(width, False), **parts, norm=nn.LayerNorm(width))
    module.scale = math.sqrt(d)
    turns = torch.outer(torch.arange(float(seq)), 10000 ** -(torch.arange(0.0, part, 2) / part))
    return module, (features(n, seq, width), turns.sin(), turns.cos(), causal(seq)[None, None])


@problem("Meta's llama/model.py: rotary by complex numbers, type_as", TEXT, FEW)
def complex_rotary_attention(n, seq, heads, d):
    def rotary(x, turns):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)

    def forward(m, x, turns, mask):
        q, k, v = (project(x).view(n, seq, heads, d) for project in (m.q, m.k, m.v))
        q, k = rotary(q, turns).transpose(1, 2), rotary(k, turns).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(d)
        scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
        y = torch.matmul(scores, v.transpose(1, 2))
        return m.o(y.transpose(1, 2).contiguous().view(n, seq, -1))

    phases = torch.outer(torch.arange(float(seq)), 10000 ** -(torch.arange(0.0, d, 2) / d))
    mask = torch.full((seq, seq), float("-inf")).triu(1)
    return Called(forward, **projections(heads * d, False)), (
        features(n, seq, heads * d),
        torch.polar(torch.ones_like(phases), phases),
        mask,
    )


@problem(
    "transformers DebertaV2: scores of contents and of relative positions, gathered",
    dict(n=8, seq=256, heads=12, d=64),
    FEW,
)
def disentangled_attention(n, seq, heads, d):
    span = seq // 2

    def to_batch(x):
        return x.view(x.shape[0], x.shape[1], heads, -1).permute(0, 2, 1, 3).flatten(0, 1)

    def forward(m, x, mask):
        q, k, v = to_batch(m.q(x)), to_batch(m.k(x)), to_batch(m.v(x))
        scale = math.sqrt(d * 3)
        scores = torch.bmm(q, k.transpose(-1, -2) / scale)
        places = m.norm_places(m.places)[None]
        pos_k, pos_q = (to_batch(f(places)).repeat(n, 1, 1) for f in (m.k, m.q))
        at = m.at.expand(n * heads, seq, seq)
        scores = scores + torch.gather(torch.bmm(q, pos_k.transpose(-1, -2)), -1, at) / scale
        back = torch.bmm(k, pos_q.transpose(-1, -2))
        at = (2 * span - 1 - m.at).expand(n * heads, seq, seq)
        scores = scores + torch.gather(back, -1, at).transpose(-1, -2) / scale
        scores = scores.view(n, heads, seq, seq).masked_fill(~mask, torch.finfo(x.dtype).min)
        probs = torch.softmax(scores, -1).view(n * heads, seq, seq)
        y = torch.bmm(probs, v).view(n, heads, seq, d)
        return m.norm(m.o(joined(y)) + x)

    width = heads * d
    places = torch.arange(seq)
    norms = dict(norm=nn.LayerNorm(width, 1e-7), norm_places=nn.LayerNorm(width, 1e-7))
    table = nn.Parameter(torch.randn(2 * span, width))
    module = Called(forward, **projections(width), **norms, places=table)
    far = (places[:, None] - places[None] + span).clamp(0, 2 * span - 1)
    module.register_buffer("at", far[None])
    lengths = torch.linspace(seq, seq // 2, n).long()
    keep = places[None] < lengths[:, None]
    both = keep[:, None, None] & keep[:, None, :, None]
    return module, (features(n, seq, width), both | torch.eye(seq, dtype=torch.bool))


@problem(
    "transformers gpt-oss: a sink beside the scores, a window, dropped after softmax",
    TEXT,
    FEW,
)
def attention_with_sinks(n, seq, heads, d):
    groups, window = 2, max(2, seq // 4)

    def forward(m, x, cos, sin, mask):
        q = rotated(split(m.q(x), heads), cos, sin)
        k, v = (split(project(x), heads // groups) for project in (m.k, m.v))
        k, v = (y.repeat_interleave(groups, dim=1) for y in (rotated(k, cos, sin), v))
        scores = torch.matmul(q, k.transpose(2, 3)) * d**-0.5 + mask
        sinks = m.sinks.reshape(1, -1, 1, 1).expand(n, -1, seq, -1)
        scores = torch.cat([scores, sinks], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        probs = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
        return x + m.o(joined(torch.matmul(probs, v)))

    width = heads * d
    parts = dict(q=nn.Linear(width, width), o=nn.Linear(width, width))
    parts |= {name: nn.Linear(width, width // groups) for name in "kv"}
    places = torch.arange(seq)
    far = places[:, None] - places[None]
    mask = torch.zeros(1, 1, seq, seq).masked_fill((far < 0) | (far >= window), -1e30)
    return Called(forward, **parts, sinks=nn.Parameter(torch.randn(heads))), (
        features(n, seq, width),
        *angles(seq, d),
        mask,
    )


@problem("transformers Gemma2 eager attention: tanh of the scores, written out", TEXT, FEW)
def capped_attention(n, seq, heads, d):
    def forward(m, x, mask):
        q, k, v = (split(project(x), heads) for project in (m.q, m.k, m.v))
        scores = torch.matmul(q, k.transpose(2, 3)) * 224**-0.5
        scores = torch.tanh(scores / 50.0) * 50.0 + mask[:, :, :, :seq]
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        probs = F.dropout(probs, p=0.0, training=m.training)
        return m.o(torch.matmul(probs, v).transpose(1, 2).contiguous().reshape(n, seq, -1))

    mask = torch.full((seq, seq), torch.finfo(torch.bfloat16).min).triu(1)[None, None]
    return Called(forward, **projections(heads * d, False)), (features(n, seq, heads * d), mask)


@problem("Differential Transformer: one softmax less another, norm of each head", TEXT, FEW, BOTH)
def differential_attention(n, seq, heads, d):
    initial = 0.8 - 0.6 * math.exp(-0.3 * 3)

    def forward(m, x, keep):
        q, k = (f(x).view(n, seq, 2 * heads, d // 2).transpose(1, 2) for f in (m.q, m.k))
        v = m.v(x).view(n, seq, heads, d).transpose(1, 2)
        scores = torch.matmul(q * (d // 2) ** -0.5, k.transpose(-1, -2))
        scores = torch.nan_to_num(scores) + torch.zeros_like(keep, dtype=q.dtype).masked_fill(
            ~keep, float("-inf")
        )
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
        one = torch.exp(torch.sum(m.q1 * m.k1, dim=-1).float()).type_as(q)
        two = torch.exp(torch.sum(m.q2 * m.k2, dim=-1).float()).type_as(q)
        probs = probs.view(n, heads, 2, seq, seq)
        probs = probs[:, :, 0] - (one - two + initial) * probs[:, :, 1]
        y = m.norm(torch.matmul(probs, v)) * (1 - initial)
        return m.o(y.transpose(1, 2).reshape(n, seq, heads * d))

    lambdas = {name: nn.Parameter(torch.randn(d // 2) * 0.1) for name in ("q1", "k1", "q2", "k2")}
    parts = projections(heads * d, False) | dict(norm=RMSNorm(d))
    return Called(forward, **parts, **lambdas), (features(n, seq, heads * d), causal(seq))


@problem(
    "DeepSeek-V2: latent keys and values with a norm, one rotary key for all heads",
    dict(n=4, seq=512, heads=16, d=128),
    dict(n=2, seq=8, heads=2, d=16),
)
def latent_attention(n, seq, heads, d):
    width, rank, turn = heads * d // 2, 2 * d, d // 2

    def forward(m, x, cos, sin, mask):
        q = m.q_up(m.q_norm(m.q_down(x))).view(n, seq, heads, d + turn).transpose(1, 2)
        q, q_turn = torch.split(q, [d, turn], dim=-1)
        latent, k_turn = torch.split(m.kv_down(x), [rank, turn], dim=-1)
        k, v = m.kv_up(m.kv_norm(latent)).view(n, seq, heads, 2 * d).transpose(1, 2).split(d, -1)
        k_turn = rotated(k_turn.view(n, seq, 1, turn).transpose(1, 2), cos, sin)
        q = torch.cat((q, rotated(q_turn, cos, sin)), dim=-1)
        k = torch.cat((k, k_turn.expand(-1, heads, -1, -1)), dim=-1)
        scores = torch.matmul(q, k.transpose(2, 3)) * (d + turn) ** -0.5 + mask
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return m.o(joined(torch.matmul(probs, v)))

    sizes = dict(q_down=(width, rank), q_up=(rank, heads * (d + turn)), o=(heads * d, width))
    sizes |= dict(kv_down=(width, rank + turn), kv_up=(rank, 2 * heads * d))
    parts = {name: nn.Linear(a, b, bias=False) for name, (a, b) in sizes.items()}
    norms = dict(q_norm=RMSNorm(rank), kv_norm=RMSNorm(rank))
    mask = torch.full((seq, seq), float("-inf")).triu(1)
    return Called(forward, **parts, **norms), (features(n, seq, width), *angles(seq, turn), mask)


@problem(
    "Transformer-XL / conformer: relative positions by shifted scores, two biases",
    dict(n=8, seq=400, heads=8, d=64),
    FEW,
)
def relative_shift_attention(n, seq, heads, d):
    def shifted(x):
        zeros = torch.zeros((*x.shape[:3], 1), device=x.device, dtype=x.dtype)
        padded = torch.cat([zeros, x], dim=-1).view(n, heads, x.shape[3] + 1, x.shape[2])
        return padded[:, :, 1:].view_as(x)[:, :, :, :seq]

    def forward(m, x, places, hidden):
        h = m.norm(x)
        q = m.q(h).view(n, seq, heads, d)
        k, v = split(m.k(h), heads), split(m.v(h), heads)
        p = m.p(places).view(1, -1, heads, d).transpose(1, 2)
        content = torch.matmul((q + m.bias_u).transpose(1, 2), k.transpose(-2, -1))
        position = shifted(torch.matmul((q + m.bias_v).transpose(1, 2), p.transpose(-2, -1)))
        scores = (content + position) / math.sqrt(d)
        scores = scores.masked_fill(hidden[:, None, None], -10000.0)
        probs = torch.softmax(scores, dim=-1).masked_fill(hidden[:, None, None], 0.0)
        return x + m.o(joined(torch.matmul(probs, v)))

    width = heads * d
    parts = projections(width) | dict(norm=nn.LayerNorm(width), p=nn.Linear(width, width, False))
    biases = {name: nn.Parameter(torch.randn(heads, d) * 0.1) for name in ("bias_u", "bias_v")}
    lengths = torch.linspace(seq, seq // 2, n).long()
    hidden = torch.arange(seq)[None] >= lengths[:, None]
    return Called(forward, **parts, **biases), (
        features(n, seq, width),
        torch.randn(2 * seq - 1, width),
        hidden,
    )


@problem(
    "transformers' packed sequences: documents end where positions begin anew, two layers, SDPA",
    dict(n=2, seq=4096, heads=16, d=128),
    FEW,
)
def packed_sequences(n, seq, heads, d):
    def forward(m, x, positions):
        number = (positions.diff(prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        places = torch.arange(seq, device=x.device)
        mask = places[:, None] >= places
        mask = mask & (number[:, None, :, None] == number[:, None, None, :])
        for qkv, out in zip(m.qkv, m.out, strict=True):
            q, k, v = (split(y, heads) for y in qkv(x).chunk(3, dim=-1))
            x = x + out(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return x

    width = heads * d
    qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(2))
    out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
    lengths = (seq // 2, seq // 8, seq // 4, seq - seq // 2 - seq // 8 - seq // 4)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(n, 1)
    return Called(forward, qkv=qkv, out=out), (features(n, seq, width), positions)


@problem(
    "segment ids of packed examples as in T5X: both ways, by hand, softmax in fp32",
    dict(n=8, seq=2048, heads=12, d=64),
    FEW,
)
def segment_ids(n, seq, heads, d):
    def forward(m, x, segments):
        q, k, v = (split(y, heads) for y in m.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) * d**-0.5
        mask = (segments.unsqueeze(1) == segments.unsqueeze(2)).unsqueeze(1)
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores.float(), dim=-1).to(v.dtype)
        return m.out(joined(weights @ v))

    parts = dict(qkv=nn.Linear(heads * d, 3 * heads * d), out=nn.Linear(heads * d, heads * d))
    segments = (torch.arange(seq) * 6 // seq + 1).repeat(n, 1)
    return Called(forward, **parts), (features(n, seq, heads * d), segments)
