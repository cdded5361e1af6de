"""Layers of rarer kinds: learnt quantisation, odd norms, fields in space, crossed features."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.molecules import linears
from benchmarks.foreign_code.problems import ALL, BOTH_F32, Called, features, problem

IMAGES, FEW = dict(n=32, c=128, side=56), dict(n=2, c=16, side=8)
TEXT, FEW_WORDS = dict(n=8, seq=1024, width=1024), dict(n=2, seq=8, width=32)


@problem(
    "LSQ convolution: learnt steps of activations and channels, gradients scaled, straight through",
    IMAGES,
    FEW,
    "infer bf16, train f32",
)
def learnt_step_convolution(n, c, side):
    def scaled(x, factor):
        y = x * factor
        return (x - y).detach() + y

    def rounded(x):
        return (x.round() - x).detach() + x

    def quantised(x, step, low, high):
        step = scaled(step, 1.0 / math.sqrt(x.numel() * high))
        return rounded((x / step).clamp(low, high)) * step

    def forward(m, x):
        x = quantised(F.relu(x), m.step, 0, 255)
        w = quantised(m.weight, m.steps, -128, 127)
        return F.relu(m.norm(F.conv2d(x, w, padding=1)))

    parts = dict(weight=nn.Parameter(torch.randn(c, c, 3, 3) / (3 * c**0.5)))
    parts |= dict(steps=nn.Parameter(torch.full((c, 1, 1, 1), 0.01)), norm=nn.BatchNorm2d(c))
    parts |= dict(step=nn.Parameter(torch.full((), 0.02)))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "SmoothQuant-like fake quantisation of an MLP: layer norm, ranges of tokens and of channels",
    TEXT,
    FEW_WORDS,
    ALL,
)
def fake_quantised_mlp(n, seq, width):
    def token(x):
        scales = x.abs().max(dim=-1, keepdim=True)[0]
        scales = scales.clamp(min=1e-5).div(127)
        return x + (x.div(scales).round().mul(scales) - x).detach()

    def channel(w):
        low, high = w.amin(dim=1, keepdim=True), w.amax(dim=1, keepdim=True)
        scale = (high - low).clamp(min=1e-5) / 255
        zero = (-low / scale).round()
        q = torch.clamp(torch.round(w / scale) + zero, 0, 255)
        return w + ((q - zero) * scale - w).detach()

    def forward(m, x):
        h = token(m.norm(x))
        h = F.gelu(F.linear(h, channel(m.up.weight), m.up.bias))
        return x + F.linear(token(h), channel(m.down.weight), m.down.bias)

    parts = linears(up=(width, 4 * width), down=(4 * width, width))
    return Called(forward, **parts, norm=nn.LayerNorm(width)), (features(n, seq, width),)


@problem(
    "Big Transfer block: standardised weights by hand, group norm and relu in front",
    dict(n=32, c=256, side=56),
    FEW,
)
def standardised_bottleneck(n, c, side):
    def conv(x, w, padding=0):
        v, mean = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        return F.conv2d(x, (w - mean) / torch.sqrt(v + 1e-10), padding=padding)

    def forward(m, x):
        y = F.relu(m.norm1(x))
        y = F.relu(m.norm2(conv(y, m.w1)))
        y = F.relu(m.norm3(conv(y, m.w2, 1)))
        return conv(y, m.w3) * 0.1 + x

    inner = c // 4
    shapes = dict(w1=(inner, c, 1, 1), w2=(inner, inner, 3, 3), w3=(c, inner, 1, 1))
    parts = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    groups = max(2, c // 32)
    parts |= {f"norm{i}": nn.GroupNorm(groups, k) for i, k in ((1, c), (2, inner), (3, inner))}
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "filter response norm: mean square of each map, a learnt epsilon, a thresholded linear unit",
    IMAGES,
    FEW,
    ALL,
)
def filter_response_norm(n, c, side):
    def forward(m, x):
        nu2 = torch.mean(x.pow(2), dim=[2, 3], keepdim=True)
        x = x * torch.rsqrt(nu2 + torch.abs(m.eps))
        return torch.max(m.gamma * m.conv(x) + m.beta, m.tau)

    shape = 1, c, 1, 1
    parts = {name: nn.Parameter(torch.randn(shape) * 0.1) for name in ("beta", "tau")}
    parts |= dict(gamma=nn.Parameter(torch.ones(shape)), eps=nn.Parameter(torch.full((), 1e-6)))
    return Called(forward, **parts, conv=nn.Conv2d(c, c, 1)), (features(n, c, side, side),)


@problem(
    "adaptive instance norm for styles: mean and deviation of flat maps exchanged, decoder block",
    dict(n=8, c=128, side=128),
    FEW,
)
def style_statistics(n, c, side):
    def statistics(x):
        flat = x.view(n, c, -1)
        std = (flat.var(dim=2) + 1e-5).sqrt().view(n, c, 1, 1)
        return flat.mean(dim=2).view(n, c, 1, 1), std

    def forward(m, content, style):
        mean, std = statistics(style)
        own_mean, own_std = statistics(content)
        normed = (content - own_mean.expand(content.size())) / own_std.expand(content.size())
        t = normed * std.expand(content.size()) + mean.expand(content.size())
        t = 0.8 * t + 0.2 * content
        return F.relu(m.conv(F.pad(t, (1, 1, 1, 1), mode="reflect")))

    shape = n, c, side, side
    return Called(forward, conv=nn.Conv2d(c, c // 2, 3)), (features(*shape), torch.randn(shape))


@problem(
    "x-transformers layer: scale norms of one number, squared relu GLU, residuals gated as a GRU",
    TEXT,
    FEW_WORDS,
)
def scale_norm_gates(n, seq, width):
    def norm(x, g):
        return x / torch.norm(x, dim=-1, keepdim=True).clamp(min=1e-5) * width**0.5 * g

    def forward(m, x):
        value, gate = m.up(norm(x, m.g1)).chunk(2, dim=-1)
        y = m.down(value * F.relu(gate) ** 2)
        r, z, own = m.mine(y).chunk(3, dim=-1)
        old_r, old_z, old = m.old(x).chunk(3, dim=-1)
        r, z = torch.sigmoid(r + old_r), torch.sigmoid(z + old_z)
        h = torch.tanh(own + r * old)
        return norm((1 - z) * h + z * x, m.g2)

    parts = linears(up=(width, 4 * width), down=(2 * width, width))
    parts |= linears(mine=(width, 3 * width), old=(width, 3 * width))
    parts |= {f"g{i}": nn.Parameter(torch.ones(1)) for i in (1, 2)}
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "neuraloperator FNO layer: channel MLP beside a spectral branch, instance norm, soft gating",
    dict(n=16, c=64, side=128),
    dict(n=2, c=8, side=8),
)
def operator_layer(n, c, side):
    def forward(m, x, spectral):
        y = m.norm1(spectral) + m.skip(x)
        y = F.gelu(y)
        z = m.fc2(F.gelu(m.fc1(y.reshape(n, c, -1)))).reshape(x.shape)
        z = m.norm2(z) + m.weight * x + m.bias
        return F.gelu(z)

    parts = dict(fc1=nn.Conv1d(c, c // 2, 1), fc2=nn.Conv1d(c // 2, c, 1))
    parts |= {f"norm{i}": nn.InstanceNorm2d(c, affine=True) for i in (1, 2)}
    parts |= {k: nn.Parameter(torch.ones(1, c, 1, 1) * 0.1) for k in ("weight", "bias")}
    shape = n, c, side, side
    return Called(forward, **parts, skip=nn.Conv2d(c, c, 1, bias=False)), (
        features(*shape),
        features(*shape),
    )


@problem(
    "mip-NeRF: places by sines, relu layers with a skip, softplus densities composited along rays",
    dict(rays=4096, samples=64, width=256),
    dict(rays=3, samples=4, width=16),
    "infer f32, infer bf16, train f32",
)
def radiance_field(rays, samples, width):
    def encoded(x, levels: int):
        found = [x]
        for i in range(levels):
            found += [torch.sin(x * 2.0**i), torch.cos(x * 2.0**i)]
        return torch.cat(found, -1)

    def forward(m, points, directions, depths):
        place = encoded(points, 4)
        h = F.relu(m.first(place))
        h = torch.cat([place, F.relu(m.second(h))], -1)
        h = F.relu(m.third(h))
        sigma = m.density(h)[..., 0]
        towards = encoded(directions, 2)[:, None].expand(rays, samples, 15)
        h = F.relu(m.view(torch.cat([m.feature(h), towards], -1)))
        rgb = torch.sigmoid(m.rgb(h))
        gaps = depths[..., 1:] - depths[..., :-1]
        gaps = torch.cat([gaps, torch.full_like(gaps[..., :1], 1e10)], -1)
        alpha = 1.0 - torch.exp(-F.softplus(sigma - 1.0) * gaps)
        ones = torch.ones_like(alpha[..., :1])
        passed = torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * passed
        colours = torch.sum(weights[..., None] * rgb, -2)
        return colours + (1.0 - torch.sum(weights, -1)[..., None]), torch.sum(weights * depths, -1)

    parts = linears(first=(27, width), second=(width, width), third=(width + 27, width))
    parts |= linears(density=(width, 1), feature=(width, width), rgb=(width // 2, 3))
    parts |= linears(view=(width + 15, width // 2))
    depths = torch.linspace(2, 6, samples).expand(rays, samples).contiguous()
    directions = F.normalize(torch.randn(rays, 3), dim=-1)
    return Called(forward, **parts), (torch.randn(rays, samples, 3), directions, depths)


@problem(
    "gaussian splatting: colours by spherical harmonics, covariances of quaternions and scales",
    dict(points=2**20),
    dict(points=6),
    BOTH_F32,
)
def splats(points):
    def forward(m, coefficients, directions, scales, turns):
        d = directions / directions.norm(dim=1, keepdim=True)
        x, y, z = d[..., 0:1], d[..., 1:2], d[..., 2:3]
        sh = coefficients.view(-1, 3, 9)
        colour = 0.28209 * sh[..., 0]
        colour = colour - 0.4886 * y * sh[..., 1] + 0.4886 * z * sh[..., 2]
        colour = colour - 0.4886 * x * sh[..., 3] + 1.0925 * x * y * sh[..., 4]
        colour = colour - 1.0925 * y * z * sh[..., 5]
        colour = colour + 0.3154 * (2.0 * z * z - x * x - y * y) * sh[..., 6]
        colour = colour - 1.0925 * x * z * sh[..., 7] + 0.5463 * (x * x - y * y) * sh[..., 8]
        r, i, j, k = F.normalize(turns).unbind(-1)
        rows = [1 - 2 * (j * j + k * k), 2 * (i * j - r * k), 2 * (i * k + r * j)]
        rows += [2 * (i * j + r * k), 1 - 2 * (i * i + k * k), 2 * (j * k - r * i)]
        rows += [2 * (i * k - r * j), 2 * (j * k + r * i), 1 - 2 * (i * i + j * j)]
        stretched = torch.stack(rows, dim=-1).view(-1, 3, 3) * torch.exp(scales)[:, None, :]
        covariance = stretched @ stretched.transpose(1, 2)
        return torch.clamp_min(colour + 0.5, 0.0), covariance

    sizes = 27, 3, 3, 4
    return Called(forward), tuple(features(points, size) for size in sizes)


@problem(
    "PaiNN update: scalars and vectors mixed, norms of vectors, gates split in three",
    dict(atoms=32768, width=128),
    dict(atoms=6, width=8),
    "infer f32, train f32, train bf16",
)
def vector_update(atoms, width):
    def forward(m, q, mu):
        v, w = torch.split(m.mix(mu), width, dim=-1)
        norm = torch.sqrt(torch.sum(v**2, dim=-2, keepdim=True) + 1e-8)
        x = m.second(F.silu(m.first(torch.cat([q, norm], dim=-1))))
        dq, dmu, both = torch.split(x, width, dim=-1)
        dmu = dmu * w
        both = both * torch.sum(v * w, dim=1, keepdim=True)
        return q + dq + both, mu + dmu

    parts = linears(first=(2 * width, width), second=(width, 3 * width))
    parts |= dict(mix=nn.Linear(width, 2 * width, bias=False))
    return Called(forward, **parts), (features(atoms, 1, width), features(atoms, 3, width))


@problem(
    "GraphCast processor: layer norm MLPs of edges and nodes, sums at receivers, residuals",
    dict(nodes=20000, edges=160000, width=256),
    dict(nodes=5, edges=12, width=16),
)
def mesh_processor(nodes, edges, width):
    def forward(m, x, e, senders, receivers):
        both = torch.cat([e, x.index_select(0, senders), x.index_select(0, receivers)], dim=-1)
        e = e + m.edge_norm(m.edge2(F.silu(m.edge1(both))))
        total = torch.zeros_like(x).index_add(0, receivers, e)
        h = m.node2(F.silu(m.node1(torch.cat([x, total], dim=-1))))
        return x + m.node_norm(h), e

    parts = linears(edge1=(3 * width, width), edge2=(width, width))
    parts |= linears(node1=(2 * width, width), node2=(width, width))
    parts |= {f"{k}_norm": nn.LayerNorm(width) for k in ("edge", "node")}
    at = torch.randint(nodes, (2, edges))
    return Called(forward, **parts), (features(nodes, width), features(edges, width), *at)


@problem(
    "FuxiCTR FiBiNET: fields reweighted by squeeze-excite, bilinear products of all pairs, MLP",
    dict(n=8192, fields=24, width=32),
    dict(n=4, fields=4, width=8),
)
def bilinear_fields(n, fields, width):
    def pairs(m, x):
        left, right = torch.matmul(x, m.bilinear)[:, m.at[0]], x[:, m.at[1]]
        return (left * right).flatten(start_dim=1)

    def forward(m, x):
        z = torch.mean(x, dim=-1)
        a = F.relu(m.excite(F.relu(m.squeeze(z))))
        both = torch.cat([pairs(m, x), pairs(m, x * a.unsqueeze(-1))], dim=1)
        h = F.relu(m.norm(m.fc1(both)))
        return torch.sigmoid(m.fc2(h) + m.lr(x.flatten(1)))

    count = fields * (fields - 1) // 2
    parts = linears(squeeze=(fields, max(2, fields // 3)), excite=(max(2, fields // 3), fields))
    parts |= linears(fc1=(2 * count * width, 256), fc2=(256, 1), lr=(fields * width, 1))
    parts |= dict(bilinear=nn.Parameter(torch.randn(width, width) / width**0.5))
    module = Called(forward, **parts, norm=nn.BatchNorm1d(256))
    module.register_buffer("at", torch.triu_indices(fields, fields, 1))
    return module, (features(n, fields, width),)
