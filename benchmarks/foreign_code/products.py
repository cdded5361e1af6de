"""Matrix products and what follows them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import ALL, Called, features, problem

WIDE, FEW = dict(rows=8192, n=4096), dict(rows=6, n=16)
MIDDLE = dict(rows=32768, n=1024)


@problem("KernelBench level 2 style: linear → gelu → softmax", WIDE, FEW)
def linear_gelu_softmax(rows, n):
    return nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.Softmax(dim=1)), (features(rows, n),)


@problem("KernelBench level 2 style: matmul → scale → residual → batch_norm", MIDDLE, FEW, ALL)
def matmul_scale_residual_batch_norm(rows, n):
    def forward(m, x):
        y = m.linear(x)
        return m.norm(y * 0.5 + y)

    parts = dict(linear=nn.Linear(n, n), norm=nn.BatchNorm1d(n))
    return Called(forward, **parts), (features(rows, n),)


@problem("KernelBench level 2 style: matmul → scale → clamp → logsumexp → mish", WIDE, FEW)
def matmul_scale_logsumexp_mish(rows, n):
    def forward(m, x):
        y = torch.clamp(m.linear(x) * 2.0 + 1.0, -10.0, 10.0)
        y = torch.logsumexp(y, dim=1, keepdim=True)
        return y * F.mish(y)

    return Called(forward, linear=nn.Linear(n, n)), (features(rows, n),)


@problem(
    "projection heads of vision-language models: linear → layer_norm → gelu",
    dict(rows=16384, k=1024, n=4096),
    dict(rows=8, k=16, n=32),
)
def linear_layer_norm_gelu(rows, k, n):
    return nn.Sequential(nn.Linear(k, n), nn.LayerNorm(n), nn.GELU()), (features(rows, k),)


@problem("KernelBench level 2 style: linear → swish → + bias → group_norm", MIDDLE, FEW)
def linear_swish_group_norm(rows, n):
    def forward(m, x):
        y = m.linear(x)
        return m.norm(torch.sigmoid(y) * y + m.bias)

    parts = dict(linear=nn.Linear(n, n), norm=nn.GroupNorm(8, n), bias=nn.Parameter(torch.ones(n)))
    return Called(forward, **parts), (features(rows, n),)


@problem("KernelBench level 2 style: linear → group_norm → hardtanh", MIDDLE, FEW)
def linear_group_norm_hardtanh(rows, n):
    return nn.Sequential(nn.Linear(n, n), nn.GroupNorm(8, n), nn.Hardtanh()), (features(rows, n),)


@problem("KernelBench level 2 style: linear → batch_norm → gelu → relu", MIDDLE, FEW)
def linear_batch_norm_gelu_relu(rows, n):
    parts = nn.Linear(n, n), nn.BatchNorm1d(n), nn.GELU(), nn.ReLU()
    return nn.Sequential(*parts), (features(rows, n),)


@problem("KernelBench level 2 style: linear → sum → logsumexp", WIDE, FEW, "infer bf16")
def linear_sum_logsumexp(rows, n):
    def forward(m, x):
        y = torch.sum(m.linear(x), dim=1, keepdim=True)
        return torch.logsumexp(torch.logsumexp(y, dim=1, keepdim=True), dim=1, keepdim=True)

    return Called(forward, linear=nn.Linear(n, n)), (features(rows, n),)


@problem("KernelBench level 2 style: linear → instance norm of rows → sum → product", MIDDLE, FEW)
def linear_instance_norm_product(rows, n):
    def forward(m, x, y):
        z = m.norm(m.linear(x)[:, None, None])[:, 0, 0]
        return (z + y) * y

    parts = dict(linear=nn.Linear(n, n), norm=Called(rows_normed))
    return Called(forward, **parts), (features(rows, n), features(rows, n))


def rows_normed(m, x):
    mean = x.mean(dim=(2, 3), keepdim=True)
    var = x.var(dim=(2, 3), keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(var + 1e-5)


@problem("KernelBench level 3 style: deep narrow MLP with relu", dict(rows=32768, n=1024), FEW)
def deep_mlp(rows, n):
    layers = [layer for _ in range(6) for layer in (nn.Linear(n, n), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(n, n)), (features(rows, n),)


@problem("MLP-Mixer block", dict(n=64, tokens=196, width=768), dict(n=2, tokens=6, width=16))
def mixer_block(n, tokens, width):
    def forward(m, x):
        x = x + m.tokens(m.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + m.channels(m.norm2(x))

    def mlp(inner, outer):
        return nn.Sequential(nn.Linear(outer, inner), nn.GELU(), nn.Linear(inner, outer))

    parts = dict(tokens=mlp(2 * tokens, tokens), channels=mlp(4 * width, width))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    return Called(forward, **parts, **norms), (features(n, tokens, width),)
