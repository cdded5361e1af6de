"""Blocks of backbones for images and video that look at windows, grids, scales or branches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.convnets import ChannelsFirstNorm, conv_norm
from benchmarks.foreign_code.problems import ALL, Called, features, problem

FEW = dict(n=2, c=16, side=8)
FEW_WINDOWS = dict(n=2, c=32, side=8, window=4)


def partitioned(x, window: int):
    """[n, side, side, c] -> [n * windows, window², c]"""
    n, h, w, c = x.shape
    x = x.view(n, h // window, window, w // window, window, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window * window, c)


def reversed_windows(x, window: int, side: int):
    n = x.shape[0] // (side // window) ** 2
    x = x.view(n, side // window, side // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(n, side, side, -1)


def shifted_mask(side: int, window: int):
    """0 within a region of the shifted image, -100 between two of them: [windows, w², w²]"""
    regions = torch.zeros(1, side, side, 1)
    parts = slice(0, -window), slice(-window, -(window // 2)), slice(-(window // 2), None)
    for i, rows in enumerate(parts):
        for j, columns in enumerate(parts):
            regions[:, rows, columns] = 3 * i + j
    flat = partitioned(regions, window).squeeze(-1)
    difference = flat.unsqueeze(1) - flat.unsqueeze(2)
    return difference.masked_fill(difference != 0, -100.0)


def relative_index(window: int):
    place = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij"))
    place = place.flatten(1)
    apart = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + window - 1
    return apart[..., 0] * (2 * window - 1) + apart[..., 1]


@problem(
    "microsoft Swin block: shifted windows, a table of relative biases, the mask of regions, MLP",
    dict(n=96, c=192, side=28, window=7),
    FEW_WINDOWS,
    ALL,
)
def shifted_window_block(n, c, side, window):
    heads, area = max(2, c // 32), window * window

    def attention(m, x):
        qkv = m.qkv(x).reshape(-1, area, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * (c // heads) ** -0.5
        scores = q @ k.transpose(-2, -1)
        bias = m.table[m.index.view(-1)].view(area, area, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        windows = m.mask.shape[0]
        scores = scores.view(-1, windows, heads, area, area) + m.mask.unsqueeze(1).unsqueeze(0)
        weights = scores.view(-1, heads, area, area).softmax(dim=-1)
        return m.proj((weights @ v).transpose(1, 2).reshape(-1, area, c))

    def forward(m, x):
        shortcut = x
        h = m.norm1(x).view(n, side, side, c)
        h = torch.roll(h, shifts=(-(window // 2), -(window // 2)), dims=(1, 2))
        h = reversed_windows(attention(m, partitioned(h, window)), window, side)
        h = torch.roll(h, shifts=(window // 2, window // 2), dims=(1, 2))
        x = shortcut + h.view(n, side * side, c)
        return x + m.fc2(F.gelu(m.fc1(m.norm2(x))))

    parts = dict(qkv=nn.Linear(c, 3 * c), proj=nn.Linear(c, c), norm1=nn.LayerNorm(c))
    parts |= dict(fc1=nn.Linear(c, 4 * c), fc2=nn.Linear(4 * c, c), norm2=nn.LayerNorm(c))
    parts |= dict(table=nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.02))
    module = Called(forward, **parts)
    module.register_buffer("index", relative_index(window))
    module.register_buffer("mask", shifted_mask(side, window))
    return module, (features(n, side * side, c),)


@problem(
    "microsoft Swin PatchMerging: four strided slices joined, layer norm, reduction without bias",
    dict(n=64, c=96, side=56),
    FEW,
)
def patch_merging(n, c, side):
    def forward(m, x):
        x = x.view(n, side, side, c)
        x = torch.cat([x[:, i::2, j::2, :] for j in range(2) for i in range(2)], -1)
        return m.reduction(m.norm(x.view(n, -1, 4 * c)))

    parts = dict(norm=nn.LayerNorm(4 * c), reduction=nn.Linear(4 * c, 2 * c, bias=False))
    return Called(forward, **parts), (features(n, side * side, c),)


@problem(
    "microsoft Swin V2 block: biases from an MLP of log-spaced places, clamped scale, norms last",
    dict(n=32, c=256, side=32, window=8),
    FEW_WINDOWS,
)
def log_spaced_bias_block(n, c, side, window):
    heads, area = max(2, c // 32), window * window

    def forward(m, x):
        h = partitioned(x.view(n, side, side, c), window)
        bias = torch.cat((m.q_bias, torch.zeros_like(m.v_bias), m.v_bias))
        qkv = F.linear(h, m.qkv, bias).reshape(-1, area, 3, heads, c // heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(m.logit_scale, max=4.6052).exp()
        table = m.cpb2(F.relu(m.cpb1(m.places))).view(-1, heads)
        bias = table[m.index.view(-1)].view(area, area, heads).permute(2, 0, 1).contiguous()
        scores = scores + (16 * torch.sigmoid(bias)).unsqueeze(0)
        h = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(-1, area, c)
        h = reversed_windows(m.proj(h), window, side).view(n, side * side, c)
        x = x + m.norm1(h)
        return x + m.norm2(m.fc2(F.gelu(m.fc1(x))))

    parts = dict(proj=nn.Linear(c, c), norm1=nn.LayerNorm(c), norm2=nn.LayerNorm(c))
    parts |= dict(fc1=nn.Linear(c, 4 * c), fc2=nn.Linear(4 * c, c))
    parts |= dict(cpb1=nn.Linear(2, 512), cpb2=nn.Linear(512, heads, bias=False))
    parts |= dict(qkv=nn.Parameter(torch.randn(3 * c, c) / c**0.5))
    parts |= {name: nn.Parameter(torch.randn(c) * 0.1) for name in ("q_bias", "v_bias")}
    parts |= dict(logit_scale=nn.Parameter(torch.full((heads, 1, 1), 2.3)))
    module = Called(forward, **parts)
    line = torch.arange(-(window - 1.0), window) / (window - 1) * 8
    places = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1).view(-1, 2)
    places = torch.sign(places) * torch.log2(places.abs() + 1.0) / 3
    module.register_buffer("places", places)
    module.register_buffer("index", relative_index(window))
    return module, (features(n, side * side, c),)


@problem(
    "timm MaxViT grid attention: strided tokens attend to each other, channels last, layer scale",
    dict(n=32, c=128, side=56, window=7),
    FEW_WINDOWS,
)
def grid_attention(n, c, side, window):
    heads, cells = max(2, c // 32), side // window

    def forward(m, x):
        h = m.norm1(x).view(n, window, cells, window, cells, c)
        h = h.permute(0, 2, 4, 1, 3, 5).contiguous().view(-1, window * window, c)
        q, k, v = (
            m.qkv(h)
            .view(-1, window * window, heads, 3 * (c // heads))
            .transpose(1, 2)
            .chunk(3, dim=3)
        )
        bias = m.table[:, m.index]
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        h = m.proj(h.transpose(1, 2).reshape(-1, window * window, c))
        h = h.view(n, cells, cells, window, window, c).permute(0, 3, 1, 4, 2, 5).contiguous()
        x = x + h.view(n, side, side, c) * m.scale1
        return x + m.fc2(F.gelu(m.fc1(m.norm2(x)), approximate="tanh")) * m.scale2

    parts = dict(qkv=nn.Linear(c, 3 * c), proj=nn.Linear(c, c), norm1=nn.LayerNorm(c, eps=1e-6))
    parts |= dict(fc1=nn.Linear(c, 4 * c), fc2=nn.Linear(4 * c, c))
    parts |= dict(norm2=nn.LayerNorm(c, eps=1e-6))
    parts |= dict(table=nn.Parameter(torch.randn(heads, (2 * window - 1) ** 2) * 0.02))
    parts |= {f"scale{i}": nn.Parameter(torch.full((c,), 0.1)) for i in (1, 2)}
    module = Called(forward, **parts)
    module.register_buffer("index", relative_index(window))
    return module, (features(n, side, side, c),)


@problem(
    "FocalNet: contexts of growing depthwise convolutions, gated and summed, modulate the query",
    dict(n=32, c=128, side=56),
    FEW,
)
def focal_modulation(n, c, side):
    levels = 3

    def forward(m, x):
        h = m.f(m.norm(x)).permute(0, 3, 1, 2).contiguous()
        q, ctx, gates = torch.split(h, (c, c, levels + 1), 1)
        total = 0.0
        for level, layer in enumerate(m.layers):
            ctx = layer(ctx)
            total = total + ctx * gates[:, level : level + 1]
        whole = F.gelu(ctx.mean(2, keepdim=True).mean(3, keepdim=True))
        total = total + whole * gates[:, levels:]
        out = q * m.h(total / (levels + 1))
        return x + m.gamma * m.proj(out.permute(0, 2, 3, 1).contiguous())

    convs = (nn.Conv2d(c, c, k, padding=k // 2, groups=c, bias=False) for k in (3, 5, 7))
    parts = dict(layers=nn.ModuleList(nn.Sequential(conv, nn.GELU()) for conv in convs))
    parts |= dict(f=nn.Linear(c, 2 * c + levels + 1), h=nn.Conv2d(c, c, 1), proj=nn.Linear(c, c))
    parts |= dict(norm=nn.LayerNorm(c), gamma=nn.Parameter(torch.full((c,), 0.1)))
    return Called(forward, **parts), (features(n, side, side, c),)


@problem(
    "torchvision RegNetY block: grouped convolution, squeeze-excite with relu, in-place residual",
    dict(n=64, c=224, side=28),
    FEW,
    ALL,
)
def regnet_block(n, c, side):
    groups = max(2, c // 56)

    def forward(m, x):
        y = F.relu(m.a(x), inplace=True)
        y = F.relu(m.b(y), inplace=True)
        s = F.adaptive_avg_pool2d(y, 1)
        y = torch.sigmoid(m.fc2(F.relu(m.fc1(s)))) * y
        return F.relu(x + m.c(y), inplace=True)

    parts = dict(a=conv_norm(c, c), b=conv_norm(c, c, 3, groups=groups), c=conv_norm(c, c))
    parts |= dict(fc1=nn.Conv2d(c, c // 4, 1), fc2=nn.Conv2d(c // 4, c, 1))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "torchvision densenet transition: batch norm, relu, a convolution to half, average pooling",
    dict(n=64, c=256, side=56),
    FEW,
    ALL,
)
def dense_transition(n, c, side):
    parts = nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.Conv2d(c, c // 2, 1, bias=False)
    after = nn.AvgPool2d(2, 2), nn.BatchNorm2d(c // 2), nn.ReLU(inplace=True)
    return nn.Sequential(*parts, *after), (features(n, c, side, side),)


@problem(
    "apple MobileViT block: unfolded patches of 2 × 2, a layer over places of one kind, folded",
    dict(n=128, c=96, side=32),
    FEW,
)
def mobile_vit_block(n, c, side):
    width, heads, half = 3 * c // 2, 4, side // 2

    def forward(m, x):
        y = m.conv_1x1(F.silu(m.conv_kxk(x)))
        y = y.reshape(n * width * half, 2, half, 2).transpose(1, 2)
        y = y.reshape(n, width, half * half, 4).transpose(1, 3).reshape(n * 4, -1, width)
        q, k, v = m.qkv(m.norm1(y)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v)
        y = y + m.out(a.transpose(1, 2).flatten(2))
        y = m.norm3(y + m.fc2(F.silu(m.fc1(m.norm2(y)))))
        y = y.contiguous().view(n, 4, half * half, width).transpose(1, 3)
        y = y.reshape(n * width * half, half, 2, 2).transpose(1, 2).reshape(n, width, side, side)
        y = F.silu(m.conv_proj(y))
        return F.silu(m.fusion(torch.cat((x, y), dim=1)))

    parts = dict(conv_kxk=conv_norm(c, c, 3), conv_1x1=nn.Conv2d(c, width, 1, bias=False))
    parts |= dict(conv_proj=conv_norm(width, c), fusion=conv_norm(2 * c, c, 3))
    parts |= dict(qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))
    parts |= dict(fc1=nn.Linear(width, 2 * width), fc2=nn.Linear(2 * width, width))
    parts |= {f"norm{i}": nn.LayerNorm(width) for i in (1, 2, 3)}
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "facebookresearch ConvNeXt-V2 block, whole: depthwise 7 × 7, gelu, response norm, drop path",
    dict(n=64, c=96, side=56),
    FEW,
)
def response_norm_block(n, c, side):
    def forward(m, x, keep):
        y = m.norm(m.dwconv(x).permute(0, 2, 3, 1))
        y = F.gelu(m.pwconv1(y))
        gx = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        y = m.pwconv2(m.gamma * (y * nx) + m.beta + y).permute(0, 3, 1, 2)
        return x + y.div(0.9) * keep

    parts = dict(dwconv=nn.Conv2d(c, c, 7, padding=3, groups=c), norm=nn.LayerNorm(c, eps=1e-6))
    parts |= dict(pwconv1=nn.Linear(c, 4 * c), pwconv2=nn.Linear(4 * c, c))
    parts |= {k: nn.Parameter(torch.randn(1, 1, 1, 4 * c) * 0.1) for k in ("gamma", "beta")}
    keep = (torch.rand(n, 1, 1, 1) < 0.9).float()
    keep[0] = 1
    return Called(forward, **parts), (features(n, c, side, side), keep)


@problem(
    "timm CAFormer: separable convolution with StarReLU, norms without bias, scaled residuals",
    dict(n=64, c=128, side=28),
    FEW,
)
def star_relu_mixer(n, c, side):
    def star(m, x, i):
        return getattr(m, f"scale{i}") * F.relu(x) ** 2 + getattr(m, f"shift{i}")

    def forward(m, x):
        h = star(m, m.pwconv1(F.layer_norm(x, (c,), m.norm1, None, 1e-6)), 1)
        h = m.dwconv(h.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        x = m.res1 * x + m.pwconv2(h)
        h = star(m, m.fc1(F.layer_norm(x, (c,), m.norm2, None, 1e-6)), 2)
        return m.res2 * x + m.fc2(h)

    wide = dict(pwconv1=(c, 2 * c), pwconv2=(2 * c, c), fc1=(c, 4 * c), fc2=(4 * c, c))
    parts = {name: nn.Linear(*sizes, bias=False) for name, sizes in wide.items()}
    parts |= dict(dwconv=nn.Conv2d(2 * c, 2 * c, 7, padding=3, groups=2 * c, bias=False))
    parts |= {f"{k}{i}": nn.Parameter(torch.ones(c)) for k in ("norm", "res") for i in (1, 2)}
    parts |= {f"scale{i}": nn.Parameter(torch.full((1,), 0.8944)) for i in (1, 2)}
    parts |= {f"shift{i}": nn.Parameter(torch.full((1,), -0.4472)) for i in (1, 2)}
    return Called(forward, **parts), (features(n, side, side, c),)


@problem(
    "HorNet: recursive gated convolutions, each order multiplied into the next",
    dict(n=64, c=128, side=28),
    FEW,
)
def recursive_gates(n, c, side):
    sizes = [c // 4, c // 2, c]

    def forward(m, x):
        fused = m.proj_in(m.norm(x))
        first, abc = torch.split(fused, (sizes[0], sum(sizes)), dim=1)
        parts = torch.split(m.dwconv(abc) * 0.1, sizes, dim=1)
        y = first * parts[0]
        for conv, part in zip(m.convs, parts[1:], strict=True):
            y = conv(y) * part
        return x + m.gamma.view(c, 1, 1) * m.proj_out(y)

    total = sum(sizes)
    parts = dict(norm=ChannelsFirstNorm(c), proj_in=nn.Conv2d(c, sizes[0] + total, 1))
    parts |= dict(dwconv=nn.Conv2d(total, total, 7, padding=3, groups=total))
    pairs = zip(sizes, sizes[1:], strict=False)
    parts |= dict(convs=nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in pairs))
    parts |= dict(proj_out=nn.Conv2d(c, c, 1), gamma=nn.Parameter(torch.ones(c) * 0.1))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "EVA-02 layer: rotary places of two axes, class token apart, SwiGLU with a norm inside",
    dict(n=32, width=768, side=24),
    dict(n=2, width=32, side=4),
)
def eva_layer(n, width, side):
    heads, inner = max(2, width // 64), width * 8 // 3 // 8 * 8
    d, area = width // heads, side * side

    def rope(x, sin, cos):
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        return x * cos + turned * sin

    def forward(m, x):
        h = m.norm1(x)
        q, k, v = (m.q(h), F.linear(h, m.k.weight), m.v(h))
        q, k, v = (y.reshape(n, area + 1, heads, d).transpose(1, 2) for y in (q, k, v))
        q = torch.cat([q[:, :, :1], rope(q[:, :, 1:], m.sin, m.cos)], dim=2).type_as(v)
        k = torch.cat([k[:, :, :1], rope(k[:, :, 1:], m.sin, m.cos)], dim=2).type_as(v)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, area + 1, width)
        x = x + m.proj(m.inner_norm(a))
        h = m.norm2(x)
        return x + m.w3(m.ffn_norm(F.silu(m.w1(h)) * m.w2(h)))

    parts = {name: nn.Linear(width, width) for name in ("q", "k", "v", "proj")}
    parts |= dict(w1=nn.Linear(width, inner), w2=nn.Linear(width, inner))
    parts |= dict(w3=nn.Linear(inner, width), ffn_norm=nn.LayerNorm(inner))
    parts |= {name: nn.LayerNorm(width) for name in ("norm1", "norm2", "inner_norm")}
    module = Called(forward, **parts)
    module.k.bias = None
    bands = 10000 ** -(torch.arange(0.0, d // 2, 2) / (d // 2))
    turns = (torch.arange(float(side))[:, None] * bands).repeat_interleave(2, -1)
    both = turns[:, None].expand(side, side, d // 2), turns[None].expand(side, side, d // 2)
    turns = torch.cat(both, -1).view(area, d)
    module.register_buffer("sin", turns.sin())
    module.register_buffer("cos", turns.cos())
    return module, (features(n, area + 1, width),)
