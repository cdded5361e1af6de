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


@problem(
    "Autoformer: moving averages with repeated ends, season and trend, a norm less its mean",
    dict(n=32, seq=336, width=512),
    dict(n=2, seq=30, width=16),
)
def series_decomposition(n, seq, width):
    def decomposed(x):
        front, end = x[:, 0:1, :].repeat(1, 12, 1), x[:, -1:, :].repeat(1, 12, 1)
        mean = F.avg_pool1d(torch.cat([front, x, end], dim=1).permute(0, 2, 1), 25, 1)
        mean = mean.permute(0, 2, 1)
        return x - mean, mean

    def forward(m, x):
        x, trend1 = decomposed(x)
        y = F.gelu(m.conv1(x.transpose(-1, 1)))
        x, trend2 = decomposed(x + m.conv2(y).transpose(-1, 1))
        y = m.norm(x)
        return y - torch.mean(y, dim=1).unsqueeze(1).repeat(1, seq, 1), trend1 + trend2

    convs = dict(conv1=nn.Conv1d(width, 4 * width, 1, bias=False))
    convs |= dict(conv2=nn.Conv1d(4 * width, width, 1, bias=False), norm=nn.LayerNorm(width))
    return Called(forward, **convs), (features(n, seq, width),)


@problem(
    "TSMixer: batch norms over time and channels, products along time, then channels",
    dict(n=256, seq=512, width=64),
    dict(n=2, seq=12, width=8),
    ALL,
)
def time_mixing(n, seq, width):
    def forward(m, x):
        y = m.norm1(x.flatten(1)).view(n, seq, width)
        x = x + F.relu(m.time(y.transpose(1, 2))).transpose(1, 2)
        y = m.norm2(x.reshape(n, -1)).reshape(x.shape)
        x = x + m.down(F.relu(m.up(y)))
        return m.head(x.transpose(1, 2)).transpose(1, 2)

    norms = dict(norm1=nn.BatchNorm1d(seq * width), norm2=nn.BatchNorm1d(seq * width))
    parts = dict(time=nn.Linear(seq, seq), up=nn.Linear(width, 4 * width))
    parts |= dict(down=nn.Linear(4 * width, width), head=nn.Linear(seq, 96))
    return Called(forward, **norms, **parts), (features(n, seq, width),)


