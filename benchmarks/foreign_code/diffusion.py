"""Blocks of image generators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.encoders import Attention, heads_of, mlp, split
from benchmarks.foreign_code.problems import ALL, Called, features, problem

MAPS, FEW_MAPS = dict(n=8, c=320, side=64), dict(n=2, c=32, side=8)
TOKENS, FEW = dict(n=16, seq=1024, width=1152), dict(n=2, seq=8, width=32)


class ResnetBlock(nn.Module):
    """Group norm, silu, convolution, twice, with the time embedding added between them."""

    def __init__(self, c: int, time: int | None = None):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, c, eps=1e-6), nn.GroupNorm(32, c, eps=1e-6)
        self.conv1, self.conv2 = (nn.Conv2d(c, c, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(time, c) if time else None

    def forward(self, x, time=None):
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(y)))


@problem("diffusers ResnetBlock2D", MAPS, FEW_MAPS, ALL)
def diffusion_resnet_block(n, c, side):
    return ResnetBlock(c, 4 * c), (features(n, c, side, side), features(n, 4 * c))


@problem("diffusers ResnetBlock2D with scale and shift of the time embedding", MAPS, FEW_MAPS)
def diffusion_scale_shift(n, c, side):
    def forward(m, x, time):
        scale, shift = m.time(F.silu(time))[:, :, None, None].chunk(2, dim=1)
        y = m.norm(m.conv(x)) * (1 + scale) + shift
        return x + F.silu(y)

    parts = dict(conv=nn.Conv2d(c, c, 3, padding=1), norm=nn.GroupNorm(32, c))
    return Called(forward, **parts, time=nn.Linear(4 * c, 2 * c)), (
        features(n, c, side, side),
        features(n, 4 * c),
    )


@problem(
    "diffusers VAE decoder: upsample, resnet block, output norm",
    dict(n=4, c=128, side=128),
    FEW_MAPS,
)
def vae_decoder_block(n, c, side):
    def forward(m, x):
        x = m.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return m.last(F.silu(m.norm(m.block(x))))

    parts = dict(conv=nn.Conv2d(c, c, 3, padding=1), block=ResnetBlock(c))
    parts |= dict(norm=nn.GroupNorm(32, c, eps=1e-6), last=nn.Conv2d(c, 3, 3, padding=1))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("diffusers VAE attention block", dict(n=8, c=512, side=32), FEW_MAPS)
def vae_attention(n, c, side):
    def forward(m, x):
        y = m.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (z[:, None] for z in m.qkv(y).chunk(3, -1))
        y = m.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + y.transpose(1, 2).view(x.shape)

    parts = dict(norm=nn.GroupNorm(32, c), qkv=nn.Linear(c, 3 * c), out=nn.Linear(c, c))
    return Called(forward, **parts), (features(n, c, side, side),)


class GEGLU(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inside, self.outside = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y, gate = self.inside(x).chunk(2, dim=-1)
        return self.outside(y * F.gelu(gate))


class CrossAttention(nn.Module):
    def __init__(self, width: int, other: int):
        super().__init__()
        self.heads = heads_of(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(other, width, bias=False) for _ in range(2))

    def forward(self, x, context):
        q, k, v = (
            split(project(y), self.heads)
            for project, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        a = F.scaled_dot_product_attention(q, k, v)
        return self.out(a.transpose(1, 2).flatten(2))


@problem("diffusers GEGLU feed-forward", dict(n=8, seq=4096, width=640), FEW, ALL)
def geglu_feed_forward(n, seq, width):
    return GEGLU(width), (features(n, seq, width),)


@problem("diffusers BasicTransformerBlock", dict(n=8, seq=1024, width=640), FEW)
def basic_transformer_block(n, seq, width):
    def forward(m, x, context):
        x = m.attention(m.norm1(x)) + x
        x = m.cross(m.norm2(x), context) + x
        return m.ff(m.norm3(x)) + x

    norms = {name: nn.LayerNorm(width) for name in ("norm1", "norm2", "norm3")}
    parts = dict(attention=Attention(width), cross=CrossAttention(width, 768), ff=GEGLU(width))
    return Called(forward, **norms, **parts), (features(n, seq, width), torch.randn(n, 77, 768))


@problem(
    "Stable Diffusion: cross attention with the text alone", dict(n=16, seq=4096, width=320), FEW
)
def text_cross_attention(n, seq, width):
    def forward(m, x, context):
        return x + m.cross(m.norm(x), context)

    parts = dict(norm=nn.LayerNorm(width), cross=CrossAttention(width, 768))
    return Called(forward, **parts), (features(n, seq, width), torch.randn(n, 77, 768))


def modulated(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.attention, self.mlp = Attention(width), mlp(width, nn.GELU(approximate="tanh"))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attention(modulated(self.norm1(x), shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulated(self.norm2(x), shift2, scale2))


@problem("DiT block with AdaLN-Zero", TOKENS, FEW)
def dit_block(n, seq, width):
    return DiTBlock(width), (features(n, seq, width), features(n, width))


@problem("DiT final layer", dict(n=64, seq=1024, width=1152), FEW, ALL)
def dit_final_layer(n, seq, width):
    def forward(m, x, c):
        shift, scale = m.modulation(c).chunk(2, dim=1)
        return m.linear(modulated(m.norm(x), shift, scale))

    norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
    parts = dict(norm=norm, linear=nn.Linear(width, 32))
    parts["modulation"] = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
    return Called(forward, **parts), (features(n, seq, width), features(n, width))


@problem(
    "Flux / SD3 joint block: rms norms of queries and keys", dict(n=8, seq=1024, width=1536), FEW
)
def joint_attention(n, seq, width):
    heads = heads_of(width)

    def forward(m, x, text):
        q, k, v = (
            torch.cat((split(a, heads), split(b, heads)), dim=2)
            for a, b in zip(m.qkv(x).chunk(3, -1), m.text_qkv(text).chunk(3, -1), strict=True)
        )
        a = F.scaled_dot_product_attention(m.norm_q(q), m.norm_k(k), v)
        return m.out(a.transpose(1, 2).flatten(2)).split((seq, seq // 4), dim=1)

    d = width // heads
    parts = dict(qkv=nn.Linear(width, 3 * width), text_qkv=nn.Linear(width, 3 * width))
    parts |= dict(norm_q=nn.RMSNorm(d, eps=1e-6), norm_k=nn.RMSNorm(d, eps=1e-6))
    return Called(forward, **parts, out=nn.Linear(width, width)), (
        features(n, seq, width),
        features(n, seq // 4, width),
    )


@problem(
    "denoising diffusion: the noisy image and the loss of its noise",
    dict(n=128, side=256),
    dict(n=2, side=8),
    "train f32",
)
def noise_prediction_loss(n, side):
    def forward(m, prediction, image, noise, alpha):
        a = alpha[:, None, None, None]
        target = a.sqrt() * noise - (1 - a).sqrt() * image
        return F.mse_loss(prediction, target)

    shape = n, 3, side, side
    return Called(forward), (
        features(*shape),
        torch.randn(shape),
        torch.randn(shape),
        torch.rand(n),
    )


@problem(
    "PixArt: shift, scale and gate from a table and one embedding for all layers",
    dict(n=16, seq=1024, width=1152),
    FEW,
)
def table_modulation(n, seq, width):
    def forward(m, x, time):
        both = m.table[None] + time.reshape(n, 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = both.chunk(6, dim=1)
        x = x + gate1 * m.attention(m.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * m.mlp(m.norm2(x) * (1 + scale2) + shift2)

    norms = {k: nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) for k in ("norm1", "norm2")}
    inner = mlp(width, nn.GELU(approximate="tanh"))
    table = nn.Parameter(torch.randn(6, width) / width**0.5)
    return Called(forward, **norms, attention=Attention(width), mlp=inner, table=table), (
        features(n, seq, width),
        features(n, 6 * width),
    )


@problem(
    "EDM2 block: normalised weights, pixel norm, scaled silu, sums that keep their size",
    dict(n=32, c=256, side=32),
    FEW_MAPS,
)
def magnitude_preserving_block(n, c, side):
    def normalized(x, dims):
        norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True, dtype=torch.float32)
        norm = torch.add(1e-4, norm, alpha=(norm.numel() / x.numel()) ** 0.5)
        return x / norm.to(x.dtype)

    def act(x):
        return F.silu(x) / 0.596

    def conv(x, w):
        w = normalized(w.to(torch.float32), [1, 2, 3]) / w[0].numel() ** 0.5
        return F.conv2d(x, w.to(x.dtype), padding=w.shape[-1] // 2)

    def forward(m, x, time):
        x = normalized(x, [1])
        y = conv(act(x), m.weight1)
        scale = F.linear(time, m.linear) * m.gain + 1
        y = act(y * scale.unsqueeze(2).unsqueeze(3).to(y.dtype))
        x = torch.lerp(x, conv(y, m.weight2), 0.3) / (0.7**2 + 0.3**2) ** 0.5
        return x.clip_(-256, 256)

    learnt = {k: nn.Parameter(torch.randn(c, c, 3, 3)) for k in ("weight1", "weight2")}
    learnt |= dict(linear=nn.Parameter(torch.randn(c, 64) / 8), gain=nn.Parameter(torch.ones([])))
    return Called(forward, **learnt), (features(n, c, side, side), features(n, 64))


@problem(
    "U-ViT: a long skip by concatenation and a product, norms first, tokens of time and class",
    dict(n=32, seq=258, width=768),
    FEW,
)
def long_skip_block(n, seq, width):
    def forward(m, x, skip):
        x = m.skip(torch.cat([x, skip], dim=-1))
        x = x + m.attention(m.norm1(x))
        x = x + m.mlp(m.norm2(x))
        return m.head(m.norm3(x))[:, 2:, :]

    norms = {f"norm{i}": nn.LayerNorm(width) for i in (1, 2, 3)}
    parts = dict(skip=nn.Linear(2 * width, width), head=nn.Linear(width, 16), mlp=mlp(width))
    return Called(forward, **norms, **parts, attention=Attention(width)), (
        features(n, seq, width),
        features(n, seq, width),
    )


@problem(
    "Sana / Lumina: gated depthwise convolution of tokens, norms between tanh gates",
    dict(n=8, side=32, width=768),
    dict(n=2, side=4, width=32),
)
def gated_depthwise_block(n, side, width):
    def rms(x, weight):
        return F.rms_norm(x, (width,), weight, 1e-5)

    def forward(m, x, time):
        gate, scale = m.time(F.silu(time)).unsqueeze(1).chunk(2, dim=-1)
        h = rms(x, m.weight1) * (1 + scale)
        h = h.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        h, gated = torch.chunk(m.depthwise(F.silu(m.inverted(h))), 2, dim=1)
        h = m.point(h * F.silu(gated)).movedim(1, -1).flatten(1, 2)
        return x + gate.tanh() * rms(h, m.weight2)

    wide = 5 * width // 2 * 2
    convs = dict(inverted=nn.Conv2d(width, wide, 1), time=nn.Linear(width, 2 * width))
    convs |= dict(depthwise=nn.Conv2d(wide, wide, 3, padding=1, groups=wide))
    convs |= dict(point=nn.Conv2d(wide // 2, width, 1, bias=False))
    weights = {k: nn.Parameter(torch.ones(width)) for k in ("weight1", "weight2")}
    return Called(forward, **convs, **weights), (
        features(n, side * side, width),
        features(n, width),
    )


@problem(
    "diffusers ResnetBlock2D, channels-last as its guide to faster inference has it",
    MAPS,
    FEW_MAPS,
    ALL,
)
def diffusion_resnet_channels_last(n, c, side):
    block = ResnetBlock(c, 4 * c).to(memory_format=torch.channels_last)
    x = features(n, c, side, side).to(memory_format=torch.channels_last)
    return block, (x, features(n, 4 * c))
