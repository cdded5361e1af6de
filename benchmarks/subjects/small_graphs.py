"""Graphs whose kernels take less time than the host needs to launch them.

Each function takes tensors; `inputs` makes them. The rows are as many as the kernels of large
tensors are chosen for, and so few that a GPU is done with each before the host has launched the
next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, WIDTH, NORMS = 1024, 512, 8


class SmallGraph(NamedTuple):
    """A function, and the shapes of its arguments in bf16; with classes, labels come last."""

    fn: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    classes: int = 0

    def inputs(self, device: torch.device, train: bool) -> list[Tensor]:
        random = torch.Generator(device).manual_seed(0)
        made = [
            torch.randn(shape, generator=random, device=device).bfloat16().requires_grad_(train)
            for shape in self.shapes
        ]
        if self.classes:
            rows = self.shapes[0][:1]
            made.append(torch.randint(self.classes, rows, generator=random, device=device))
        return made


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def add_rms_norm(x, y, weight):
    h = x + y
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def softmax(x):
    return torch.softmax(x, -1)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def windowed_attention(q, k, v):
    i = torch.arange(q.shape[-2], device=q.device)
    apart = i[:, None] - i
    out = F.scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart < 64))
    return out.transpose(1, 2).flatten(2)


def group_norm(x, weight, bias):
    return F.group_norm(x, 8, weight, bias)


def linear_gelu(x, matrix, bias):
    return F.gelu(F.linear(x, matrix, bias))


def norms_and_linears(x, *weights):
    for norm, bias, matrix in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        x = F.linear(F.layer_norm(x, x.shape[-1:], norm, bias), matrix)
    return x


def mlp(x, w1, b1, w2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2)


def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


HEADS = (2, 4, 256, 64)
WIDE, OUT = (4096, 1024), (1024, 4096)
SMALL_GRAPHS = {
    "layer_norm": SmallGraph(layer_norm, ((ROWS, WIDTH), (WIDTH,), (WIDTH,))),
    "rms_norm": SmallGraph(rms_norm, ((ROWS, WIDTH), (WIDTH,))),
    "add_rms_norm": SmallGraph(add_rms_norm, ((ROWS, WIDTH), (ROWS, WIDTH), (WIDTH,))),
    "softmax": SmallGraph(softmax, ((ROWS, WIDTH),)),
    "cross_entropy": SmallGraph(cross_entropy, ((256, 4096),), classes=4096),
    "attention": SmallGraph(windowed_attention, (HEADS, HEADS, HEADS)),
    "group_norm": SmallGraph(group_norm, ((8, 64, 16, 16), (64,), (64,))),
    "linear_gelu": SmallGraph(linear_gelu, ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH,))),
    "eight norms": SmallGraph(
        norms_and_linears, ((ROWS, WIDTH), *((WIDTH,), (WIDTH,), (WIDTH, WIDTH)) * NORMS)
    ),
}
# Not small: blocks whose kernels Inductor cannot write into its code, for the host's time of these.
BLOCKS = {
    "mlp": SmallGraph(mlp, ((8192, 1024), WIDE, (4096,), OUT)),
    "gated_mlp": SmallGraph(gated_mlp, ((8192, 1024), WIDE, WIDE, OUT)),
}
