"""Images and video: mobile blocks, samples at offsets, latents that attend, joint streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.encoders import mlp, split
from benchmarks.foreign_code.molecules import linears
from benchmarks.foreign_code.problems import ALL, Called, features, problem


def normed_conv(inner: int, outer: int, kernel: int, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inner, outer, kernel, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer))


@problem(
    "timm MobileNetV4 universal bottleneck: depthwise in front and inside, layer scale",
    dict(n=64, c=96, side=28),
    dict(n=2, c=8, side=6),
    ALL,
)
def universal_bottleneck(n, c, side):
    def forward(m, x):
        h = m.start(x)
        h = F.relu(m.expand(h), inplace=True)
        h = F.relu(m.middle(h), inplace=True)
        h = m.project(h)
        h = h * m.gamma.view(1, -1, 1, 1)
        h += x
        return h

    parts = dict(start=normed_conv(c, c, 3, groups=c), expand=normed_conv(c, 4 * c, 1))
    parts |= dict(middle=normed_conv(4 * c, 4 * c, 3, groups=4 * c))
    parts |= dict(project=normed_conv(4 * c, c, 1), gamma=nn.Parameter(torch.full((c,), 0.5)))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "mit-han-lab EfficientViT: relu attention with a row of ones for its sums, two scales, MBConv",
    dict(n=32, c=128, side=32),
    dict(n=2, c=16, side=4),
)
def relu_linear_attention(n, c, side):
    d = min(16, c // 2)

    def attention(m, x):
        qkv = m.qkv(x)
        qkv = torch.cat([qkv, m.grouped(m.depthwise(qkv))], dim=1).float()
        qkv = torch.reshape(qkv, (n, -1, 3 * d, side * side))
        q, k, v = qkv[:, :, :d], qkv[:, :, d : 2 * d], qkv[:, :, 2 * d :]
        q, k = F.relu(q, inplace=False), F.relu(k, inplace=False)
        v = F.pad(v, (0, 0, 0, 1), mode="constant", value=1)
        vk = torch.matmul(v, k.transpose(-1, -2))
        out = torch.matmul(vk, q)
        out = out[:, :, :-1] / (out[:, :, -1:] + 1e-6)
        return m.project(out.reshape(n, -1, side, side).to(x.dtype))

    def forward(m, x):
        x = x + attention(m, x)
        h = F.hardswish(m.inverted(x))
        return x + m.point(F.hardswish(m.inner(h)))

    parts = dict(qkv=nn.Conv2d(c, 3 * c, 1, bias=False), project=normed_conv(2 * c, c, 1))
    parts |= dict(depthwise=nn.Conv2d(3 * c, 3 * c, 5, padding=2, groups=3 * c, bias=False))
    parts |= dict(grouped=nn.Conv2d(3 * c, 3 * c, 1, groups=3 * c // d, bias=False))
    parts |= dict(inverted=nn.Conv2d(c, 4 * c, 1), point=normed_conv(4 * c, c, 1))
    parts |= dict(inner=nn.Conv2d(4 * c, 4 * c, 3, padding=1, groups=4 * c))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "Deformable DETR decoder: samples of three levels at learnt offsets, weighted, norms last",
    dict(n=8, queries=900, side=64, width=256),
    dict(n=2, queries=5, side=8, width=16),
    "infer f32, infer bf16, train f32",
)
def deformable_attention(n, queries, side, width):
    heads, points, sides = 8 if width > 64 else 2, 4, [side, side // 2, side // 4]
    d, levels = width // heads, len(sides)

    def forward(m, x, places, memory, boxes):
        value = m.value(memory).view(n, -1, heads, d).split([s * s for s in sides], dim=1)
        q = x + places
        offsets = m.offsets(q).view(n, queries, heads, levels, points, 2)
        weights = m.weights(q).view(n, queries, heads, levels * points)
        weights = F.softmax(weights, -1).view(n, queries, heads, levels, points)
        near = boxes[:, :, None, None, None, 2:] * 0.5
        locations = boxes[:, :, None, None, None, :2] + offsets / points * near
        grids, sampled = 2 * locations - 1, []
        for level, s in enumerate(sides):
            v = value[level].flatten(2).transpose(1, 2).reshape(n * heads, d, s, s)
            grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
            sampled.append(
                F.grid_sample(v, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
            )
        weights = weights.transpose(1, 2).reshape(n * heads, 1, queries, levels * points)
        y = (torch.stack(sampled, dim=-2).flatten(-2) * weights).sum(-1)
        y = m.out(y.view(n, width, queries).transpose(1, 2))
        x = m.norm1(x + F.dropout(y, 0.0, m.training))
        return m.norm2(x + m.fc2(F.relu(m.fc1(x))))

    parts = linears(value=(width, width), out=(width, width), weights=(width, heads * 3 * points))
    parts |= linears(offsets=(width, heads * levels * points * 2))
    parts |= linears(fc1=(width, 4 * width), fc2=(4 * width, width))
    tokens = sum(s * s for s in sides)
    boxes = torch.rand(n, queries, 4) * 0.6 + 0.2
    return Called(forward, **parts, norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width)), (
        features(n, queries, width),
        torch.randn(n, queries, width),
        features(n, tokens, width),
        boxes,
    )


@problem(
    "open_flamingo: latents attend to media and themselves, text to latents through tanh gates",
    dict(n=8, seq=512, media=1024, width=1024),
    dict(n=2, seq=6, media=8, width=32),
)
def gated_resampler(n, seq, media, width):
    heads = max(2, width // 128)

    def attend(m, name, q, context):
        q, kv = m.get_submodule(f"{name}_q")(q), m.get_submodule(f"{name}_kv")(context)
        k, v = (split(y, heads) for y in kv.chunk(2, dim=-1))
        sim = torch.einsum("... i d, ... j d -> ... i j", split(q, heads) * m.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("... i j, ... j d -> ... i d", sim.softmax(dim=-1), v)
        return m.get_submodule(f"{name}_out")(out.transpose(1, 2).reshape(n, -1, width))

    def forward(m, x, images):
        images = images + m.frames[:1]
        latents = m.latents.expand(n, -1, -1)
        media, h = m.norm_media(images), m.norm_latents(latents)
        latents = latents + attend(m, "sampler", h, torch.cat((media, h), dim=-2))
        latents = m.norm_out(latents + m.sampler_ff(latents))
        x = attend(m, "cross", m.norm_text(x), latents) * m.attn_gate.tanh() + x
        return m.cross_ff(x) * m.ff_gate.tanh() + x

    def feed_forward():
        layers = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        return nn.Sequential(nn.LayerNorm(width), layers[0], nn.GELU(), layers[1])

    parts = dict(sampler_ff=feed_forward(), cross_ff=feed_forward())
    for name in ("sampler", "cross"):
        parts[f"{name}_q"] = nn.Linear(width, width, bias=False)
        parts[f"{name}_kv"] = nn.Linear(width, 2 * width, bias=False)
        parts[f"{name}_out"] = nn.Linear(width, width, bias=False)
    parts |= {f"norm_{k}": nn.LayerNorm(width) for k in ("media", "latents", "out", "text")}
    parts |= {k: nn.Parameter(torch.tensor([0.5])) for k in ("attn_gate", "ff_gate")}
    parts |= dict(latents=nn.Parameter(torch.randn(max(2, media // 16), width)))
    module = Called(forward, **parts, frames=nn.Parameter(torch.randn(4, width)))
    module.scale = (width // heads) ** -0.5
    return module, (features(n, seq, width), features(n, media, width))


@problem(
    "diffusers SD3 JointTransformerBlock, whole: image and text each with shifts, gates and an MLP",
    dict(n=4, seq=1024, width=1536),
    dict(n=2, seq=8, width=32),
)
def two_stream_block(n, seq, width):
    heads = max(2, width // 64)
    streams = ("image", "text")

    def modulated(x, time):
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = time.chunk(6, dim=1)
        h = F.layer_norm(x, (width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
        return h, gate, shift_mlp, scale_mlp, gate_mlp

    def forward(m, x, text, time):
        states, mods, qs, ks, vs = (x, text), [], [], [], []
        for name, state in zip(streams, states, strict=True):
            h, *rest = modulated(state, m.get_submodule(f"{name}_time")(F.silu(time)))
            q, k, v = (split(y, heads) for y in m.get_submodule(f"{name}_qkv")(h).chunk(3, -1))
            qs.append(m.get_submodule(f"{name}_q_norm")(q))
            ks.append(m.get_submodule(f"{name}_k_norm")(k))
            vs.append(v)
            mods.append(rest)
        a = F.scaled_dot_product_attention(*(torch.cat(y, dim=2) for y in (qs, ks, vs)))
        a = a.transpose(1, 2).reshape(n, -1, width).to(x.dtype)
        outs = []
        for i, part in enumerate((a[:, :seq], a[:, seq:])):
            gate, shift, scale, gate_mlp = mods[i]
            y = states[i] + gate.unsqueeze(1) * m.get_submodule(f"{streams[i]}_out")(part)
            h = F.layer_norm(y, (width,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
            outs.append(y + gate_mlp.unsqueeze(1) * m.get_submodule(f"{streams[i]}_mlp")(h))
        return outs

    parts = {}
    for name in streams:
        sizes = dict(time=(width, 6 * width), qkv=(width, 3 * width), out=(width, width))
        parts |= linears(**{f"{name}_{k}": size for k, size in sizes.items()})
        parts[f"{name}_mlp"] = mlp(width, nn.GELU(approximate="tanh"))
        parts |= {f"{name}_{k}_norm": nn.RMSNorm(width // heads, eps=1e-6) for k in "qk"}
    return Called(forward, **parts), (
        features(n, seq, width),
        features(n, seq // 4, width),
        features(n, width),
    )


@problem(
    "diffusers CogVideoX decoder block: group norms steered by latents, first frame apart, causal",
    dict(n=1, c=128, frames=5, side=96),
    dict(n=2, c=32, frames=3, side=8),
)
def latent_steered_block(n, c, frames, side):
    def steered(m, i, x, zq):
        first, rest = x[:, :, :1], x[:, :, 1:]
        z_first = F.interpolate(zq[:, :, :1], size=first.shape[-3:])
        z_rest = F.interpolate(zq[:, :, 1:], size=rest.shape[-3:])
        zq = torch.cat([z_first, z_rest], dim=2)
        return m.norms[i](x) * m.scales[i](zq) + m.shifts[i](zq)

    def causal(conv, x):
        x = torch.cat([x[:, :, :1]] * 2 + [x], dim=2)
        return conv(F.pad(x, (1, 1, 1, 1), mode="constant", value=0))

    def forward(m, x, zq):
        h = causal(m.convs[0], F.silu(steered(m, 0, x, zq)))
        h = causal(m.convs[1], F.silu(steered(m, 1, h, zq)))
        return h + x

    parts = dict(norms=[nn.GroupNorm(32, c, eps=1e-6) for _ in range(2)])
    parts |= {k: [nn.Conv3d(16, c, 1) for _ in range(2)] for k in ("scales", "shifts")}
    parts |= dict(convs=[nn.Conv3d(c, c, 3) for _ in range(2)])
    parts = {name: nn.ModuleList(part) for name, part in parts.items()}
    return Called(forward, **parts), (
        features(n, c, frames, side, side),
        features(n, 16, 1 + (frames - 1) // 2, side // 4, side // 4),
    )
