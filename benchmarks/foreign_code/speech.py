"""Parts of models that hear or speak: recognition, synthesis, codecs, separation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.foreign_code.problems import (
    ALL,
    BOTH_F32,
    TRAINING,
    Called,
    features,
    problem,
)

SPEECH, FEW = dict(n=16, seq=1024, width=512), dict(n=2, seq=8, width=32)
SOUND, FEW_SOUNDS = dict(n=16, c=128, length=16384), dict(n=2, c=8, length=32)


def lengths_mask(n: int, seq: int):
    """True at the frames of each text: from half of them to all."""
    lengths = torch.linspace(seq // 2, seq, n).long()
    return torch.arange(seq)[None] < lengths[:, None]


@problem(
    "fairseq wav2vec 2.0 base extractor: group norm of each channel behind the first convolution",
    dict(n=8, width=512, length=65536),
    dict(n=2, width=8, length=400),
    ALL,
)
def wave_extractor(n, width, length):
    def forward(m, wave):
        h = wave.unsqueeze(1)
        h = F.gelu(F.group_norm(m.first(h).float(), width, m.weight.float(), m.bias.float()))
        h = h.type_as(wave)
        for conv in m.convs:
            h = F.gelu(conv(h))
        return m.post_norm(h.transpose(1, 2))

    parts = dict(first=nn.Conv1d(1, width, 10, stride=5, bias=False))
    convs = (nn.Conv1d(width, width, k, stride=2, bias=False) for k in (3, 3, 2))
    parts |= dict(convs=nn.ModuleList(convs), post_norm=nn.LayerNorm(width))
    parts |= dict(weight=nn.Parameter(torch.ones(width)), bias=nn.Parameter(torch.zeros(width)))
    return Called(forward, **parts), (torch.randn(n, length),)


@problem(
    "microsoft WavLM attention: relative biases scaled by gates from halves of the query",
    dict(n=16, seq=512, width=768),
    FEW,
)
def gated_bias_attention(n, seq, width):
    heads = max(2, width // 64)
    d = width // heads

    def forward(m, x, mask, bias):
        gated = x.view(n, seq, heads, d).permute(0, 2, 1, 3)
        projected = m.gru(gated).view(n, heads, seq, 2, 4).sum(-1)
        gate_a, gate_b = torch.sigmoid(projected).chunk(2, dim=-1)
        gate = gate_a.view(n, heads, seq, 1, 1) * (gate_b[..., None] * m.const - 1.0) + 2.0
        bias = gate.view(n, heads, seq, 1) * bias.unsqueeze(0)
        q, k, v = (p(x).view(n, seq, heads, d).transpose(1, 2) for p in (m.q, m.k, m.v))
        scores = torch.matmul(q * d**-0.5, k.transpose(-2, -1)) + bias
        scores = scores.masked_fill(mask[:, None, None], torch.finfo(scores.dtype).min)
        a = torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).reshape(n, seq, width)
        return m.norm(x + m.out(a))

    parts = {name: nn.Linear(width, width) for name in ("q", "k", "v", "out")}
    parts |= dict(gru=nn.Linear(d, 8), const=nn.Parameter(torch.ones(1, heads, 1, 1, 1)))
    inputs = features(n, seq, width), ~lengths_mask(n, seq), torch.randn(heads, seq, seq)
    return Called(forward, **parts, norm=nn.LayerNorm(width)), inputs


@problem(
    "openai whisper decoder block: keys without bias, split scales, attention to sound, own mask",
    dict(n=8, seq=448, frames=1500, width=768),
    dict(n=2, seq=6, frames=10, width=32),
)
def whisper_decoder(n, seq, frames, width):
    heads = max(2, width // 64)

    def attend(x, xa, parts, mask=None):
        q, k, v = parts[0](x), parts[1](xa), parts[2](xa)
        scale = (width // heads) ** -0.25
        q = q.view(*q.shape[:2], heads, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], heads, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], heads, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask
        w = F.softmax(qk.float(), dim=-1).to(q.dtype)
        return parts[3]((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))

    def forward(m, x, xa):
        h = F.layer_norm(x.float(), (width,), m.norms[0].weight.float(), m.norms[0].bias.float())
        h = h.type(x.dtype)
        x = x + attend(h, h, m.own, m.mask)
        x = x + attend(m.norms[1](x), xa, m.cross)
        return x + m.fc2(F.gelu(m.fc1(m.norms[2](x))))

    def four():
        biases = True, False, True, True
        return nn.ModuleList(nn.Linear(width, width, bias=bias) for bias in biases)

    parts = dict(own=four(), cross=four())
    parts |= dict(norms=nn.ModuleList(nn.LayerNorm(width) for _ in range(3)))
    parts |= dict(fc1=nn.Linear(width, 4 * width), fc2=nn.Linear(4 * width, width))
    module = Called(forward, **parts)
    module.register_buffer("mask", torch.full((seq, seq), -math.inf).triu_(1))
    return module, (features(n, seq, width), features(n, frames, width))


@problem(
    "facebookresearch EnCodec residual unit: elu, reflected causal padding, weight norm, shortcut",
    SOUND,
    FEW_SOUNDS,
)
def codec_residual_unit(n, c, length):
    def forward(m, x):
        y = F.pad(F.elu(x), (2, 0), mode="reflect")
        y = m.wide(F.elu(m.narrow(y)))
        y = F.elu(m.shortcut(x) + y)
        return m.down(F.pad(y, (2, 0), mode="reflect"))

    parts = dict(narrow=nn.Conv1d(c, c // 2, 3), wide=nn.Conv1d(c // 2, c, 1))
    parts |= dict(shortcut=nn.Conv1d(c, c, 1), down=nn.Conv1d(c, 2 * c, 4, stride=2))
    return Called(forward, **{k: weight_norm(part) for k, part in parts.items()}), (
        features(n, c, length),
    )


@problem(
    "NVIDIA BigVGAN: snake with two learnt logarithms, twice the rate inside, low-pass filters",
    dict(n=8, c=128, length=8192),
    FEW_SOUNDS,
)
def smoothed_snake(n, c, length):
    def forward(m, x):
        up = F.pad(x, (5, 5), mode="replicate")
        up = 2 * F.conv_transpose1d(up, m.filter.expand(c, -1, -1), stride=2, groups=c)
        up = up[..., 15:-15]
        alpha = torch.exp(m.alpha.unsqueeze(0).unsqueeze(-1))
        beta = torch.exp(m.beta.unsqueeze(0).unsqueeze(-1))
        up = up + (1.0 / (beta + 0.000000001)) * torch.sin(up * alpha).pow(2)
        up = F.pad(up, (5, 6), mode="replicate")
        return x + m.conv(F.conv1d(up, m.filter.expand(c, -1, -1), stride=2, groups=c))

    logs = {name: nn.Parameter(torch.randn(c) * 0.1) for name in ("alpha", "beta")}
    module = Called(forward, **logs, conv=nn.Conv1d(c, c, 3, padding=1))
    module.register_buffer("filter", torch.hann_window(12).view(1, 1, 12) / 6)
    return module, (features(n, c, length),)


@problem(
    "gemelo Vocos: one-dimensional ConvNeXt with a norm of the codec's choice, polar head",
    dict(n=16, seq=2048, width=512),
    FEW,
)
def spectral_vocoder(n, seq, width):
    def forward(m, x, codec):
        y = m.dwconv(x).transpose(1, 2)
        scale, shift = m.scale(codec), m.shift(codec)
        y = F.layer_norm(y, (width,), eps=1e-6) * scale[:, None] + shift[:, None]
        y = m.gamma * m.pwconv2(F.gelu(m.pwconv1(y)))
        h = m.final(x.transpose(1, 2) + y)
        mag, p = m.out(h).transpose(1, 2).chunk(2, dim=1)
        mag = torch.clip(torch.exp(mag), max=1e2)
        return mag * torch.cos(p), mag * torch.sin(p)

    parts = dict(dwconv=nn.Conv1d(width, width, 7, padding=3, groups=width))
    parts |= dict(pwconv1=nn.Linear(width, 3 * width), pwconv2=nn.Linear(3 * width, width))
    parts |= dict(scale=nn.Embedding(4, width), shift=nn.Embedding(4, width))
    parts |= dict(final=nn.LayerNorm(width, eps=1e-6), out=nn.Linear(width, 2 * width + 2))
    parts |= dict(gamma=nn.Parameter(torch.full((width,), 0.125)))
    return Called(forward, **parts), (features(n, width, seq), torch.randint(4, (n,)))


@problem(
    "facebookresearch Demucs encoder layer: strided convolution, relu, a gated one, residual DConv",
    dict(n=8, c=96, length=32768),
    FEW_SOUNDS,
)
def separation_encoder(n, c, length):
    def forward(m, x):
        y = F.relu(m.conv(x))
        for layer in m.branches:
            y = y + m.scale[:, None] * layer(y)
        return F.glu(m.norm(m.rewrite(y)), dim=1)

    def branch(dilation: int):
        wide = nn.Conv1d(2 * c, c // 4, 3, dilation=dilation, padding=dilation)
        back = nn.Conv1d(c // 4, 4 * c, 1), nn.GroupNorm(1, 4 * c), nn.GLU(1)
        return nn.Sequential(wide, nn.GroupNorm(1, c // 4), nn.GELU(), *back)

    parts = dict(conv=nn.Conv1d(c, 2 * c, 8, 4, 2), rewrite=nn.Conv1d(2 * c, 4 * c, 1))
    parts |= dict(branches=nn.ModuleList(branch(2**i) for i in range(2)))
    parts |= dict(norm=nn.GroupNorm(4, 4 * c), scale=nn.Parameter(torch.full((2 * c,), 0.1)))
    return Called(forward, **parts), (features(n, c, length),)


@problem(
    "espnet E-Branchformer: convolutional gating MLP beside attention, merged by depthwise sums",
    SPEECH,
    FEW,
)
def gating_branches(n, seq, width):
    def forward(m, x, attended):
        h = F.gelu(m.proj1(m.norm(x)))
        r, g = h.chunk(2, dim=-1)
        g = m.csgu_conv(m.csgu_norm(g).transpose(1, 2)).transpose(1, 2)
        cg = m.proj2(r * g)
        both = torch.cat([attended, cg], dim=-1)
        mixed = m.fusion(both.transpose(1, 2)).transpose(1, 2)
        return m.final(x + m.merge(both + mixed))

    parts = dict(proj1=nn.Linear(width, 6 * width), proj2=nn.Linear(3 * width, width))
    parts |= dict(csgu_norm=nn.LayerNorm(3 * width), norm=nn.LayerNorm(width))
    parts |= dict(csgu_conv=nn.Conv1d(3 * width, 3 * width, 31, padding=15, groups=3 * width))
    parts |= dict(fusion=nn.Conv1d(2 * width, 2 * width, 3, padding=1, groups=2 * width))
    parts |= dict(merge=nn.Linear(2 * width, width), final=nn.LayerNorm(width))
    return Called(forward, **parts), (features(n, seq, width), features(n, seq, width))


@problem(
    "FastSpeech 2 variance predictor: convolution, relu, layer norm, twice; masked, log-durations",
    dict(n=64, seq=1024, width=256),
    FEW,
    ALL,
)
def variance_predictor(n, seq, width):
    def forward(m, x, mask, duration, pitch):
        y = x
        for conv, norm in zip(m.convs, m.norms, strict=True):
            y = norm(F.relu(conv(y.transpose(1, 2)).transpose(1, 2)))
        out = m.linear(y).squeeze(-1).masked_fill(mask, 0.0)
        target = torch.log(duration.float() + 1).masked_fill(mask, 0.0)
        loss = F.mse_loss(out.float(), target)
        return x + m.embedding(torch.bucketize(pitch, m.bins)), loss

    parts = dict(convs=nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(2)))
    parts |= dict(norms=nn.ModuleList(nn.LayerNorm(width) for _ in range(2)))
    parts |= dict(linear=nn.Linear(width, 1), embedding=nn.Embedding(256, width))
    module = Called(forward, **parts)
    module.register_buffer("bins", torch.linspace(-2, 2, 255))
    durations, pitch = torch.randint(20, (n, seq)), torch.randn(n, seq)
    return module, (features(n, seq, width), ~lengths_mask(n, seq), durations, pitch)


@problem(
    "VITS coupling layer: a gated WaveNet with a speaker's condition, masks, affine of one half",
    dict(n=16, c=192, length=2048),
    FEW_SOUNDS,
)
def flow_coupling(n, c, length):
    def gate(a, b):
        both = a + b
        return torch.tanh(both[:, :c]) * torch.sigmoid(both[:, c:])

    def forward(m, x, mask, speaker):
        x0, x1 = torch.split(x, [c // 2] * 2, 1)
        h, output = m.pre(x0) * mask, 0
        g = m.cond(speaker)
        for i, (conv, skip) in enumerate(zip(m.convs, m.skips, strict=True)):
            acts = gate(conv(h), g[:, i * 2 * c : (i + 1) * 2 * c])
            res_skip = skip(acts)
            h = (h + res_skip[:, :c]) * mask
            output = output + res_skip[:, c:]
        mean, logs = torch.split(m.post(output * mask) * mask, [c // 2] * 2, 1)
        x1 = mean + x1 * torch.exp(logs) * mask
        return torch.flip(torch.cat([x0, x1], 1), [1]), torch.sum(logs, [1, 2])

    parts = dict(pre=nn.Conv1d(c // 2, c, 1), post=nn.Conv1d(c, c, 1))
    parts |= dict(convs=nn.ModuleList(nn.Conv1d(c, 2 * c, 5, padding=2) for _ in range(2)))
    parts |= dict(skips=nn.ModuleList(nn.Conv1d(c, 2 * c, 1) for _ in range(2)))
    parts |= dict(cond=nn.Conv1d(c, 4 * c, 1))
    mask = lengths_mask(n, length).unsqueeze(1).float()
    return Called(forward, **parts), (features(n, c, length), mask, torch.randn(n, c, 1))


@problem(
    "NeMo / espnet transducer joint: frames plus labels, tanh, words, log-softmax, blank and label",
    dict(n=8, frames=200, labels=40, width=512, words=1025),
    dict(n=2, frames=6, labels=3, width=16, words=20),
)
def transducer_joint(n, frames, labels, width, words):
    def forward(m, sound, text, targets):
        h = m.enc(sound).unsqueeze(2) + m.pred(text).unsqueeze(1)
        logp = m.out(torch.tanh(h)).log_softmax(dim=-1)
        at = targets[:, None, :, None].expand(n, frames, labels, 1)
        return logp[..., 0], logp.gather(-1, at).squeeze(-1)

    parts = dict(enc=nn.Linear(width, width), pred=nn.Linear(width, width))
    inputs = features(n, frames, width), features(n, labels, width)
    targets = torch.randint(1, words, (n, labels))
    return Called(forward, **parts, out=nn.Linear(width, words)), (*inputs, targets)


@problem(
    "Conv-TasNet block: prelu, global layer norm by hand, depthwise, residual and skip; a mask",
    dict(n=8, c=256, length=8192),
    FEW_SOUNDS,
)
def tasnet_block(n, c, length):
    def norm(x, gamma, beta):
        mean = x.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        var = torch.pow(x - mean, 2).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return gamma * (x - mean) / torch.pow(var + 1e-8, 0.5) + beta

    def forward(m, x):
        y = norm(F.prelu(m.conv(x), m.slope1), m.gamma1, m.beta1)
        y = norm(F.prelu(m.dconv(y), m.slope2), m.gamma2, m.beta2)
        return x + m.res(y), torch.sigmoid(m.skip(y)) * x

    inner = 2 * c
    parts = dict(conv=nn.Conv1d(c, inner, 1), res=nn.Conv1d(inner, c, 1))
    parts |= dict(dconv=nn.Conv1d(inner, inner, 3, padding=4, dilation=4, groups=inner))
    parts |= dict(skip=nn.Conv1d(inner, c, 1))
    for i in (1, 2):
        parts[f"slope{i}"] = nn.Parameter(torch.full((1,), 0.25))
        parts[f"gamma{i}"] = nn.Parameter(torch.ones(1, inner, 1))
        parts[f"beta{i}"] = nn.Parameter(torch.zeros(1, inner, 1))
    return Called(forward, **parts), (features(n, c, length),)


@problem(
    "asteroid: scale-invariant ratio of signal and noise, all pairs of sources",
    dict(n=64, sources=2, length=64000),
    dict(n=2, sources=2, length=50),
    TRAINING,
)
def signal_noise_ratio(n, sources, length):
    def loss(m, estimate, target):
        target = target - torch.mean(target, dim=2, keepdim=True)
        estimate = estimate - torch.mean(estimate, dim=2, keepdim=True)
        s_target, s_estimate = torch.unsqueeze(target, dim=1), torch.unsqueeze(estimate, dim=2)
        dot = torch.sum(s_estimate * s_target, dim=3, keepdim=True)
        energy = torch.sum(s_target**2, dim=3, keepdim=True) + 1e-8
        projection = dot * s_target / energy
        noise = s_estimate - projection
        ratio = torch.sum(projection**2, dim=3) / (torch.sum(noise**2, dim=3) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()

    target = torch.randn(n, sources, length)
    return Called(loss), (target + 0.5 * features(n, sources, length), target)


@problem(
    "k2 Zipformer: swooshes, a norm by the root mean square of what is left of a bias, bypass",
    SPEECH,
    FEW,
)
def zipformer_feed_forward(n, seq, width):
    def swoosh(x, shift, offset):
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return torch.logaddexp(zero, x - shift) - 0.08 * x - offset

    def forward(m, x):
        y = x + m.down(swoosh(m.up(x), 4.0, 0.035))
        y = y + m.down2(swoosh(m.up2(y), 1.0, 0.313261687))
        scale = torch.mean((y - m.bias) ** 2, dim=-1, keepdim=True) ** -0.5 * m.log_scale.exp()
        return x + (y * scale - x) * m.bypass.clamp(min=0.2, max=1.0)

    inner = 3 * width
    parts = dict(up=nn.Linear(width, inner), down=nn.Linear(inner, width))
    parts |= dict(up2=nn.Linear(width, inner), down2=nn.Linear(inner, width))
    parts |= dict(bias=nn.Parameter(torch.randn(width) * 1e-2))
    parts |= dict(log_scale=nn.Parameter(torch.ones(())))
    parts |= dict(bypass=nn.Parameter(torch.full((width,), 0.5)))
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "parallel_wavegan: spectral convergence and log magnitude of two resolutions",
    dict(n=32, frames=1024, bins=513),
    dict(n=2, frames=8, bins=9),
    BOTH_F32,
)
def spectral_losses(n, frames, bins):
    def magnitude(re, im):
        return torch.sqrt(torch.clamp(re**2 + im**2, min=1e-7)).transpose(2, 1)

    def loss(m, re, im, true_re, true_im):
        total = 0.0
        for step in (1, 2):
            x = magnitude(re[:, ::step], im[:, ::step])
            y = magnitude(true_re[:, ::step], true_im[:, ::step])
            total = total + torch.norm(y - x, p="fro") / torch.norm(y, p="fro")
            total = total + F.l1_loss(torch.log(y), torch.log(x))
        return total / 2

    shape = n, frames, bins
    return Called(loss), (*(features(*shape) for _ in range(2)), *(torch.randn(2, *shape)))
