"""Segmentation, detection and restoration of images, and less usual convolutional blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.convnets import conv_norm
from benchmarks.foreign_code.problems import ALL, BOTH, BOTH_F32, Called, features, problem

FEW = dict(n=2, c=8, side=8)


@problem(
    "PoolFormer block: average pooling less the input, group norm, layer scale",
    dict(n=64, c=96, side=56),
    FEW,
    ALL,
)
def pool_former(n, c, side):
    def forward(m, x):
        h = m.norm1(x)
        x = x + m.scale1[:, None, None] * (F.avg_pool2d(h, 3, 1, 1, count_include_pad=False) - h)
        return x + m.scale2[:, None, None] * m.conv2(F.gelu(m.conv1(m.norm2(x))))

    norms = dict(norm1=nn.GroupNorm(1, c), norm2=nn.GroupNorm(1, c))
    convs = dict(conv1=nn.Conv2d(c, 4 * c, 1), conv2=nn.Conv2d(4 * c, c, 1))
    scales = {name: nn.Parameter(torch.full((c,), 0.1)) for name in ("scale1", "scale2")}
    return Called(forward, **norms, **convs, **scales), (features(n, c, side, side),)


@problem(
    "RepVGG block: two convolutions and a batch norm of the input, summed, channels last",
    dict(n=64, c=64, side=56),
    FEW,
)
def repvgg_block(n, c, side):
    def forward(m, x):
        x = x.to(memory_format=torch.channels_last)
        x = F.relu(m.dense1(x) + m.point1(x) + m.norm1(x))
        return F.relu(m.dense2(x) + m.point2(x) + m.norm2(x), inplace=True)

    parts = {f"dense{i}": conv_norm(c, c, 3) for i in (1, 2)}
    parts |= {f"point{i}": conv_norm(c, c) for i in (1, 2)}
    parts |= {f"norm{i}": nn.BatchNorm2d(c) for i in (1, 2)}
    return Called(forward, **parts), (features(n, c, side, side),)


class ScaledStdConv(nn.Module):
    """A convolution whose weights are normalised by timm's way: a batch norm of the weights."""

    def __init__(self, a: int, b: int, kernel: int = 1, groups: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(b, a // groups, kernel, kernel) * 0.1)
        self.bias, self.gain = nn.Parameter(torch.zeros(b)), nn.Parameter(torch.ones(b, 1, 1, 1))
        self.scale, self.groups, self.padding = self.weight[0].numel() ** -0.5, groups, kernel // 2

    def forward(self, x):
        w = self.weight.reshape(1, len(self.weight), -1)
        w = F.batch_norm(w, None, None, (self.gain * self.scale).view(-1), training=True, eps=1e-6)
        w = w.reshape_as(self.weight)
        return F.conv2d(x, w, self.bias, 1, self.padding, 1, self.groups)


@problem(
    "timm NFNet block: standardised weights, scaled gelu, doubled squeeze-excite",
    dict(n=32, c=256, side=28),
    dict(n=2, c=16, side=8),
)
def nf_block(n, c, side):
    def act(x):
        return F.gelu(x) * 1.7015043497085571

    def forward(m, x):
        out = act(x) * 0.97
        out = m.conv3(act(m.conv2(act(m.conv1(out)))))
        gate = m.fc2(F.relu(m.fc1(out.mean((2, 3), keepdim=True)))).sigmoid()
        out = 2.0 * (out * gate)
        out = out.mul(m.skip_gain)
        return out * 0.2 + x

    inner = c // 2
    convs = dict(conv1=ScaledStdConv(c, inner), conv2=ScaledStdConv(inner, inner, 3, 2))
    convs |= dict(conv3=ScaledStdConv(inner, c), fc1=nn.Conv2d(c, c // 4, 1))
    convs |= dict(fc2=nn.Conv2d(c // 4, c, 1), skip_gain=nn.Parameter(torch.ones(())))
    return Called(forward, **convs), (features(n, c, side, side),)


@problem(
    "CBAM: gates of channels by mean and max, then gates of places by both again",
    dict(n=64, c=128, side=56),
    dict(n=2, c=16, side=8),
    ALL,
)
def attention_module(n, c, side):
    def forward(m, x):
        mean, top = F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)
        x = torch.sigmoid(m.mlp(mean) + m.mlp(top)) * x
        both = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], dim=1)
        return x * torch.sigmoid(m.norm(m.conv(both)))

    layers = nn.Conv2d(c, c // 8, 1, bias=False), nn.ReLU(), nn.Conv2d(c // 8, c, 1, bias=False)
    parts = dict(conv=nn.Conv2d(2, 1, 7, padding=3, bias=False), norm=nn.BatchNorm2d(1))
    return Called(forward, mlp=nn.Sequential(*layers), **parts), (features(n, c, side, side),)


@problem(
    "EfficientDet BiFPN: normalised weights of levels, swish, separable convolution",
    dict(n=16, c=88, side=64),
    FEW,
)
def weighted_fusion(n, c, side):
    def forward(m, low, high, skip):
        w = F.relu(m.weights)
        w = w / (torch.sum(w, dim=0) + 1e-4)
        up = F.interpolate(high, scale_factor=2, mode="nearest")
        down = F.max_pool2d(F.pad(skip, (0, 1, 0, 1)), 3, 2)
        y = w[0] * low + w[1] * up + w[2] * down
        return m.norm(m.pointwise(m.depthwise(y * torch.sigmoid(y))))

    parts = dict(depthwise=nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False))
    parts |= dict(pointwise=nn.Conv2d(c, c, 1), norm=nn.BatchNorm2d(c, momentum=0.01, eps=1e-3))
    return Called(forward, **parts, weights=nn.Parameter(torch.ones(3))), (
        features(n, c, side, side),
        features(n, c, side // 2, side // 2),
        features(n, c, 2 * side, 2 * side),
    )


@problem(
    "torchvision DeepLabV3: dilated branches and a pooled one, concatenated",
    dict(n=8, c=512, side=33),
    FEW,
)
def atrous_pyramid(n, c, side):
    def forward(m, x):
        found = [conv(x) for conv in m.convs]
        pooled = F.relu(m.pool(F.adaptive_avg_pool2d(x, 1)))
        found.append(F.interpolate(pooled, size=x.shape[-2:], mode="bilinear", align_corners=False))
        return m.project(torch.cat(found, dim=1))

    def branch(a: int, b: int, rate: int):
        conv = nn.Conv2d(a, b, 3, padding=rate, dilation=rate, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(b), nn.ReLU())

    inner = c // 2
    convs = [
        nn.Sequential(conv_norm(c, inner), nn.ReLU()),
        branch(c, inner, 2),
        branch(c, inner, 4),
    ]
    project = nn.Sequential(conv_norm(4 * inner, inner), nn.ReLU(), nn.Dropout(0.0))
    parts = dict(convs=nn.ModuleList(convs), pool=conv_norm(c, inner), project=project)
    return Called(forward, **parts), (features(n, c, side, side),)


@problem(
    "SegFormer layer: keys and values of fewer tokens, a depthwise convolution in the MLP",
    dict(n=8, heads=2, d=64, side=64),
    dict(n=2, heads=2, d=8, side=8),
)
def mix_transformer(n, heads, d, side):
    width, seq = heads * d, side * side

    def forward(m, x):
        h = m.norm1(x)
        image = h.permute(0, 2, 1).reshape(n, width, side, side)
        fewer = m.norm_kv(m.reduce(image).reshape(n, width, -1).permute(0, 2, 1))
        q, k, v = (
            f(y).view(n, -1, heads, d).transpose(1, 2)
            for f, y in ((m.q, h), (m.k, fewer), (m.v, fewer))
        )
        probs = F.softmax(torch.matmul(q, k.transpose(-1, -2)) / d**0.5, dim=-1)
        x = m.o(torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous().view(n, seq, width)) + x
        h = m.up(m.norm2(x)).transpose(1, 2).view(n, -1, side, side)
        h = F.gelu(m.depthwise(h).flatten(2).transpose(1, 2))
        return m.down(h) + x

    parts = {name: nn.Linear(width, width) for name in "qkvo"}
    parts |= {name: nn.LayerNorm(width, eps=1e-6) for name in ("norm1", "norm2", "norm_kv")}
    wide = 4 * width
    parts |= dict(up=nn.Linear(width, wide), down=nn.Linear(wide, width))
    parts |= dict(depthwise=nn.Conv2d(wide, wide, 3, padding=1, groups=wide))
    return Called(forward, **parts, reduce=nn.Conv2d(width, width, 4, 4)), (
        features(n, seq, width),
    )


@problem(
    "FCOS head: group norms, centerness beside scaled exponents of boxes, permuted and joined",
    dict(n=8, c=256, side=64),
    dict(n=2, c=32, side=8),
)
def dense_head(n, c, side):
    def flat(x, last: int):
        return (
            x.view(n, -1, last, x.shape[2], x.shape[3]).permute(0, 3, 4, 1, 2).reshape(n, -1, last)
        )

    def forward(m, *levels):
        labels, boxes, centres = [], [], []
        for level, scale in zip(levels, m.scales, strict=True):
            box = m.box_body(level)
            labels.append(flat(m.classes(m.class_body(level)), 91))
            boxes.append(flat(torch.exp(scale * m.box(box)).clamp(max=1000.0), 4))
            centres.append(flat(m.centre(box), 1))
        scores = torch.sqrt(torch.cat(labels, 1).sigmoid() * torch.cat(centres, 1).sigmoid())
        return scores, torch.cat(boxes, dim=1)

    def body():
        return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(32, c), nn.ReLU())

    parts = dict(class_body=body(), box_body=body(), classes=nn.Conv2d(c, 91, 3, padding=1))
    parts |= dict(box=nn.Conv2d(c, 4, 3, padding=1), centre=nn.Conv2d(c, 1, 3, padding=1))
    nn.init.normal_(parts["box"].weight, std=0.01)
    return Called(forward, **parts, scales=nn.Parameter(torch.ones(2))), (
        features(n, c, side, side),
        features(n, c, side // 2, side // 2),
    )


@problem(
    "Ultralytics YOLOv8 head: distances by softmax over bins, boxes around anchors",
    dict(n=32, anchors=8400),
    dict(n=2, anchors=21),
    "infer f32, infer bf16, train bf16",
)
def distance_bins(n, anchors):
    def forward(m, x, points, strides):
        box, label = x.split((64, 80), 1)
        bins = box.view(n, 4, 16, anchors).transpose(2, 1).softmax(1)
        left_top, right_bottom = F.conv2d(bins, m.places).view(n, 4, anchors).chunk(2, 1)
        first, second = points - left_top, points + right_bottom
        boxes = torch.cat(((first + second) / 2, second - first), 1) * strides
        return torch.cat((boxes, label.sigmoid()), 1)

    module = Called(forward)
    module.register_buffer("places", torch.arange(16.0).view(1, 16, 1, 1))
    points = torch.rand(2, anchors) * 80
    return module, (features(n, 144, anchors), points, torch.full((1, anchors), 8.0))


@problem(
    "Mask2Former head: masks by einsum of queries and pixels, hidden places for attention",
    dict(n=8, queries=100, width=256, side=96),
    dict(n=2, queries=5, width=16, side=8),
)
def mask_head(n, queries, width, side):
    def forward(m, x, pixels):
        h = m.norm(x).transpose(0, 1)
        masks = torch.einsum("bqc,bchw->bqhw", m.mlp(h), pixels)
        fewer = F.interpolate(masks, size=(side // 2, side // 2), mode="bilinear")
        hidden = (fewer.sigmoid().flatten(2).unsqueeze(1).repeat(1, 8, 1, 1) < 0.5).flatten(0, 1)
        hidden = hidden.masked_fill(hidden.all(-1, keepdim=True), False)
        return m.classes(h), masks, hidden.float().mean(-1)

    layers = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    mlp = nn.Sequential(*layers, nn.Linear(width, width))
    parts = dict(norm=nn.LayerNorm(width), classes=nn.Linear(width, 134))
    return Called(forward, mlp=mlp, **parts), (
        features(queries, n, width),
        features(n, width, side, side),
    )


@problem(
    "StyleGAN2 layer: modulated and demodulated weights, noise, scaled leaky relu",
    dict(n=8, c=256, side=64),
    FEW,
)
def modulated_convolution(n, c, side):
    def forward(m, x, style, noise):
        style = m.affine(style)
        w = m.weight[None] * style[:, None, :, None, None]
        w = w * (w.square().sum(dim=[2, 3, 4]) + 1e-8).rsqrt().reshape(n, -1, 1, 1, 1)
        y = F.conv2d(x.reshape(1, n * c, side, side), w.reshape(n * c, c, 3, 3), None, 1, 1, 1, n)
        y = y.reshape(n, c, side, side).add_(noise * m.strength)
        y = F.leaky_relu(y + m.bias[:, None, None], 0.2) * 2**0.5
        return y.clamp(-256, 256)

    learnt = dict(weight=nn.Parameter(torch.randn(c, c, 3, 3)), bias=nn.Parameter(torch.zeros(c)))
    learnt |= dict(strength=nn.Parameter(torch.full((), 0.1)), affine=nn.Linear(64, c))
    return Called(forward, **learnt), (
        features(n, c, side, side),
        features(n, 64),
        torch.randn(1, 1, side, side),
    )


@problem(
    "SPADE residual half: instance norm with scale and shift of a map, leaky relu",
    dict(n=8, c=128, side=128),
    FEW,
)
def spatial_modulation(n, c, side):
    def forward(m, x, labels):
        normed = F.instance_norm(x)
        shared = F.relu(m.shared(F.interpolate(labels, size=x.shape[2:], mode="nearest")))
        y = normed * (1 + m.gamma(shared)) + m.beta(shared)
        return x + m.conv(F.leaky_relu(y, 2e-1))

    convs = dict(shared=nn.Conv2d(8, 32, 3, padding=1), gamma=nn.Conv2d(32, c, 3, padding=1))
    convs |= dict(beta=nn.Conv2d(32, c, 3, padding=1), conv=nn.Conv2d(c, c, 3, padding=1))
    return Called(forward, **convs), (
        features(n, c, side, side),
        torch.randn(n, 8, side // 2, side // 2),
    )


@problem(
    "ESRGAN: residual dense block, a fifth of it added, pixel shuffle",
    dict(n=8, c=64, side=96),
    FEW,
)
def residual_dense_block(n, c, side):
    def forward(m, x):
        seen = [x]
        for conv in m.convs[:-1]:
            seen.append(F.leaky_relu(conv(torch.cat(seen, 1)), 0.2, inplace=True))
        x = m.convs[-1](torch.cat(seen, 1)) * 0.2 + x
        return F.pixel_shuffle(m.up(x), 2)

    grow = c // 2
    convs = [nn.Conv2d(c + i * grow, grow, 3, padding=1) for i in range(3)]
    convs.append(nn.Conv2d(c + 3 * grow, c, 3, padding=1))
    return Called(forward, convs=nn.ModuleList(convs), up=nn.Conv2d(c, 12, 3, padding=1)), (
        features(n, c, side, side),
    )


@problem(
    "SNGAN discriminator block: weights divided by their spectral norm, summed over places",
    dict(n=64, c=128, side=32),
    FEW,
    BOTH_F32 + ", train bf16",
)
def spectral_normed_block(n, c, side):
    def normed(w, u, v):
        sigma = torch.dot(u, torch.mv(w.flatten(1), v))
        return w / sigma

    def forward(m, x):
        y = F.conv2d(F.relu(x), normed(m.weight1, m.u, m.v), padding=1)
        y = F.conv2d(F.relu(y), normed(m.weight2, m.u, m.v), padding=1)
        y = F.avg_pool2d(y, 2) + F.avg_pool2d(x, 2)
        return m.head(torch.sum(F.relu(y), dim=(2, 3)))

    weights = {k: nn.Parameter(torch.rand(c, c, 3, 3) * 0.1) for k in ("weight1", "weight2")}
    module = Called(forward, **weights, head=nn.Linear(c, 1))
    module.register_buffer("u", torch.full((c,), c**-0.5))
    module.register_buffer("v", torch.full((9 * c,), (9 * c) ** -0.5))
    return module, (features(n, c, side, side),)


class ChannelNorm(nn.Module):
    """NAFNet's LayerNorm2d: over the channels of an image, written out."""

    def __init__(self, c: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (variance + 1e-6).sqrt()
        return self.weight.view(1, -1, 1, 1) * y + self.bias.view(1, -1, 1, 1)


@problem(
    "NAFNet block: norm of channels, simple gates, simplified channel attention",
    dict(n=8, c=64, side=128),
    FEW,
    BOTH,
)
def simple_gates(n, c, side):
    def gate(x):
        a, b = x.chunk(2, dim=1)
        return a * b

    def forward(m, x):
        y = gate(m.conv2(m.conv1(m.norm1(x))))
        y = y * m.channel(F.adaptive_avg_pool2d(y, 1))
        y = x + m.conv3(y) * m.beta
        return y + m.conv5(gate(m.conv4(m.norm2(y)))) * m.gamma

    convs = dict(conv1=nn.Conv2d(c, 2 * c, 1), channel=nn.Conv2d(c, c, 1))
    convs |= dict(conv2=nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c))
    convs |= dict(conv3=nn.Conv2d(c, c, 1), conv4=nn.Conv2d(c, 2 * c, 1), conv5=nn.Conv2d(c, c, 1))
    scales = {k: nn.Parameter(torch.full((1, c, 1, 1), 0.1)) for k in ("beta", "gamma")}
    norms = dict(norm1=ChannelNorm(c), norm2=ChannelNorm(c))
    return Called(forward, **convs, **scales, **norms), (features(n, c, side, side),)
