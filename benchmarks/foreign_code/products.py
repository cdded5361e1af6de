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


@problem(
    "KernelBench level 2 style: gemm → group_norm → smallest of a row → + bias",
    dict(n=8192, width=2048),
    dict(n=6, width=32),
)
def linear_group_norm_min(n, width):
    def forward(m, x):
        y = m.norm(m.linear(x))
        return torch.min(y, dim=1, keepdim=True)[0] + m.bias

    parts = dict(linear=nn.Linear(width, width), norm=nn.GroupNorm(min(width // 4, 256), width))
    return Called(forward, **parts, bias=nn.Parameter(torch.randn(1, 1))), (features(n, width),)


@problem(
    "KernelBench level 2 style: matmul → avg_pool → gelu → scale → max of a row",
    dict(n=8192, width=2048),
    dict(n=6, width=32),
)
def linear_pool_gelu_max(n, width):
    def forward(m, x):
        y = F.avg_pool1d(m.linear(x).unsqueeze(1), 16).squeeze(1)
        return torch.max(F.gelu(y) * 2.0, dim=1).values

    return Called(forward, linear=nn.Linear(width, width)), (features(n, width),)


@problem(
    "KernelBench level 2 style: gemm → sigmoid → sum; a second one → softmax of logsumexp",
    dict(n=16384, width=1000),
    dict(n=6, width=33),
)
def linear_sigmoid_sums(n, width):
    def forward(m, x):
        y = torch.sigmoid(m.first(x))
        total = y.sum(dim=1, keepdim=True)
        y = m.second(y)
        return total * torch.softmax(y - torch.logsumexp(y, dim=1, keepdim=True), dim=1)

    parts = dict(first=nn.Linear(width, 2 * width), second=nn.Linear(2 * width, width))
    return Called(forward, **parts), (features(n, width),)


@problem(
    "gMLP: spatial gating, a norm of one half, a product along tokens with a bias of ones",
    dict(n=64, seq=197, width=768),
    dict(n=2, seq=7, width=16),
)
def spatial_gating(n, seq, width):
    def forward(m, x):
        u, v = F.gelu(m.up(m.norm(x))).chunk(2, dim=-1)
        v = m.tokens(m.gate_norm(v).transpose(-1, -2))
        return x + m.down(u * v.transpose(-1, -2))

    tokens = nn.Linear(seq, seq)
    nn.init.ones_(tokens.bias)
    parts = dict(up=nn.Linear(width, 4 * width), down=nn.Linear(2 * width, width), tokens=tokens)
    return Called(forward, **parts, norm=nn.LayerNorm(width), gate_norm=nn.LayerNorm(2 * width)), (
        features(n, seq, width),
    )


@problem(
    "ResMLP: affine layers for norms, products along tokens, layer scale",
    dict(n=64, seq=196, width=384),
    dict(n=2, seq=6, width=16),
)
def affine_mlp_block(n, seq, width):
    def forward(m, x):
        y = torch.addcmul(m.beta1, m.alpha1, x)
        x = x + m.scale1 * m.tokens(y.transpose(1, 2)).transpose(1, 2)
        y = torch.addcmul(m.beta2, m.alpha2, x)
        return x + m.scale2 * m.down(F.gelu(m.up(y)))

    vectors = {f"alpha{i}": nn.Parameter(torch.ones(1, 1, width)) for i in (1, 2)}
    vectors |= {f"beta{i}": nn.Parameter(torch.zeros(1, 1, width)) for i in (1, 2)}
    vectors |= {f"scale{i}": nn.Parameter(torch.full((width,), 0.1)) for i in (1, 2)}
    parts = dict(up=nn.Linear(width, 4 * width), down=nn.Linear(4 * width, width))
    return Called(forward, **vectors, **parts, tokens=nn.Linear(seq, seq)), (
        features(n, seq, width),
    )
