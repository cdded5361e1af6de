"""Losses of retrieval, preferences and flows; layers for sound, tables, atoms and series."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.encoders import Attention
from benchmarks.foreign_code.molecules import linears
from benchmarks.foreign_code.policies import token_log_probs
from benchmarks.foreign_code.problems import (
    BOTH_F32,
    TRAINING,
    Called,
    features,
    problem,
)


@problem(
    "verl GSPO: one ratio for a sequence through a detached difference, clipped, with an entropy",
    dict(n=4, seq=512, words=32000),
    dict(n=4, seq=8, words=40),
    TRAINING,
)
def sequence_ratio_loss(n, seq, words):
    def loss(m, logits, tokens, mask, old, advantage):
        logits = logits / 1.0
        logp = token_log_probs(logits, tokens)
        pd = F.softmax(logits, dim=-1)
        entropy = torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)
        lengths = torch.sum(mask, dim=-1).clamp(min=1)
        mean_log_ratio = torch.sum((logp - old) * mask, dim=-1) / lengths
        log_ratio = logp - logp.detach() + mean_log_ratio.detach().unsqueeze(-1)
        ratio = torch.exp(torch.clamp(log_ratio, max=10.0))
        a = advantage.unsqueeze(-1)
        losses = torch.maximum(-a * ratio, -a * torch.clamp(ratio, 1 - 3e-4, 1 + 4e-4))
        policy = torch.mean(torch.sum(losses * mask, dim=-1) / lengths)
        return policy - 0.001 * torch.sum(entropy * mask) / (torch.sum(mask) + 1e-8)

    lengths = torch.linspace(seq, seq // 2, n).long()
    mask = (torch.arange(seq)[None] < lengths[:, None]).float()
    # Ratios far from where they are clipped: what is clipped does not depend on roundings.
    apart = torch.tensor([0.3, -0.3]).repeat(n // 2)[:, None]
    old = apart - math.log(words) - 0.5 + torch.randn(n, seq) * 0.1
    advantage = torch.tensor([1.0, 0.8, -0.7, -1.1]).repeat(n // 4)
    tokens = torch.randint(words, (n, seq))
    return Called(loss), (features(n, seq, words), tokens, mask, old, advantage)


@problem(
    "ColBERT: largest similarities of query tokens in documents, summed, other queries' negatives",
    dict(n=96, query=32, document=256, width=768),
    dict(n=3, query=4, document=6, width=16),
    "infer bf16, train f32",
)
def late_interaction(n, query, document, width):
    def loss(m, queries, documents, mask):
        q = F.normalize(m.linear(queries), p=2, dim=2)
        d = m.linear(documents) * mask.unsqueeze(2).to(documents.dtype)
        d = F.normalize(d, p=2, dim=2)
        scores = torch.einsum("qih,djh->qdij", q, d)
        scores = scores.masked_fill(~mask[None, :, None, :], -9999)
        scores = scores.max(dim=-1).values.sum(dim=-1)
        return F.cross_entropy(scores / 0.5, torch.arange(n, device=scores.device)), scores

    lengths = torch.linspace(document, document // 2, n).long()
    mask = torch.arange(document)[None] < lengths[:, None]
    linear = nn.Linear(width, max(8, width // 6), bias=False)
    inputs = features(n, query, width), features(n, document, width), mask
    return Called(loss, linear=linear), inputs


@problem(
    "naver SPLADE: logarithm of rectified logits, largest over tokens, FLOPS regulariser",
    dict(n=16, seq=128, width=768, words=30522),
    dict(n=2, seq=6, width=16, words=40),
    "infer f32, infer bf16, train f32",
)
def lexical_representation(n, seq, width, words):
    def forward(m, x, mask):
        logits = m.decoder(m.norm(F.gelu(m.dense(x))))
        weights = torch.log(1 + torch.relu(logits)) * mask.unsqueeze(-1)
        values, _ = torch.max(weights, dim=1)
        flops = torch.sum(torch.mean(torch.abs(values), dim=0) ** 2)
        return F.normalize(values, dim=-1), flops

    parts = linears(dense=(width, width), decoder=(width, words))
    lengths = torch.linspace(seq, seq // 2, n).long()
    mask = (torch.arange(seq)[None] < lengths[:, None]).float()
    return Called(forward, **parts, norm=nn.LayerNorm(width, eps=1e-12)), (
        features(n, seq, width),
        mask,
    )


@problem(
    "SiT with REPA: velocity loss of an interpolant, states projected near a teacher's features",
    dict(n=16, tokens=256, width=1152),
    dict(n=2, tokens=4, width=16),
    TRAINING,
)
def representation_alignment(n, tokens, width):
    side = 2 * math.isqrt(tokens)

    def mean_flat(x):
        return torch.mean(x, dim=list(range(1, len(x.size()))))

    def loss(m, hidden, latents, noise, time, teacher):
        t = time.view(-1, 1, 1, 1)
        angle = t * math.pi / 2
        noised = torch.cos(angle) * latents + torch.sin(angle) * noise
        velocity = math.pi / 2 * (torch.cos(angle) * noise - torch.sin(angle) * latents)
        h = hidden + m.embed(noised).flatten(2).transpose(1, 2)
        out = m.head(F.layer_norm(h, (width,), eps=1e-6))
        out = out.reshape(n, side // 2, side // 2, 2, 2, 4)
        out = torch.einsum("nhwpqc->nchpwq", out).reshape(n, 4, side, side)
        denoising = mean_flat((out - velocity) ** 2)
        aligned = 0.0
        for z, z_tilde in zip(teacher, m.projector(h), strict=True):
            z, z_tilde = F.normalize(z, dim=-1), F.normalize(z_tilde, dim=-1)
            aligned = aligned + mean_flat(-(z * z_tilde).sum(dim=-1, keepdim=True)).mean()
        return denoising.mean() + 0.5 * aligned / n

    inner = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
    projector = nn.Sequential(*inner, nn.SiLU(), nn.Linear(2 * width, 768))
    embed, head = nn.Conv2d(4, width, 2, stride=2), nn.Linear(width, 16)
    return Called(loss, projector=projector, embed=embed, head=head), (
        features(n, tokens, width),
        torch.randn(n, 4, side, side),
        torch.randn(n, 4, side, side),
        torch.rand(n),
        torch.randn(n, tokens, 768),
    )


@problem(
    "nflows: coupling by monotonic rational quadratic splines with linear tails, log-determinant",
    dict(rows=65536, half=16, bins=8),
    dict(rows=6, half=3, bins=4),
    BOTH_F32,
)
def spline_coupling(rows, half, bins):
    bound, least = 3.0, 1e-3

    def knots(x):
        sizes = least + (1 - least * bins) * F.softmax(x, dim=-1)
        total = F.pad(torch.cumsum(sizes, dim=-1), pad=(1, 0), mode="constant", value=0.0)
        total = 2 * bound * total - bound
        return total, total[..., 1:] - total[..., :-1]

    def spline(x, widths, heights, slopes):
        inside = (x >= -bound) & (x <= bound)
        slopes = F.pad(slopes, pad=(1, 1), value=math.log(math.exp(1 - least) - 1))
        slopes = least + F.softplus(slopes)
        (xs, widths), (ys, heights) = knots(widths), knots(heights)
        within = x.clamp(-bound, bound)
        at = torch.sum(within[..., None] >= xs[..., :-1], dim=-1)[..., None] - 1
        x0, w, y0, h, s0, s1 = (
            y.gather(-1, at)[..., 0] for y in (xs, widths, ys, heights, slopes, slopes[..., 1:])
        )
        delta, theta = h / w, (within - x0) / w
        mixed = theta * (1 - theta)
        denominator = delta + (s0 + s1 - 2 * delta) * mixed
        out = y0 + h * (delta * theta.pow(2) + s0 * mixed) / denominator
        slope = delta.pow(2) * (s1 * theta.pow(2) + 2 * delta * mixed + s0 * (1 - theta).pow(2))
        logdet = torch.log(slope) - 2 * torch.log(denominator)
        return torch.where(inside, out, x), torch.where(inside, logdet, torch.zeros_like(logdet))

    def forward(m, x):
        kept, moved = x.chunk(2, dim=1)
        params = m.net(kept).view(rows, half, 3 * bins - 1)
        widths, heights, slopes = params.split([bins, bins, bins - 1], dim=-1)
        scale = math.sqrt(m.net[0].out_features)
        moved, logdet = spline(moved, widths / scale, heights / scale, slopes)
        z = torch.cat([moved, kept], dim=1)
        base = -0.5 * torch.sum(z**2, dim=1) - half * math.log(2 * math.pi)
        return z, -(base + torch.sum(logdet, dim=1)).mean()

    layers = nn.Linear(half, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    net = nn.Sequential(*layers, nn.Linear(128, half * (3 * bins - 1)))
    return Called(forward, net=net), (features(rows, 2 * half),)


@problem(
    "BS-RoFormer: bands of unequal size with a norm and a product each, masks by GLUs of all bands",
    dict(n=8, frames=512, bands=24, width=256),
    dict(n=2, frames=4, bands=3, width=16),
)
def band_split_masks(n, frames, bands, width):
    sizes = [8 * (1 + i // 4) for i in range(bands)]

    def norm(x, gamma):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * gamma

    def forward(m, x):
        parts = x.split(sizes, dim=-1)
        h = [
            to(norm(part, gamma))
            for part, gamma, to in zip(parts, m.gammas, m.features, strict=True)
        ]
        h = torch.stack(h, dim=-2)
        h = h + m.time(norm(h.transpose(1, 2).reshape(n * bands, frames, width), m.gamma)).view(
            n, bands, frames, width
        ).transpose(1, 2)
        masks = [mask(y) for mask, y in zip(m.masks, h.unbind(dim=-2), strict=True)]
        return x * torch.cat(masks, dim=-1)

    def estimator(size):
        first, last = nn.Linear(width, 2 * width), nn.Linear(2 * width, 2 * size)
        return nn.Sequential(first, nn.Tanh(), last, nn.GLU(dim=-1))

    parts = dict(features=nn.ModuleList(nn.Linear(size, width) for size in sizes))
    parts |= dict(gammas=nn.ParameterList(nn.Parameter(torch.ones(size)) for size in sizes))
    parts |= dict(masks=nn.ModuleList(map(estimator, sizes)), time=Attention(width))
    module = Called(forward, **parts, gamma=nn.Parameter(torch.ones(width)))
    return module, (features(n, frames, sum(sizes)),)


@problem(
    "yandex-research FT-Transformer: a token of each feature, ReGLU, a last layer of one query",
    dict(n=1024, numbers=24, categories=8, width=192),
    dict(n=4, numbers=3, categories=2, width=16),
    "infer bf16, train f32, train bf16",
)
def feature_tokens(n, numbers, categories, width):
    heads = max(2, width // 24)

    def attend(m, i, q, x):
        layer = m.attentions[i]
        q, k, v = (
            project(y).reshape(n, -1, heads, width // heads).transpose(1, 2)
            for project, y in zip(layer, (q, x, x), strict=False)
        )
        scores = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // heads), dim=-1)
        return layer[3]((scores @ v).transpose(1, 2).reshape(n, -1, width))

    def feed(m, i, x):
        a, b = m.firsts[i](m.norms[i](x)).chunk(2, dim=-1)
        return x + m.seconds[i](a * F.relu(b))

    def forward(m, x_num, x_cat):
        x_num = torch.cat([torch.ones(n, 1, device=x_num.device, dtype=x_num.dtype), x_num], 1)
        x = m.weight[None] * x_num[:, :, None]
        x = torch.cat([x, m.embed(x_cat + m.offsets[None])], dim=1)
        x = x + torch.cat([torch.zeros_like(m.bias[:1]), m.bias])[None]
        x = feed(m, 0, x + attend(m, 0, x, x))
        h = m.last_norm(x)
        x = feed(m, 1, x[:, :1] + attend(m, 1, h[:, :1], h))[:, 0]
        return m.head(F.relu(m.head_norm(x))).squeeze(-1)

    def layers(inner, outer):
        return nn.ModuleList(nn.Linear(inner, outer) for _ in range(2))

    attentions = [nn.ModuleList(nn.Linear(width, width) for _ in range(4)) for _ in range(2)]
    parts = dict(attentions=nn.ModuleList(attentions), head=nn.Linear(width, 1))
    parts |= dict(firsts=layers(width, 8 * width // 3 * 2), seconds=layers(8 * width // 3, width))
    parts |= dict(norms=nn.ModuleList(nn.LayerNorm(width) for _ in range(2)))
    parts |= dict(last_norm=nn.LayerNorm(width), head_norm=nn.LayerNorm(width))
    parts |= dict(weight=nn.Parameter(torch.randn(numbers + 1, width) / width**0.5))
    parts |= dict(bias=nn.Parameter(torch.randn(numbers + categories, width) / width**0.5))
    module = Called(forward, **parts, embed=nn.Embedding(100 * categories, width))
    module.register_buffer("offsets", torch.arange(categories) * 100)
    return module, (features(n, numbers), torch.randint(100, (n, categories)))


@problem(
    "EquiformerV2 feed-forward: norms balanced over degrees, products by degree, gates by scalars",
    dict(atoms=8192, lmax=3, c=128),
    dict(atoms=5, lmax=2, c=8),
    "infer f32, train f32, train bf16",
)
def degree_gates(atoms, lmax, c):
    def norm(m, x):
        scalars = x.narrow(1, 0, 1)
        scalars = scalars - torch.mean(scalars, dim=2, keepdim=True)
        x = torch.cat((scalars, x.narrow(1, 1, x.shape[1] - 1)), dim=1)
        size = torch.einsum("nic, ia -> nac", x.pow(2), m.balance)
        size = torch.mean(size, dim=2, keepdim=True)
        weight = torch.index_select(m.weight[None], dim=1, index=m.degree)
        x = x * ((size + 1e-5).pow(-0.5) * weight)
        scalars = x.narrow(1, 0, 1) + m.bias.view(1, 1, c)
        return torch.cat((scalars, x.narrow(1, 1, x.shape[1] - 1)), dim=1)

    def linear(m, i, x):
        weight = torch.index_select(m.weights[i], dim=0, index=m.degree)
        out = torch.einsum("bmi, moi -> bmo", x, weight)
        out[:, 0:1, :] = out.narrow(1, 0, 1) + m.biases[i].view(1, 1, c)
        return out

    def forward(m, x):
        h = norm(m, x)
        gates = torch.sigmoid(m.gating(h.narrow(1, 0, 1))).reshape(atoms, lmax, c)
        h = linear(m, 0, h)
        gates = torch.index_select(gates, dim=1, index=m.degree[1:] - 1)
        scalars = F.silu(h.narrow(1, 0, 1)) / 0.6
        h = torch.cat((scalars, h.narrow(1, 1, h.shape[1] - 1) * gates), dim=1)
        return x + linear(m, 1, h)

    degree = torch.cat([torch.full((2 * i + 1,), i) for i in range(lmax + 1)])
    parts = dict(weight=torch.ones(lmax + 1, c), bias=torch.zeros(c))
    parts |= dict(weights=torch.randn(2, lmax + 1, c, c) / c**0.5, biases=torch.zeros(2, c))
    parts = {k: nn.Parameter(v) for k, v in parts.items()}
    module = Called(forward, **parts, gating=nn.Linear(c, lmax * c))
    module.register_buffer("degree", degree)
    module.register_buffer("balance", (1.0 / (2 * degree + 1) / (lmax + 1))[:, None])
    return module, (features(atoms, (lmax + 1) ** 2, c),)


@problem(
    "thuml iTransformer: whole series as tokens, normed and restored, an MLP of 1 × 1 convolutions",
    dict(n=32, length=96, variates=321, width=512),
    dict(n=2, length=8, variates=5, width=16),
    "infer f32, infer bf16, train f32, train bf16",
)
def inverted_series(n, length, variates, width):
    heads = max(2, width // 64)

    def forward(m, x, marks):
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x /= stdev
        x = m.embed(torch.cat([x.permute(0, 2, 1), marks.permute(0, 2, 1)], 1))
        q, k, v = (p(x).view(n, -1, heads, width // heads) for p in (m.q, m.k, m.v))
        scores = torch.einsum("blhe,bshe->bhls", q, k)
        a = torch.softmax(scores / math.sqrt(width // heads), dim=-1)
        a = torch.einsum("bhls,bshd->blhd", a, v).contiguous()
        x = x + m.o(a.view(n, -1, width))
        y = x = m.norm1(x)
        y = F.gelu(m.conv1(y.transpose(-1, 1)))
        y = m.conv2(y).transpose(-1, 1)
        x = m.norm3(m.norm2(x + y))
        out = m.projector(x).permute(0, 2, 1)[:, :, :variates]
        out = out * stdev[:, 0, :].unsqueeze(1).repeat(1, length, 1)
        return out + means[:, 0, :].unsqueeze(1).repeat(1, length, 1)

    parts = linears(embed=(length, width), projector=(width, length))
    parts |= linears(**{name: (width, width) for name in "qkvo"})
    parts |= dict(conv1=nn.Conv1d(width, width, 1), conv2=nn.Conv1d(width, width, 1))
    parts |= {f"norm{i}": nn.LayerNorm(width) for i in (1, 2, 3)}
    return Called(forward, **parts), (torch.randn(n, length, variates), torch.randn(n, length, 4))
