"""Time series and speech: convolutions in time, gates, recurrences of a few steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.encoders import Attention, mlp
from benchmarks.foreign_code.problems import ALL, Called, features, problem

SPEECH, FEW = dict(n=64, seq=1000, width=256), dict(n=2, seq=9, width=16)


@problem(
    "TCN residual block: dilated causal convolutions",
    dict(n=64, c=64, length=4096),
    dict(n=2, c=8, length=32),
    ALL,
)
def tcn_block(n, c, length):
    def forward(m, x):
        y = F.relu(m.conv1(F.pad(x, (8, 0))))
        return F.relu(F.relu(m.conv2(F.pad(y, (8, 0)))) + x)

    convs = dict(conv1=nn.Conv1d(c, c, 3, dilation=4), conv2=nn.Conv1d(c, c, 3, dilation=4))
    return Called(forward, **convs), (features(n, c, length),)


@problem(
    "N-BEATS generic blocks", dict(n=8192, length=512, width=512), dict(n=4, length=12, width=16)
)
def nbeats_blocks(n, length, width):
    def forward(m, x):
        forecast = 0.0
        for body, back, ahead in m.blocks:
            h = body(x)
            x, forecast = x - back(h), forecast + ahead(h)
        return forecast

    def block():
        body = nn.Linear(length, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.ModuleList(
            (nn.Sequential(*body), nn.Linear(width, length), nn.Linear(width, length // 4))
        )

    blocks = nn.ModuleList(block() for _ in range(3))
    return Called(forward, blocks=blocks), (torch.randn(n, length),)


class GatedResidual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.gate, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + F.glu(self.gate(self.second(F.elu(self.first(x)))), dim=-1))


@problem(
    "Temporal Fusion Transformer: gated residual network", dict(n=256, seq=192, width=256), FEW, ALL
)
def temporal_fusion_gate(n, seq, width):
    return nn.Sequential(GatedResidual(width), GatedResidual(width)), (features(n, seq, width),)


@problem(
    "PatchTST: instance norm of a series, patches, a layer",
    dict(n=512, seq=512, width=128),
    dict(n=2, seq=64, width=16),
)
def patch_time_series(n, seq, width):
    def forward(m, x):
        mean = x.mean(1, keepdim=True).detach()
        std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
        y = m.patch(((x - mean) / std).unfold(1, 16, 8))
        y = m.norm1(y + m.attention(y))
        y = m.norm2(y + m.mlp(y))
        return m.head(y.flatten(1)) * std + mean

    parts = dict(patch=nn.Linear(16, width), attention=Attention(width), mlp=mlp(width))
    norms = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width))
    head = nn.Linear(((seq - 16) // 8 + 1) * width, 96)
    return Called(forward, **parts, **norms, head=head), (torch.randn(n, seq),)


@problem("conformer convolution module", SPEECH, FEW, ALL)
def conformer_convolution(n, seq, width):
    def forward(m, x):
        y = F.glu(m.first(m.norm(x).transpose(1, 2)), dim=1)
        y = m.last(F.silu(m.batch_norm(m.depthwise(y))))
        return x + y.transpose(1, 2)

    depthwise = nn.Conv1d(width, width, 31, padding=15, groups=width)
    parts = dict(first=nn.Conv1d(width, 2 * width, 1), depthwise=depthwise)
    parts |= dict(last=nn.Conv1d(width, width, 1), norm=nn.LayerNorm(width))
    return Called(forward, **parts, batch_norm=nn.BatchNorm1d(width)), (features(n, seq, width),)


@problem("conformer feed-forward at half weight, twice, and its norm", SPEECH, FEW)
def conformer_feed_forward(n, seq, width):
    def forward(m, x):
        x = x + 0.5 * m.mlp1(m.norm1(x))
        return m.norm3(x + 0.5 * m.mlp2(m.norm2(x)))

    norms = {name: nn.LayerNorm(width) for name in ("norm1", "norm2", "norm3")}
    parts = dict(mlp1=mlp(width, nn.SiLU()), mlp2=mlp(width, nn.SiLU()))
    return Called(forward, **norms, **parts), (features(n, seq, width),)


@problem("squeezeformer block: norms last, scale and bias in front", SPEECH, FEW)
def squeezeformer_block(n, seq, width):
    def forward(m, x):
        x = m.norm1(x + m.attention(x * m.scale1 + m.bias1))
        return m.norm2(x + m.mlp(x * m.scale2 + m.bias2))

    norms = {name: nn.LayerNorm(width) for name in ("norm1", "norm2")}
    names = "scale1", "bias1", "scale2", "bias2"
    vectors = {name: nn.Parameter(torch.rand(width)) for name in names}
    parts = dict(attention=Attention(width), mlp=mlp(width, nn.SiLU()))
    return Called(forward, **norms, **parts, **vectors), (features(n, seq, width),)


@problem(
    "HiFi-GAN residual block: leaky relu and dilated convolutions",
    dict(n=16, c=128, length=8192),
    dict(n=2, c=8, length=40),
)
def vocoder_block(n, c, length):
    def forward(m, x):
        for first, second in m.convs:
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x

    def pair(dilation):
        first = nn.Conv1d(c, c, 3, dilation=dilation, padding=dilation)
        return nn.ModuleList((first, nn.Conv1d(c, c, 3, padding=1)))

    return Called(forward, convs=nn.ModuleList(pair(d) for d in (1, 3, 5))), (
        features(n, c, length),
    )


@problem(
    "WaveNet layer: tanh and sigmoid gates, skip",
    dict(n=16, c=128, length=8192),
    dict(n=2, c=8, length=40),
)
def wavenet_layer(n, c, length):
    def forward(m, x):
        y = torch.tanh(m.filter(x)) * torch.sigmoid(m.gate(x))
        return x + m.residual(y), m.skip(y)

    parts = {k: nn.Conv1d(c, c, 3, dilation=2, padding=2) for k in ("filter", "gate")}
    parts |= {k: nn.Conv1d(c, c, 1) for k in ("residual", "skip")}
    return Called(forward, **parts), (features(n, c, length),)


@problem(
    "log-mel front end: power, filters, log, mean and variance",
    dict(n=64, frames=1500, bins=201),
    dict(n=2, frames=10, bins=13),
    "infer f32, train f32",
)
def log_mel(n, frames, bins):
    def forward(m, real, imaginary):
        power = real.square() + imaginary.square()
        y = torch.log(power @ m.filters + 1e-6)
        return (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-5)

    filters = nn.Parameter(torch.rand(bins, 80))
    return Called(forward, filters=filters), (features(n, frames, bins), features(n, frames, bins))


@problem("layer-normalised GRU cell, four steps", dict(n=16384, width=256), dict(n=3, width=8))
def layer_norm_gru(n, width):
    def forward(m, x, h):
        for step in x.unbind(1):
            reset, update, fresh = m.norm_x(m.x(step)).chunk(3, -1)
            r, u, f = m.norm_h(m.h(h)).chunk(3, -1)
            u = torch.sigmoid(update + u)
            h = (1 - u) * torch.tanh(fresh + torch.sigmoid(reset + r) * f) + u * h
        return h

    parts = dict(x=nn.Linear(width, 3 * width), h=nn.Linear(width, 3 * width))
    norms = dict(norm_x=nn.LayerNorm(3 * width), norm_h=nn.LayerNorm(3 * width))
    return Called(forward, **parts, **norms), (features(n, 4, width), features(n, width))
