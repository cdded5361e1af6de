"""Transformer layers that look at all tokens: encoders for text, images and speech."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import ALL, Called, features, problem

TEXT, FEW = dict(n=32, seq=512, width=768), dict(n=2, seq=8, width=32)


def heads_of(width: int) -> int:
    return max(2, width // 64)


def split(x, heads: int):
    """[n, seq, width] -> [n, heads, seq, d]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with one projection for q, k and v; bias is added to the scores."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads_of(width), dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None, causal: bool = False):
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
        return self.out(a.transpose(1, 2).flatten(2))


def mlp(width: int, act: nn.Module | None = None, inner: int | None = None) -> nn.Sequential:
    inner = inner or 4 * width
    return nn.Sequential(nn.Linear(width, inner), act or nn.GELU(), nn.Linear(inner, width))


@problem("torch.nn.TransformerEncoderLayer, norms last", TEXT, FEW, ALL)
def encoder_layer_post_norm(n, seq, width):
    def forward(m, x):
        x = m.norm1(x + m.attention(x))
        return m.norm2(x + m.mlp(x))

    parts = dict(attention=Attention(width), mlp=mlp(width, nn.ReLU()))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms), (features(n, seq, width),)


@problem("torch.nn.TransformerEncoderLayer, norms first", TEXT, FEW)
def encoder_layer_pre_norm(n, seq, width):
    return encoder_layer_of(width), (features(n, seq, width),)


@problem("torch.nn.TransformerEncoderLayer, src_key_padding_mask of full texts", TEXT, FEW)
def encoder_layer_of_full_texts(n, seq, width):
    mask = padding(torch.full((n,), seq), seq)
    return encoder_layer_of(width), (features(n, seq, width), mask)


def encoder_layer_of(width: int) -> Called:
    def forward(m, x, mask=None):
        keep = None if mask is None else mask[:, None, None, :].bool()
        x = x + m.attention(m.norm1(x), keep)
        return x + m.mlp(m.norm2(x))

    parts = dict(attention=Attention(width), mlp=mlp(width))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms)


def padding(lengths, seq: int):
    """1 for the tokens of each text, and 0 for what fills it up to the longest one."""
    return (torch.arange(seq)[None] < lengths[:, None]).long()


@problem("torch.nn.TransformerEncoderLayer with dropout", TEXT, FEW, "train bf16", random=True)
def encoder_layer_dropout(n, seq, width):
    def forward(m, x):
        x = m.norm1(x + F.dropout(m.attention(x), 0.1, m.training))
        return m.norm2(x + F.dropout(m.mlp(x), 0.1, m.training))

    parts = dict(attention=Attention(width, 0.1), mlp=mlp(width, nn.ReLU()))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms), (features(n, seq, width),)


@problem("transformers BertLayer with a padding mask", TEXT, FEW, ALL)
def bert_layer(n, seq, width):
    module, x = bert_layer_of(width), features(n, seq, width)
    return module, (x, padding(torch.linspace(seq, seq / 2, n).long(), seq))


@problem("transformers BertLayer, texts of one length: the mask keeps everything", TEXT, FEW)
def bert_layer_of_full_texts(n, seq, width):
    module, x = bert_layer_of(width), features(n, seq, width)
    return module, (x, padding(torch.full((n,), seq), seq))


