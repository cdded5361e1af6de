"""Operators alone or with one neighbour, often in fp32 and of odd sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import (
    ALL,
    BOTH_F32,
    INFERENCE,
    Called,
    features,
    problem,
)

ROWS, FEW = dict(rows=8192, n=16384), dict(rows=6, n=40)
MAPS, SMALL_MAPS = dict(n=128, channels=64, side=112), dict(n=2, channels=8, side=6)
F32 = "infer f32"


@problem("KernelBench level 1 style: rms norm over channels", MAPS, SMALL_MAPS, BOTH_F32)
def rms_norm_over_channels(n, channels, side):
    def norm(m, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)

    return Called(norm), (features(n, channels, side, side),)


@problem("torch.nn.RMSNorm at an odd width", dict(rows=32768, n=3001), dict(rows=5, n=19), ALL)
def rms_norm_odd(rows, n):
    return nn.RMSNorm(n), (features(rows, n),)


@problem("torch.nn.LayerNorm at an odd width", dict(rows=32768, n=2999), dict(rows=5, n=19), ALL)
def layer_norm_odd(rows, n):
    return nn.LayerNorm(n), (features(rows, n),)


@problem(
    "KernelBench level 1 style: layer norm of whole images",
    dict(n=32, channels=64, side=256),
    dict(n=2, channels=4, side=6),
    BOTH_F32,
)
def layer_norm_of_images(n, channels, side):
    return nn.LayerNorm((channels, side, side)), (features(n, channels, side, side),)


@problem("KernelBench level 1 style: instance norm", MAPS, SMALL_MAPS, BOTH_F32)
def instance_norm(n, channels, side):
    return nn.InstanceNorm2d(channels), (features(n, channels, side, side),)


@problem("KernelBench level 1 style: group norm", MAPS, SMALL_MAPS, ALL)
def group_norm(n, channels, side):
    return nn.GroupNorm(8, channels), (features(n, channels, side, side),)


@problem("KernelBench level 1 style: batch norm", MAPS, SMALL_MAPS, ALL)
def batch_norm(n, channels, side):
    return nn.BatchNorm2d(channels), (features(n, channels, side, side),)


@problem("KernelBench level 1 style: division by the Frobenius norm", MAPS, SMALL_MAPS, F32)
def frobenius_norm(n, channels, side):
    return Called(lambda m, x: x / torch.norm(x, p="fro")), (features(n, channels, side, side),)


@problem("KernelBench level 1 style: l1 norm of rows", ROWS, FEW, INFERENCE)
def l1_norm(rows, n):
    return Called(lambda m, x: x / torch.mean(x.abs(), dim=1, keepdim=True)), (features(rows, n),)


@problem("torch.nn.functional.normalize of embeddings", ROWS, FEW, ALL)
def l2_norm(rows, n):
    return Called(lambda m, x: F.normalize(x, dim=-1)), (features(rows, n),)


@problem(
    "KernelBench level 1 style: softmax of long rows",
    dict(rows=512, n=131072),
    dict(rows=3, n=300),
    BOTH_F32,
)
def softmax_long_rows(rows, n):
    return nn.Softmax(dim=1), (features(rows, n),)


@problem("KernelBench level 1 style: log softmax", ROWS, FEW, ALL)
def log_softmax(rows, n):
    return nn.LogSoftmax(dim=1), (features(rows, n),)


@problem("torch.logsumexp over the vocabulary", dict(rows=4096, n=50257), FEW)
def logsumexp_vocabulary(rows, n):
    return Called(lambda m, x: torch.logsumexp(x.float(), dim=-1)), (features(rows, n),)


@problem("KernelBench level 1 style: cumulative sum", ROWS, FEW, F32)
def cumulative_sum(rows, n):
    return Called(lambda m, x: torch.cumsum(x, dim=1)), (features(rows, n),)


@problem("KernelBench level 1 style: masked cumulative sum", dict(rows=16384, n=4096), FEW, F32)
def masked_cumulative_sum(rows, n):
    mask = torch.rand(rows, n) > 0.5
    return Called(lambda m, x, keep: torch.cumsum(x * keep, dim=1)), (features(rows, n), mask)


@problem(
    "KernelBench level 1 style: smallest and largest value along the middle dimension",
    dict(n=64, rows=1024, columns=2048),
    dict(n=2, rows=5, columns=7),
    INFERENCE,
)
def smallest_and_largest(n, rows, columns):
    return Called(lambda m, x: (x.amin(dim=1), x.amax(dim=1))), (features(n, rows, columns),)


@problem("KernelBench level 1 style: argmax of rows", ROWS, FEW, INFERENCE)
def argmax_of_rows(rows, n):
    return Called(lambda m, x: torch.argmax(x, dim=-1)), (features(rows, n),)


@problem("KernelBench level 1 style: swish, written out", ROWS, FEW)
def swish(rows, n):
    return Called(lambda m, x: x * torch.sigmoid(x)), (features(rows, n),)


@problem("KernelBench level 1 style: mish and hardtanh", ROWS, FEW)
def mish_hardtanh(rows, n):
    return nn.Sequential(nn.Mish(), nn.Hardtanh()), (features(rows, n),)


@problem("minGPT style: gelu by its tanh formula", ROWS, FEW, ALL)
def gelu_by_formula(rows, n):
    def gelu(m, x):
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))

    return Called(gelu), (features(rows, n),)


@problem("torch.nn activations in a row: softplus, elu, selu, hardsigmoid", ROWS, FEW)
def activations_in_a_row(rows, n):
    parts = nn.Softplus(), nn.ELU(), nn.SELU(), nn.Hardsigmoid()
    return nn.Sequential(*parts), (features(rows, n),)


@problem("fairseq style: layer norm of a residual sum that nobody else reads", ROWS, FEW, ALL)
def layer_norm_of_a_sum(rows, n):
    add = Called(lambda m, x, y: m.norm(x + y), norm=nn.LayerNorm(n))
    return add, (features(rows, n), features(rows, n))


@problem("Gemma style: rms norm of a residual sum that nobody else reads", ROWS, FEW)
def rms_norm_of_a_sum(rows, n):
    add = Called(lambda m, x, y: m.norm(x + y), norm=nn.RMSNorm(n, eps=1e-6))
    return add, (features(rows, n), features(rows, n))


@problem(
    "torch.nn.LayerNorm, small and in fp32",
    dict(rows=65536, n=256),
    dict(rows=6, n=16),
    BOTH_F32,
)
def layer_norm_small(rows, n):
    parts = nn.Linear(n, n), nn.LayerNorm(n), nn.Linear(n, n)
    return nn.Sequential(*parts), (features(rows, n),)


@problem(
    "attention scores: scale, mask and softmax, written out",
    dict(n=16, heads=16, seq=1024),
    dict(n=2, heads=2, seq=8),
)
def masked_softmax(n, heads, seq):
    def scores(m, x, mask):
        return torch.softmax((x * 0.125).masked_fill(mask, float("-inf")), dim=-1)

    mask = torch.triu(torch.ones(seq, seq, dtype=torch.bool), 1)
    return Called(scores), (features(n, heads, seq, seq), mask)
