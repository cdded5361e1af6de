"""Training with weights in fp32 under autocast to bf16, as most training scripts have it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.diffusion import FEW_MAPS, MAPS, ResnetBlock
from benchmarks.foreign_code.problems import Called, features, problem

TEXT, FEW = dict(b=8, s=1024, width=768, heads=12, v=50304), dict(b=2, s=9, width=16, heads=2, v=30)
TRAINS = "train f32"


def under_autocast(x):
    return torch.autocast(x.device.type, torch.bfloat16)


def heads_of(x, count, heads):
    b, s, _ = x.shape
    return x.view(b, s, count, heads, -1).permute(2, 0, 3, 1, 4)


@problem("nanoGPT without flash attention: a block, the head, and its loss", TEXT, FEW, TRAINS)
def nano_gpt_under_autocast(b, s, width, heads, v):
    def forward(m, x, y):
        with under_autocast(x):
            q, k, value = heads_of(m.attn(m.norm1(x)), 3, heads)
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(m.mask[:, :, :s, :s] == 0, float("-inf"))
            attended = F.softmax(scores, dim=-1) @ value
            x = x + m.proj(attended.transpose(1, 2).reshape(b, s, width))
            x = x + m.down(F.gelu(m.up(m.norm2(x))))
            logits = m.head(m.norm3(x))
            return F.cross_entropy(logits.view(-1, v), y.view(-1), ignore_index=-1)

    parts = dict(attn=nn.Linear(width, 3 * width), proj=nn.Linear(width, width))
    parts |= dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))
    norms = {f"norm{i}": nn.LayerNorm(width) for i in (1, 2, 3)}
    module = Called(forward, **parts, **norms, head=nn.Linear(width, v, bias=False))
    module.register_buffer("mask", torch.tril(torch.ones(s, s)).view(1, 1, s, s))
    return module, (features(b, s, width), torch.randint(v, (b, s)))


@problem(
    "T5's encoder: attention with a learned bias in place of a scale, RMS norm in fp32",
    TEXT | dict(s=512, b=16),
    FEW,
    TRAINS,
)
def t5_under_autocast(b, s, width, heads, v):
    def norm(x, weight):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + 1e-6))

    def forward(m, x):
        with under_autocast(x):
            q, k, value = heads_of(m.qkv(norm(x, m.weight)), 3, heads)
            scores = torch.matmul(q, k.transpose(3, 2)) + m.bias
            weights = F.softmax(scores.float(), dim=-1).type_as(scores)
            attended = torch.matmul(weights, value).transpose(1, 2).reshape(b, s, width)
            x = x + m.out(attended)
            return x + m.down(F.relu(m.up(norm(x, m.weight))))

    parts = dict(qkv=nn.Linear(width, 3 * width, bias=False), out=nn.Linear(width, width))
    parts |= dict(up=nn.Linear(width, 4 * width, bias=False), down=nn.Linear(4 * width, width))
    module = Called(forward, **parts)
    module.weight = nn.Parameter(torch.ones(width))
    module.bias = nn.Parameter(torch.randn(1, heads, s, s))
    return module, (features(b, s, width),)


@problem(
    "a ViT with attention by hand, mean of the tokens, and label smoothing",
    dict(b=64, s=197, width=768, heads=12, v=1000),
    FEW,
    TRAINS,
)
def vit_under_autocast(b, s, width, heads, v):
    def forward(m, x, y):
        with under_autocast(x):
            q, k, value = heads_of(m.qkv(m.norm1(x)), 3, heads)
            weights = (q * (width // heads) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
            x = x + m.proj((weights @ value).transpose(1, 2).reshape(b, s, width))
            x = x + m.down(F.gelu(m.up(m.norm2(x))))
            return F.cross_entropy(m.head(x.mean(dim=1)), y, label_smoothing=0.1)

    parts = dict(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width))
    parts |= dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width), head=nn.Linear(width, v))
    return Called(forward, **parts, **norms), (features(b, s, width), torch.randint(v, (b,)))


@problem("PPO on a language model: log-probabilities of tokens and their ratio", TEXT, FEW, TRAINS)
def ratio_under_autocast(b, s, width, heads, v):
    def forward(m, x, tokens, before, advantage):
        with under_autocast(x):
            logp = F.log_softmax(m.head(x), dim=-1)
            logp = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            ratio = torch.exp(logp - before)
            clipped = torch.clamp(ratio, 0.8, 1.2)
            return -torch.min(ratio * advantage, clipped * advantage).mean()

    module = Called(forward, head=nn.Linear(width, v, bias=False))
    before = torch.full((b, s), -math.log(v))
    inputs = features(b, s, width), torch.randint(v, (b, s)), before, torch.randn(b, s)
    return module, inputs


def diffusion(n, c, side, layout):
    block = ResnetBlock(c, 4 * c).to(memory_format=layout)

    def forward(m, x, time, noise):
        with under_autocast(x):
            return F.mse_loss(m.block(x, time).float(), noise)

    x, noise = (features(n, c, side, side).to(memory_format=layout) for _ in range(2))
    return Called(forward, block=block), (x, features(n, 4 * c), noise)


@problem("diffusers ResnetBlock2D in a training script", MAPS, FEW_MAPS, TRAINS)
def diffusion_under_autocast(n, c, side):
    return diffusion(n, c, side, torch.contiguous_format)


@problem("diffusers ResnetBlock2D in a training script, channels-last", MAPS, FEW_MAPS, TRAINS)
def diffusion_channels_last_under_autocast(n, c, side):
    return diffusion(n, c, side, torch.channels_last)


@problem("a GPT-2 block with dropout, under autocast", TEXT, FEW, TRAINS, random=True)
def gpt2_under_autocast(b, s, width, heads, v):
    def forward(m, x, y):
        with under_autocast(x):
            q, k, value = heads_of(m.attn(m.norm1(x)), 3, heads)
            attended = F.scaled_dot_product_attention(q, k, value, is_causal=True)
            attended = m.proj(attended.transpose(1, 2).reshape(b, s, width))
            x = x + F.dropout(attended, 0.1, m.training)
            fed = m.down(F.gelu(m.up(m.norm2(x)), approximate="tanh"))
            x = x + F.dropout(fed, 0.1, m.training)
            return F.mse_loss(m.norm3(x), y)

    parts = dict(attn=nn.Linear(width, 3 * width), proj=nn.Linear(width, width))
    parts |= dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))
    norms = {f"norm{i}": nn.LayerNorm(width) for i in (1, 2, 3)}
    return Called(forward, **parts, **norms), (features(b, s, width), features(b, s, width))