def bert_layer_of(width: int) -> Called:
    heads = heads_of(width)

    def forward(m, x, mask):
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        q, k, v = (split(project(x), heads) for project in (m.q, m.k, m.v))
        scores = q @ k.transpose(-1, -2) / (width // heads) ** 0.5 + bias
        context = (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(x.shape)
        x = m.norm1(m.out(context) + x)
        return m.norm2(m.mlp(x) + x)

    parts = {name: nn.Linear(width, width) for name in ("q", "k", "v", "out")}
    norms = dict(norm1=nn.LayerNorm(width, eps=1e-12), norm2=nn.LayerNorm(width, eps=1e-12))
    return Called(forward, **parts, **norms, mlp=mlp(width))


@problem("transformers BertEmbeddings", dict(n=128, seq=512, width=768), FEW)
def bert_embeddings(n, seq, width):
    def forward(m, ids, kinds):
        places = torch.arange(ids.shape[1], device=ids.device)
        return m.norm(m.words(ids) + m.kinds(kinds) + m.places(places))

    sizes = dict(words=30522, kinds=2, places=512)
    parts = {name: nn.Embedding(size, width) for name, size in sizes.items()}
    ids, kinds = torch.randint(30522, (n, seq)), torch.randint(2, (n, seq))
    return Called(forward, **parts, norm=nn.LayerNorm(width)), (ids, kinds)


@problem("transformers BertLMPredictionHead with its loss", dict(n=16, seq=512, width=768), FEW)
def masked_language_head(n, seq, width):
    def forward(m, x, labels):
        logits = m.decoder(m.norm(F.gelu(m.dense(x))))
        return F.cross_entropy(logits.view(-1, 30522), labels.view(-1))

    parts = dict(dense=nn.Linear(width, width), norm=nn.LayerNorm(width))
    labels = torch.where(torch.rand(n, seq) < 0.15, torch.randint(30522, (n, seq)), -100)
    parts["decoder"] = nn.Linear(width, 30522)
    return Called(forward, **parts), (features(n, seq, width), labels)


class T5Bias(nn.Module):
    """Relative position buckets, as T5 computes them."""

    def __init__(self, heads: int):
        super().__init__()
        self.table = nn.Embedding(32, heads)

    def forward(self, seq: int, device):
        places = torch.arange(seq, device=device)
        distance = places[None, :] - places[:, None]
        side, far = (distance > 0).long() * 16, distance.abs()
        large = 8 + (torch.log(far.float() / 8 + 1e-6) / 2.772588722239781 * 8).long()
        bucket = side + torch.where(far < 8, far, large.clamp(max=15))
        return self.table(bucket).permute(2, 0, 1)[None]


@problem("transformers T5 encoder layer with relative bias", TEXT, FEW)
def t5_layer(n, seq, width):
    heads = heads_of(width)

    def norm(x, weight):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + 1e-6)).to(weight.dtype)

    def forward(m, x):
        q, k, v = (split(y, heads) for y in m.qkv(norm(x, m.weight1)).chunk(3, -1))
        scores = q @ k.transpose(3, 2) + m.bias(x.shape[1], x.device)
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        x = x + m.out((weights @ v).transpose(1, 2).flatten(2))
        h = norm(x, m.weight2)
        return x + m.wo(F.gelu(m.wi0(h), approximate="tanh") * m.wi1(h))

    sizes = dict(qkv=(1, 3), out=(1, 1), wi0=(1, 4), wi1=(1, 4), wo=(4, 1))
    parts = {k: nn.Linear(a * width, b * width, bias=False) for k, (a, b) in sizes.items()}
    vectors = {name: nn.Parameter(torch.ones(width)) for name in ("weight1", "weight2")}
    return Called(forward, **parts, **vectors, bias=T5Bias(heads)), (features(n, seq, width),)