@problem(
    "Tacotron 2: attention that looks at where it was, masked softmax of one output",
    dict(n=64, seq=600, width=512),
    dict(n=2, seq=9, width=16),
)
def location_attention(n, seq, width):
    def forward(m, query, memory, weights, hidden):
        places = m.location(m.conv(weights).transpose(1, 2))
        energies = m.v(torch.tanh(m.query(query.unsqueeze(1)) + places + m.memory(memory)))
        energies = energies.squeeze(-1)
        energies = energies.masked_fill(hidden, -float("inf"))
        probs = F.softmax(energies, dim=1)
        return torch.bmm(probs.unsqueeze(1), memory).squeeze(1), probs

    parts = dict(conv=nn.Conv1d(2, 32, 31, padding=15, bias=False))
    parts |= dict(location=nn.Linear(32, 128, bias=False), v=nn.Linear(128, 1, bias=False))
    parts |= dict(query=nn.Linear(2 * width, 128, bias=False))
    parts |= dict(memory=nn.Linear(width, 128, bias=False))
    lengths = torch.linspace(seq, seq // 2, n).long()
    return Called(forward, **parts), (
        features(n, 2 * width),
        features(n, seq, width),
        torch.rand(n, 2, seq),
        torch.arange(seq)[None] >= lengths[:, None],
    )


@problem(
    "wav2vec 2.0 encoder front: weight-normalised positional convolution, gelu, norm of a sum",
    dict(n=16, seq=499, width=768),
    dict(n=2, seq=9, width=32),
)
def positional_convolution(n, seq, width):
    def forward(m, x):
        g, v = m.g, m.v
        w = v * (g / torch.norm(v, 2, dim=(0, 1), keepdim=True))
        y = F.conv1d(x.transpose(1, 2), w, m.bias, padding=64, groups=16)[:, :, :-1]
        x = x + F.gelu(y).transpose(1, 2)
        return F.dropout(m.norm(x), 0.0, m.training)

    learnt = dict(g=nn.Parameter(torch.rand(1, 1, 128)), bias=nn.Parameter(torch.zeros(width)))
    learnt |= dict(v=nn.Parameter(torch.randn(width, width // 16, 128)))
    return Called(forward, **learnt, norm=nn.LayerNorm(width)), (features(n, seq, width),)


@problem(
    "DAC residual unit: snake activations between weight-normalised dilated convolutions",
    dict(n=8, c=256, length=8192),
    dict(n=2, c=8, length=40),
)
def snake_unit(n, c, length):
    def snake(x, alpha):
        shape = x.shape
        x = x.reshape(shape[0], shape[1], -1)
        x = x + (alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)
        return x.reshape(shape)

    def forward(m, x):
        y = m.second(snake(m.first(snake(x, m.alpha1)), m.alpha2))
        pad = (x.shape[-1] - y.shape[-1]) // 2
        return x[..., pad:-pad] + y

    weight_norm = nn.utils.parametrizations.weight_norm
    convs = dict(first=weight_norm(nn.Conv1d(c, c, 7, dilation=3)))
    convs |= dict(second=weight_norm(nn.Conv1d(c, c, 1)))
    alphas = {k: nn.Parameter(torch.rand(1, c, 1) + 0.5) for k in ("alpha1", "alpha2")}
    return Called(forward, **convs, **alphas), (features(n, c, length),)


@problem(
    "ECAPA-TDNN: attentive statistics, mean and deviation beside the features",
    dict(n=64, c=1536, length=300),
    dict(n=2, c=16, length=12),
)
def attentive_statistics(n, c, length):
    def statistics(x, weight):
        mean = (weight * x).sum(2)
        return mean, torch.sqrt((weight * (x - mean.unsqueeze(2)).pow(2)).sum(2).clamp(1e-4))

    def forward(m, x, mask):
        mean, std = statistics(x, mask / mask.sum(dim=2, keepdim=True))
        mean, std = mean.unsqueeze(2).repeat(1, 1, length), std.unsqueeze(2).repeat(1, 1, length)
        attn = torch.cat([x, mean, std], dim=1)
        attn = m.conv(torch.tanh(m.norm(F.relu(m.first(attn)))))
        attn = F.softmax(attn.masked_fill(mask == 0, float("-inf")), dim=2)
        return m.norm2(torch.cat(statistics(x, attn), dim=1)).unsqueeze(2)

    parts = dict(first=nn.Conv1d(3 * c, 128, 1), conv=nn.Conv1d(128, c, 1))
    parts |= dict(norm=nn.BatchNorm1d(128), norm2=nn.BatchNorm1d(2 * c))
    lengths = torch.linspace(length, length // 2, n).long()
    mask = (torch.arange(length)[None] < lengths[:, None]).float()[:, None]
    return Called(forward, **parts), (features(n, c, length), mask)


@problem(
    "SoundStream / VQ-VAE: nearest codes by expanded distances, straight-through, commitment",
    dict(n=32, length=750, width=128),
    dict(n=2, length=6, width=8),
)
def nearest_codes(n, length, width):
    def forward(m, x):
        z = m.inside(x.transpose(1, 2))
        flat = z.reshape(-1, width)
        distance = (
            flat.pow(2).sum(1, keepdim=True)
            - 2 * flat @ m.codes.weight.t()
            + m.codes.weight.pow(2).sum(1, keepdim=True).t()
        )
        q = m.codes((-distance.float()).max(1)[1]).view_as(z)
        commitment = F.mse_loss(q.detach(), z, reduction="none").mean([1, 2])
        codebook = F.mse_loss(q, z.detach(), reduction="none").mean([1, 2])
        q = z + (q - z).detach()
        return m.out(q).transpose(1, 2), commitment * 0.25 + codebook

    parts = dict(inside=nn.Linear(4 * width, width), out=nn.Linear(width, 4 * width))
    return Called(forward, **parts, codes=nn.Embedding(1024, width)), (
        features(n, 4 * width, length),
    )
