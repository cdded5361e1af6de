"""Layers of language models that look at earlier tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.encoders import Attention, heads_of, mlp, split
from benchmarks.foreign_code.problems import ALL, Called, features, problem

TEXT, FEW = dict(n=8, seq=1024, width=1024), dict(n=2, seq=8, width=32)


class RMSNorm(nn.Module):
    """As transformers writes it: in fp32, with a cast in front of the weight or after it."""

    def __init__(self, width: int, plus_one: bool = False):
        super().__init__()
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.zeros(width) if plus_one else torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.plus_one:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


def rotated(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def angles(seq: int, d: int):
    """cos and sin of the positions, [seq, d] each."""
    turns = torch.outer(torch.arange(float(seq)), 10000 ** -(torch.arange(0.0, d, 2) / d))
    both = torch.cat((turns, turns), dim=-1)
    return both.cos(), both.sin()


def repeated(x, times: int):
    n, heads, seq, d = x.shape
    return x[:, :, None].expand(n, heads, times, seq, d).reshape(n, heads * times, seq, d)


class RotaryAttention(nn.Module):
    """A query head for each head of keys and values, or several of them."""

    def __init__(self, width: int, groups: int = 1, normed: bool = False):
        super().__init__()
        self.heads, self.groups = heads_of(width), groups
        narrow = width // groups
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        d = width // self.heads
        self.norms = nn.ModuleList(RMSNorm(d) if normed else nn.Identity() for _ in range(2))

    def forward(self, x, cos, sin):
        q = rotated(self.norms[0](split(self.q(x), self.heads)), cos, sin)
        k = rotated(self.norms[1](split(self.k(x), self.heads // self.groups)), cos, sin)
        v = split(self.v(x), self.heads // self.groups)
        k, v = repeated(k, self.groups), repeated(v, self.groups)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(a.transpose(1, 2).reshape(x.shape))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int, act=F.silu):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(inner, width, bias=False), act

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, inner: nn.Module, norm1: nn.Module, norm2: nn.Module):
        super().__init__()
        self.attention, self.mlp, self.norm1, self.norm2 = attention, inner, norm1, norm2

    def forward(self, x, *positions):
        x = x + self.attention(self.norm1(x), *positions)
        return x + self.mlp(self.norm2(x))


@problem("transformers Llama decoder layer", TEXT, FEW, ALL)
def llama_layer(n, seq, width):
    norms = RMSNorm(width), RMSNorm(width)
    layer = Layer(RotaryAttention(width), GatedMLP(width, 11 * width // 4), *norms)
    return layer, (features(n, seq, width), *angles(seq, width // heads_of(width)))


@problem("transformers Qwen3 layer: norms of queries and keys, grouped heads", TEXT, FEW)
def qwen3_layer(n, seq, width):
    norms = RMSNorm(width), RMSNorm(width)
    layer = Layer(RotaryAttention(width, 2, True), GatedMLP(width, 3 * width), *norms)
    return layer, (features(n, seq, width), *angles(seq, width // heads_of(width)))


@problem("transformers Gemma2 layer: 1 + weight, four norms, tanh gelu", TEXT, FEW)
def gemma_layer(n, seq, width):
    def forward(m, x, cos, sin):
        x = x + m.norm2(m.attention(m.norm1(x), cos, sin))
        return x + m.norm4(m.mlp(m.norm3(x)))

    norms = {f"norm{i}": RMSNorm(width, True) for i in range(1, 5)}
    inner = GatedMLP(width, 3 * width, lambda x: F.gelu(x, approximate="tanh"))
    layer = Called(forward, **norms, attention=RotaryAttention(width), mlp=inner)
    return layer, (features(n, seq, width), *angles(seq, width // heads_of(width)))


@problem(
    "lit-gpt style: rms norm, one gated product, tied head and loss",
    dict(n=4, seq=1024, width=1024, words=32000),
    dict(n=2, seq=8, width=32, words=50),
)
def llama_head(n, seq, width, words):
    def forward(m, x, labels):
        logits = m.head(m.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    head = nn.Linear(width, words, bias=False)
    return Called(forward, norm=RMSNorm(width), head=head), (
        features(n, seq, width),
        torch.randint(words, (n, seq)),
    )


class Causal(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.inner = Attention(width, dropout)

    def forward(self, x):
        return self.inner(x, causal=True)


def new_gelu():
    return nn.GELU(approximate="tanh")


@problem("nanoGPT block", TEXT, FEW)
def gpt2_block(n, seq, width):
    norms = nn.LayerNorm(width), nn.LayerNorm(width)
    return Layer(Causal(width), mlp(width, new_gelu()), *norms), (features(n, seq, width),)


@problem("transformers GPT2Block with dropout", TEXT, FEW, "train bf16", random=True)
def gpt2_block_dropout(n, seq, width):
    attention = nn.Sequential(Causal(width, 0.1), nn.Dropout(0.1))
    inner = nn.Sequential(mlp(width, new_gelu()), nn.Dropout(0.1))
    norms = nn.LayerNorm(width), nn.LayerNorm(width)
    return Layer(attention, inner, *norms), (features(n, seq, width),)


@problem("transformers GPT-NeoX layer: attention and MLP side by side", TEXT, FEW)
def parallel_block(n, seq, width):
    def forward(m, x):
        return x + m.attention(m.norm1(x)) + m.mlp(m.norm2(x))

    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **norms, attention=Causal(width), mlp=mlp(width)), (
        features(n, seq, width),
    )


@problem("transformers OPT / minGPT attention, written out with a mask", TEXT, FEW)
def written_out_attention(n, seq, width):
    heads = heads_of(width)

    def forward(m, x):
        q, k, v = (split(y, heads) for y in m.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * (width // heads) ** -0.5
        scores = scores.masked_fill(m.tril[:seq, :seq] == 0, float("-inf"))
        return m.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(x.shape))

    module = Called(forward, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))
    module.register_buffer("tril", torch.tril(torch.ones(seq, seq)))
    return module, (features(n, seq, width),)


@problem("BLOOM / MPT attention: ALiBi", TEXT, FEW)
def alibi_attention(n, seq, width):
    heads = heads_of(width)

    def forward(m, x):
        q, k, v = (split(y, heads) for y in m.qkv(x).chunk(3, -1))
        places = torch.arange(seq, device=x.device)
        distance = (places[None, :] - places[:, None]).to(x.dtype)
        bias = m.slopes[:, None, None] * distance
        bias = bias.masked_fill(places[None, :] > places[:, None], float("-inf"))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return m.out(a.transpose(1, 2).flatten(2))

    module = Called(forward, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))
    module.register_buffer("slopes", 2.0 ** -torch.linspace(1, 8, heads))
    return module, (features(n, seq, width),)


@problem(
    "Mixtral router: top-2 of softmax, load balancing",
    dict(tokens=131072, width=1024),
    dict(tokens=12, width=32),
)
def moe_router(tokens, width):
    def forward(m, x):
        weights = F.softmax(m.gate(x), dim=1, dtype=torch.float)
        top, chosen = torch.topk(weights, 2, dim=-1)
        share = F.one_hot(chosen, 8).float().mean(dim=(0, 1))
        balance = 8 * (share * weights.mean(0)).sum()
        return (top / top.sum(dim=-1, keepdim=True)).to(x.dtype), balance

    return Called(forward, gate=nn.Linear(width, 8, bias=False)), (features(tokens, width),)


@problem(
    "Mamba block: short convolution, gate and gated norm", dict(n=8, seq=2048, width=2048), FEW
)
def mamba_gating(n, seq, width):
    def forward(m, x):
        y, z = m.inside(m.norm(x)).chunk(2, dim=-1)
        y = F.silu(m.conv(y.transpose(1, 2))[..., :seq].transpose(1, 2))
        dt = F.softplus(m.dt(y) + m.dt_bias)
        return x + m.outside(m.gated(y * dt * F.silu(z)))

    parts = dict(inside=nn.Linear(width, 2 * width, bias=False), dt=nn.Linear(width, width))
    parts |= dict(conv=nn.Conv1d(width, width, 4, padding=3, groups=width))
    parts |= dict(norm=RMSNorm(width), gated=RMSNorm(width))
    parts |= dict(outside=nn.Linear(width, width, bias=False))
    return Called(forward, **parts, dt_bias=nn.Parameter(torch.zeros(width))), (
        features(n, seq, width),
    )


@problem("RWKV channel mixing: token shift, squared relu, sigmoid gate", TEXT, FEW)
def rwkv_channel_mixing(n, seq, width):
    def forward(m, x):
        last = F.pad(x, (0, 0, 1, -1))
        k, r = (x * mix + last * (1 - mix) for mix in (m.mix_k, m.mix_r))
        return torch.sigmoid(m.receptance(r)) * m.value(torch.square(torch.relu(m.key(k))))

    sizes = dict(key=(1, 4), value=(4, 1), receptance=(1, 1))
    parts = {k: nn.Linear(a * width, b * width, bias=False) for k, (a, b) in sizes.items()}
    mixes = {name: nn.Parameter(torch.rand(width)) for name in ("mix_k", "mix_r")}
    return Called(forward, **parts, **mixes), (features(n, seq, width),)


@problem("T5 / BART decoder: cross attention with layer norms last", TEXT, FEW)
def cross_attention_decoder(n, seq, width):
    heads = heads_of(width)

    def forward(m, x, memory):
        q = split(m.q(x), heads)
        k, v = (split(y, heads) for y in m.kv(memory).chunk(2, -1))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = m.norm1(x + m.out(a))
        return m.norm2(x + m.mlp(x))

    parts = dict(q=nn.Linear(width, width), kv=nn.Linear(width, 2 * width))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms, out=nn.Linear(width, width), mlp=mlp(width)), (
        features(n, seq, width),
        features(n, seq // 2, width),
    )
