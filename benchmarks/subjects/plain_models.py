"""The plain_* of model_zoo.py: four architectures in plain torch, written the way model libraries
write them.

The decoders build their mask in the graph, from positions and comparisons; keys and values are
repeated over the queries of their group; `attention="eager"` writes attention out with its softmax
in fp32, "sdpa" calls torch's. Given labels, a model returns its loss, otherwise logits. No dropout.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that does not count


@dataclasses.dataclass(frozen=True)
class Size:
    """batch and seq are those of the inputs; kv heads, inner (of the MLP) and vocabulary (or
    classes) of the model.
    """

    batch: int
    seq: int
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    kv: int = 0
    patch: int = 16  # pixels, of models of images
    image: int = 224

    @property
    def head(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, seq, heads · d] -> [batch, heads, seq, d]"""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """[batch, kv, seq, d] -> [batch, kv · times, seq, d], each head `times` times in a row."""
    if times == 1:
        return x
    batch, kv, seq, d = x.shape
    return x[:, :, None].expand(batch, kv, times, seq, d).reshape(batch, kv * times, seq, d)


def attend(how: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √d) v with a boolean mask (True: may look), heads side by side: [batch, seq,
    heads · d].
    """
    if how == "eager":
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            zero = torch.zeros((), dtype=q.dtype, device=q.device)
            scores = scores + torch.where(mask, zero, torch.finfo(q.dtype).min)
        out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


def causal_mask(positions: Tensor, keys: int) -> Tensor:
    """[batch, 1, seq, keys]: a query sees keys up to its position, of its own document.

    A document ends where positions do not go on by one, which of positions from arange is never.
    """
    causal = torch.arange(keys, device=positions.device)[None, None, :] <= positions[:, :, None]
    if positions.shape[1] == keys:
        document = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        causal = causal & (document[:, :, None] == document[:, None, :])
    return causal[:, None]


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each token's logits and the next token, in fp32."""
    labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED
    )


# A Llama-like decoder.


def rotate_half(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


class RotaryAttention(nn.Module):
    def __init__(self, size: Size, how: str):
        super().__init__()
        self.size, self.how = size, how
        self.q, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, size.kv * size.head, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past=None) -> Tensor:
        q = split_heads(self.q(x), self.size.heads)
        k, v = (split_heads(project(x), self.size.kv) for project in (self.k, self.v))
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if past is not None:
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(past, (k, v), strict=True))
        times = self.size.heads // self.size.kv
        return self.o(attend(self.how, q, repeat_kv(k, times), repeat_kv(v, times), mask))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    def __init__(self, size: Size, how: str):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(size.width), RMSNorm(size.width)
        self.attention, self.mlp = RotaryAttention(size, how), GatedMLP(size.width, size.inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past=None) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, mask, past)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """forward(ids [batch, seq], labels, past): past holds keys and values [batch, kv, before, d] of
    each layer.
    """

    def __init__(self, size: Size, attention: str = "sdpa"):
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(LlamaLayer(size, attention) for _ in range(size.layers))
        self.norm, self.head = (
            RMSNorm(size.width),
            nn.Linear(size.width, size.vocabulary, bias=False),
        )

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, 1, seq, d], in fp32 until they are done."""
        even = torch.arange(0, self.size.head, 2, device=positions.device, dtype=torch.float32)
        angles = positions[:, :, None].float() * 10000.0 ** (-even / self.size.head)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, past: list | None = None
    ) -> Tensor:
        before = past[0][0].shape[2] if past else 0
        positions = torch.arange(before, before + ids.shape[1], device=ids.device).expand(ids.shape)
        mask = causal_mask(positions, before + ids.shape[1])
        x = self.embedding(ids)
        cos, sin = self.angles(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, past[i] if past else None)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)


# A GPT-2-like decoder.


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) * 0.02),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def gelu_by_tanh(x: Tensor) -> Tensor:
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


class GPT2Layer(nn.Module):
    def __init__(self, size: Size, how: str):
        super().__init__()
        self.size, self.how = size, how
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.o = Conv1D(size.width, 3 * size.width), Conv1D(size.width, size.width)
        self.up, self.down = Conv1D(size.width, size.inner), Conv1D(size.inner, size.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            split_heads(part, self.size.heads)
            for part in self.qkv(self.norm1(x)).split(self.size.width, -1)
        )
        x = x + self.o(attend(self.how, q, k, v, mask))
        return x + self.down(gelu_by_tanh(self.up(self.norm2(x))))


class GPT2(nn.Module):
    """forward(ids [batch, seq], labels); the head's weight is the embedding's."""

    def __init__(self, size: Size, attention: str = "sdpa"):
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(size.vocabulary, size.width),
            nn.Embedding(size.seq, size.width),
        )
        self.layers = nn.ModuleList(GPT2Layer(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        mask = causal_mask(positions, ids.shape[1])
        x = self.embedding(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits if labels is None else next_token_loss(logits, labels)


# Encoders: BERT-like with a padding mask (norms after the residual sums), ViT-like (norms before,
# no mask).


class EncoderLayer(nn.Module):
    def __init__(self, size: Size, how: str, norm_first: bool):
        super().__init__()
        self.size, self.how, self.norm_first = size, how, norm_first
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width) for _ in range(4))
        self.up, self.down = nn.Linear(size.width, size.inner), nn.Linear(size.inner, size.width)

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (split_heads(project(x), self.size.heads) for project in (self.q, self.k, self.v))
        return self.o(attend(self.how, q, k, v, mask))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(self.attention(x, mask) + x)
        return self.norm2(self.mlp(x) + x)


class Bert(nn.Module):
    """forward(ids [batch, seq], real [batch, seq] of 0 and 1, labels): masked words; tied head."""

    def __init__(self, size: Size, attention: str = "sdpa"):
        super().__init__()
        self.embedding, self.positions = (
            nn.Embedding(size.vocabulary, size.width),
            nn.Embedding(size.seq, size.width),
        )
        self.layers = nn.ModuleList(
            EncoderLayer(size, attention, norm_first=False) for _ in range(size.layers)
        )
        self.norm, self.head_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.head, self.bias = (
            nn.Linear(size.width, size.width),
            nn.Parameter(torch.zeros(size.vocabulary)),
        )

    def forward(self, ids: Tensor, real: Tensor, labels: Tensor | None = None) -> Tensor:
        mask = (real != 0)[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        x = self.norm(
            self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        )
        for layer in self.layers:
            x = layer(x, mask)
        logits = F.linear(self.head_norm(F.gelu(self.head(x))), self.embedding.weight, self.bias)
        if labels is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=IGNORED
        )


class ViT(nn.Module):
    """forward(pixels [batch, 3, image, image], labels [batch])"""

    def __init__(self, size: Size, attention: str = "sdpa"):
        super().__init__()
        patches = (size.image // size.patch) ** 2
        self.patches = nn.Conv2d(3, size.width, kernel_size=size.patch, stride=size.patch)
        self.first = nn.Parameter(torch.zeros(1, 1, size.width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, size.width) * 0.02)
        self.layers = nn.ModuleList(
            EncoderLayer(size, attention, norm_first=True) for _ in range(size.layers)
        )
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)[:, 0])
        return logits if labels is None else F.cross_entropy(logits, labels)
