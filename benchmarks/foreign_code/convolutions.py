"""Convolutions and what follows them: norms, activations, sums, poolings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import (
    BOTH_F32,
    INFERENCE,
    Called,
    features,
    problem,
)

IMAGES, FEW = dict(n=128, c=64, side=64), dict(n=2, c=8, side=8)
VOLUMES, SMALL = dict(n=16, c=32, side=32), dict(n=2, c=8, side=4)
THREE = "infer f32, infer bf16, train bf16"


@problem("KernelBench level 2 style: conv2d → batch_norm → relu → add", IMAGES, FEW, THREE)
def conv_batch_norm_relu_add(n, c, side):
    def forward(m, x):
        return F.relu(m.norm(m.conv(x))) + x

    parts = dict(conv=nn.Conv2d(c, c, 3, padding=1, bias=False), norm=nn.BatchNorm2d(c))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → instance_norm → divide", IMAGES, FEW, INFERENCE)
def conv_instance_norm_divide(n, c, side):
    def forward(m, x):
        return m.norm(m.conv(x)) / 2.0

    parts = dict(conv=nn.Conv2d(c, 2 * c, 3), norm=nn.InstanceNorm2d(2 * c))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → gelu → global average pooling", IMAGES, FEW, THREE)
def conv_gelu_pool(n, c, side):
    def forward(m, x):
        return F.adaptive_avg_pool2d(F.gelu(m.conv(x)), 1).squeeze(-1).squeeze(-1)

    return Called(forward, conv=nn.Conv2d(c, 2 * c, 3)), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → mish → mish", IMAGES, FEW)
def conv_mish_mish(n, c, side):
    parts = nn.Conv2d(c, 2 * c, 3), nn.Mish(), nn.Mish()
    return nn.Sequential(*parts), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → + bias → scale → sigmoid → group_norm", IMAGES, FEW)
def conv_bias_scale_sigmoid_group_norm(n, c, side):
    def forward(m, x):
        return m.norm(torch.sigmoid((m.conv(x) + m.bias) * m.scale))

    parts = dict(conv=nn.Conv2d(c, 2 * c, 3), norm=nn.GroupNorm(8, 2 * c))
    vectors = dict(bias=nn.Parameter(torch.randn(2 * c, 1, 1)), scale=nn.Parameter(torch.ones(1)))
    return Called(forward, **parts, **vectors), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → group_norm → scale → max_pool → clamp", IMAGES, FEW)
def conv_group_norm_max_pool_clamp(n, c, side):
    def forward(m, x):
        return torch.clamp(F.max_pool2d(m.norm(m.conv(x)) * m.scale, 2), 0.0, 1.0)

    parts = dict(conv=nn.Conv2d(c, 2 * c, 3), norm=nn.GroupNorm(4, 2 * c))
    scale = nn.Parameter(torch.ones(2 * c, 1, 1))
    return Called(forward, **parts, scale=scale), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → smallest channel → tanh → tanh", IMAGES, FEW)
def conv_min_tanh_tanh(n, c, side):
    def forward(m, x):
        return torch.tanh(torch.tanh(torch.min(m.conv(x), dim=1, keepdim=True)[0]))

    return Called(forward, conv=nn.Conv2d(c, 2 * c, 3)), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv2d → leaky relu → batch_norm → residual", IMAGES, FEW)
def conv_leaky_relu_batch_norm(n, c, side):
    def forward(m, x):
        return x + m.norm(F.leaky_relu(m.conv(x), 0.1))

    parts = dict(conv=nn.Conv2d(c, c, 3, padding=1), norm=nn.BatchNorm2d(c))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("KernelBench level 2 style: conv_transpose2d → gelu → group_norm", IMAGES, FEW, THREE)
def transposed_conv_gelu_group_norm(n, c, side):
    parts = nn.ConvTranspose2d(c, c, 4, stride=2), nn.GELU(), nn.GroupNorm(8, c)
    return nn.Sequential(*parts), (features(n, c, side // 2, side // 2),)


@problem("speech vocoder style: transposed convolutions with gelu between them", IMAGES, FEW)
def transposed_convs_gelu(n, c, side):
    up = nn.ConvTranspose2d(c, 2 * c, 4, stride=2), nn.GELU()
    return nn.Sequential(*up, nn.ConvTranspose2d(2 * c, c, 4, stride=2), nn.GELU()), (
        features(n, c, side // 4, side // 4),
    )


@problem(
    "KernelBench level 2 style: conv_transpose2d → softmax over channels → scale → sigmoid",
    IMAGES,
    FEW,
)
def transposed_conv_softmax_sigmoid(n, c, side):
    def forward(m, x):
        return torch.sigmoid((torch.softmax(m.conv(x), dim=1) + m.bias) * 2.0)

    parts = dict(conv=nn.ConvTranspose2d(c, c, 4, stride=2, padding=1))
    bias = nn.Parameter(torch.randn(c, 1, 1))
    return Called(forward, **parts, bias=bias), (features(n, c, side // 2, side // 2),)


@problem(
    "KernelBench level 2 style: conv_transpose3d → + weight → layer_norm → avg_pool → gelu",
    VOLUMES,
    SMALL,
    BOTH_F32,
)
def transposed_conv3d_layer_norm_gelu(n, c, side):
    def forward(m, x):
        y = m.norm(m.conv(x) + m.shift)
        return F.gelu(F.avg_pool3d(y, 2))

    conv = nn.ConvTranspose3d(c, 2 * c, 4, stride=2, padding=1)
    parts = dict(conv=conv, norm=nn.LayerNorm(2 * side), shift=nn.Parameter(torch.ones(1)))
    return Called(forward, **parts), (features(n, c, side, side, side),)


@problem("KernelBench level 2 style: conv3d → group_norm → mean", VOLUMES, SMALL)
def conv3d_group_norm_mean(n, c, side):
    def forward(m, x):
        return m.norm(m.conv(x)).mean(dim=(1, 2, 3, 4))

    parts = dict(conv=nn.Conv3d(c, 2 * c, 3), norm=nn.GroupNorm(8, 2 * c))
    return Called(forward, **parts), (features(n, c, side, side, side),)


@problem("KernelBench level 2 style: conv3d → softmax → two max_pools", VOLUMES, SMALL)
def conv3d_softmax_max_pools(n, c, side):
    parts = nn.Conv3d(c, 2 * c, 3, padding=1), nn.Softmax(dim=1), nn.MaxPool3d(2), nn.MaxPool3d(2)
    return nn.Sequential(*parts), (features(n, c, side, side, side),)


@problem("nnU-Net style: conv3d → instance_norm → leaky relu, twice", VOLUMES, SMALL)
def conv3d_instance_norm(n, c, side):
    def block():
        norm = nn.InstanceNorm3d(c, affine=True)
        return nn.Conv3d(c, c, 3, padding=1, bias=False), norm, nn.LeakyReLU(0.01)

    return nn.Sequential(*block(), *block()), (features(n, c, side, side, side),)


@problem(
    "wav2vec 2.0 feature extractor: conv1d → layer_norm → gelu",
    dict(n=16, c=512, length=8000),
    dict(n=2, c=8, length=40),
)
def conv1d_layer_norm_gelu(n, c, length):
    def forward(m, x):
        for conv, norm in zip(m.convs, m.norms, strict=True):
            x = F.gelu(norm(conv(x).transpose(1, 2)).transpose(1, 2))
        return x

    convs = nn.ModuleList(nn.Conv1d(c, c, 3, stride=2) for _ in range(2))
    norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(2))
    return Called(forward, convs=convs, norms=norms), (features(n, c, length),)


@problem("KernelBench level 2 style: conv2d → subtract → hardswish → max_pool → mish", IMAGES, FEW)
def conv_hardswish_pool_mish(n, c, side):
    def forward(m, x):
        return F.mish(F.max_pool2d(F.hardswish(m.conv(x) - 0.5), 2))

    return Called(forward, conv=nn.Conv2d(c, c, 3)), (features(n, c, side, side),)


@problem(
    "KernelBench level 2 style: conv_transpose2d → + bias → clamp → scale → clamp → divide",
    dict(n=32, c=64, side=64),
    FEW,
)
def transposed_conv_clamps(n, c, side):
    def forward(m, x):
        y = torch.clamp(m.conv(x) + m.bias, min=0.0, max=1.0)
        return torch.clamp(y * 2.0, 0.0, 1.0) / 2.0

    conv = nn.ConvTranspose2d(c, c, 3, stride=2, padding=1, output_padding=1)
    return Called(forward, conv=conv, bias=nn.Parameter(torch.randn(c, 1, 1))), (
        features(n, c, side, side),
    )


@problem(
    "KernelBench level 2 style: conv2d → tanh → scale → + bias → max_pool, channels last",
    IMAGES,
    FEW,
    INFERENCE + ", train bf16",
)
def conv_tanh_bias_pool(n, c, side):
    def forward(m, x):
        y = torch.tanh(m.conv(x.contiguous(memory_format=torch.channels_last))) * 2.0
        return F.max_pool2d(y + m.bias, 4)

    return Called(forward, conv=nn.Conv2d(c, c, 3), bias=nn.Parameter(torch.randn(c, 1, 1))), (
        features(n, c, side, side),
    )


@problem(
    "KernelBench level 2 style: conv_transpose3d → scale → max_pool → mean of all → clamp",
    dict(n=8, c=32, side=24),
    SMALL,
)
def transposed_conv3d_pools(n, c, side):
    def forward(m, x):
        y = F.max_pool3d(m.conv(x) * 0.5, 2)
        return torch.clamp(F.adaptive_avg_pool3d(y, (1, 1, 1)), min=0, max=1)

    return Called(forward, conv=nn.ConvTranspose3d(c, c, 3, stride=2, padding=1)), (
        features(n, c, side, side, side),
    )


@problem(
    "timm GhostNet module: cheap depthwise half, concatenated, hard-sigmoid squeeze-excite",
    dict(n=128, c=80, side=28),
    FEW,
)
def ghost_module(n, c, side):
    def forward(m, x):
        first = F.relu(m.norm1(m.point(x)), inplace=True)
        y = torch.cat([first, F.relu(m.norm2(m.cheap(first)), inplace=True)], dim=1)[:, : 2 * c]
        gate = m.expand(F.relu(m.reduce(F.adaptive_avg_pool2d(y, 1))))
        y = y * F.relu6(gate + 3.0).div_(6.0)
        return m.norm3(m.last(y)) + x

    convs = dict(point=nn.Conv2d(c, c, 1, bias=False), last=nn.Conv2d(2 * c, c, 1, bias=False))
    convs |= dict(cheap=nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False))
    convs |= dict(reduce=nn.Conv2d(2 * c, c // 4, 1), expand=nn.Conv2d(c // 4, 2 * c, 1))
    norms = {f"norm{i}": nn.BatchNorm2d(c) for i in (1, 2, 3)}
    return Called(forward, **convs, **norms), (features(n, c, side, side),)