@problem(
    "timm ViT-B/16: patches and two blocks",
    dict(n=64, side=224, width=768),
    dict(n=2, side=32, width=32),
)
def vit(n, side, width):
    def forward(m, x):
        x = m.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((m.token.expand(len(x), -1, -1), x), dim=1) + m.places
        for norm1, attention, norm2, inner in m.blocks:
            x = x + attention(norm1(x))
            x = x + inner(norm2(x))
        return m.head(m.norm(x)[:, 0])

    def block():
        return nn.LayerNorm(width), Attention(width), nn.LayerNorm(width), mlp(width)

    parts = dict(patch=nn.Conv2d(3, width, 16, 16), head=nn.Linear(width, 1000))
    parts["blocks"] = nn.ModuleList(nn.ModuleList(block()) for _ in range(2))
    vectors = dict(token=nn.Parameter(torch.zeros(1, 1, width)))
    vectors["places"] = nn.Parameter(torch.randn(1, (side // 16) ** 2 + 1, width))
    return Called(forward, **parts, **vectors, norm=nn.LayerNorm(width)), (
        torch.randn(n, 3, side, side),
    )


@problem("timm CaiT / BEiT style block: layer scale", TEXT, FEW)
def layer_scale_block(n, seq, width):
    def forward(m, x):
        x = x + m.gamma1 * m.attention(m.norm1(x))
        return x + m.gamma2 * m.mlp(m.norm2(x))

    parts = dict(attention=Attention(width), mlp=mlp(width))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    scales = {name: nn.Parameter(torch.full((width,), 0.1)) for name in ("gamma1", "gamma2")}
    return Called(forward, **parts, **norms, **scales), (features(n, seq, width),)


@problem(
    "Swin Transformer: attention in shifted windows",
    dict(n=32, side=56, width=96),
    dict(n=2, side=14, width=32),
)
def swin_window_attention(n, side, width):
    window, heads, tokens = 7, heads_of(2 * width), 49

    def forward(m, x):
        y = torch.roll(m.norm(x), (-3, -3), (1, 2)).unflatten(1, (-1, window))
        y = y.unflatten(3, (-1, window)).transpose(2, 3).reshape(-1, tokens, width)
        q, k, v = (split(z, heads) for z in m.qkv(y).chunk(3, -1))
        scores = q * (width // heads) ** -0.5 @ k.transpose(-2, -1)
        scores = scores + m.table[m.index].view(tokens, tokens, heads).permute(2, 0, 1)[None]
        scores = scores.view(n, -1, heads, tokens, tokens) + m.mask[None, :, None]
        y = torch.softmax(scores, dim=-1).view(-1, heads, tokens, tokens) @ v
        y = m.out(y.transpose(1, 2).reshape(-1, tokens, width))
        y = y.view(n, side // window, side // window, window, window, width)
        return x + torch.roll(y.transpose(2, 3).reshape(x.shape), (3, 3), (1, 2))

    region = torch.zeros(side, side)
    for i, rows in enumerate((slice(0, -7), slice(-7, -3), slice(-3, None))):
        for j, columns in enumerate((slice(0, -7), slice(-7, -3), slice(-3, None))):
            region[rows, columns] = 3 * i + j
    region = region.unflatten(0, (-1, window)).unflatten(2, (-1, window)).transpose(1, 2)
    region = region.reshape(-1, tokens)
    other = region[:, None] != region[:, :, None]
    module = Called(
        forward,
        norm=nn.LayerNorm(width),
        qkv=nn.Linear(width, 3 * width),
        out=nn.Linear(width, width),
        table=nn.Parameter(torch.randn(169, heads)),
    )
    module.register_buffer("index", torch.randint(169, (tokens * tokens,)))
    module.register_buffer("mask", other * -100.0)
    return module, (features(n, side, side, width),)


@problem(
    "transformers Whisper encoder: convolutions and a layer",
    dict(n=16, frames=3000, width=384),
    dict(n=2, frames=24, width=32),
)
def whisper_encoder(n, frames, width):
    def forward(m, x):
        x = F.gelu(m.conv2(F.gelu(m.conv1(x)))).transpose(1, 2) + m.places
        x = x + m.attention(m.norm1(x))
        return m.norm3(x + m.mlp(m.norm2(x)))

    conv2 = nn.Conv1d(width, width, 3, 2, 1)
    parts = dict(conv1=nn.Conv1d(80, width, 3, padding=1), conv2=conv2, mlp=mlp(width))
    norms = {name: nn.LayerNorm(width) for name in ("norm1", "norm2", "norm3")}
    places = nn.Parameter(torch.randn(frames // 2, width))
    return Called(forward, **parts, **norms, attention=Attention(width), places=places), (
        torch.randn(n, 80, frames),
    )


@problem(
    "transformers DeBERTa / ELECTRA style classifier head", dict(n=512, seq=256, width=768), FEW
)
def pooled_classifier(n, seq, width):
    def forward(m, x, mask):
        weights = mask[..., None].to(x.dtype)
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return F.normalize(m.out(F.gelu(m.dense(pooled))), p=2, dim=1)

    parts = dict(dense=nn.Linear(width, width), out=nn.Linear(width, width))
    return Called(forward, **parts), (features(n, seq, width), (torch.rand(n, seq) < 0.7).long())
