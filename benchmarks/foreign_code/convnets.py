"""Blocks of convolutional networks, and small ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import INFERENCE, Called, features, problem

THREE = "infer f32, infer bf16, train bf16"
FEW = dict(n=2, c=16, side=8)


def conv_norm(inner: int, outer: int, kernel: int = 1, stride: int = 1, groups: int = 1):
    conv = nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outer))


class BasicBlock(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv1, self.conv2 = conv_norm(c, c, 3), conv_norm(c, c, 3)

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.conv1(x))) + x)


class Bottleneck(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv1 = conv_norm(c, c // 4)
        self.conv2, self.conv3 = conv_norm(c // 4, c // 4, 3), conv_norm(c // 4, c)

    def forward(self, x):
        y = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.conv3(y) + x)


@problem("torchvision resnet18 basic blocks", dict(n=64, c=64, side=56), FEW, THREE)
def resnet_basic_blocks(n, c, side):
    return nn.Sequential(BasicBlock(c), BasicBlock(c)), (features(n, c, side, side),)


@problem("torchvision resnet50 bottlenecks", dict(n=64, c=256, side=56), FEW, THREE)
def resnet_bottlenecks(n, c, side):
    return nn.Sequential(Bottleneck(c), Bottleneck(c)), (features(n, c, side, side),)


@problem("torchvision resnet stem", dict(n=64, side=224), dict(n=2, side=32), THREE)
def resnet_stem(n, side):
    stem = conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem), (torch.randn(n, 3, side, side),)


class ConvNeXtBlock(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.depthwise = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        self.gamma = nn.Parameter(torch.full((c,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.mlp(y) * self.gamma).permute(0, 3, 1, 2)


@problem("timm convnext block", dict(n=32, c=192, side=28), FEW, THREE)
def convnext_block(n, c, side):
    return nn.Sequential(ConvNeXtBlock(c), ConvNeXtBlock(c)), (features(n, c, side, side),)


class ChannelsFirstNorm(nn.Module):
    """LayerNorm with data_format="channels_first"."""

    def __init__(self, c: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@problem(
    "facebookresearch ConvNeXt: stem and downsampling, norms channels-first",
    dict(n=32, c=96, side=224),
    dict(n=2, c=8, side=32),
    THREE,
)
def convnext_downsampling(n, c, side):
    stem = nn.Conv2d(3, c, 4, 4), ChannelsFirstNorm(c), ConvNeXtBlock(c)
    down = ChannelsFirstNorm(c), nn.Conv2d(c, 2 * c, 2, 2), ConvNeXtBlock(2 * c)
    return nn.Sequential(*stem, *down), (torch.randn(n, 3, side, side),)


@problem("ConvNeXt V2: global response norm after gelu", dict(n=128, side=28, c=768), FEW)
def global_response_norm(n, c, side):
    def forward(m, x):
        x = F.gelu(x)
        gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return m.gamma * (x * (gx / (gx.mean(dim=-1, keepdim=True) + 1e-6))) + m.beta + x

    vectors = {name: nn.Parameter(torch.randn(1, 1, 1, c)) for name in ("gamma", "beta")}
    return Called(forward, **vectors), (features(n, side, side, c),)


class SqueezeExcite(nn.Module):
    def __init__(self, c: int, inner: int):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(c, inner, 1), nn.Conv2d(inner, c, 1)

    def forward(self, x):
        s = F.silu(self.reduce(x.mean((2, 3), keepdim=True)))
        return x * torch.sigmoid(self.expand(s))


@problem("timm efficientnet MBConv with squeeze-excite", dict(n=64, c=40, side=56), FEW, THREE)
def mbconv(n, c, side):
    def forward(m, x):
        y = F.silu(m.depthwise(F.silu(m.expand(x))))
        return m.project(m.se(y)) + x

    wide = 6 * c
    parts = dict(expand=conv_norm(c, wide), depthwise=conv_norm(wide, wide, 5, groups=wide))
    parts |= dict(se=SqueezeExcite(wide, max(1, c // 4)), project=conv_norm(wide, c))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("torchvision mobilenet_v2 inverted residual", dict(n=128, c=24, side=56), FEW, THREE)
def inverted_residual(n, c, side):
    wide = 6 * c
    parts = conv_norm(c, wide), nn.ReLU6(), conv_norm(wide, wide, 3, groups=wide), nn.ReLU6()
    body = nn.Sequential(*parts, conv_norm(wide, c))
    return Called(lambda m, x: x + m.body(x), body=body), (features(n, c, side, side),)


@problem("torchvision mobilenet_v3 block: hardswish", dict(n=256, c=80, side=28), FEW)
def mobilenet_v3_block(n, c, side):
    wide = 4 * c
    depthwise = conv_norm(wide, wide, 3, groups=wide)
    parts = conv_norm(c, wide), nn.Hardswish(), depthwise, nn.Hardswish()
    body = nn.Sequential(*parts, conv_norm(wide, c))
    return Called(lambda m, x: x + m.body(x), body=body), (features(n, c, side, side),)


@problem("torchvision densenet121 dense layers", dict(n=64, c=128, side=28), FEW, THREE)
def dense_layers(n, c, side):
    def forward(m, x):
        for layer in m.layers:
            x = torch.cat((x, layer(x)), dim=1)
        return x

    def layer(inner):
        first = nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, 128, 1, bias=False)
        last = nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 32, 3, padding=1, bias=False)
        return nn.Sequential(*first, *last)

    layers = nn.ModuleList(layer(c + 32 * i) for i in range(3))
    return Called(forward, layers=layers), (features(n, c, side, side),)


def double_conv(inner: int, outer: int) -> nn.Sequential:
    parts = conv_norm(inner, outer, 3), nn.ReLU(), conv_norm(outer, outer, 3), nn.ReLU()
    return nn.Sequential(*parts)


@problem("U-Net: one level down and up again", dict(n=8, c=32, side=256), FEW)
def unet_level(n, c, side):
    def forward(m, x):
        x = m.first(x)
        y = m.up(m.middle(F.max_pool2d(x, 2)))
        return m.last(torch.cat((x, y), dim=1))

    parts = dict(first=double_conv(c, c), middle=double_conv(c, 2 * c), last=double_conv(2 * c, c))
    parts["up"] = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("torchvision vgg16_bn: two stages", dict(n=16, c=64, side=224), FEW, THREE)
def vgg_stages(n, c, side):
    parts = double_conv(3, c), nn.MaxPool2d(2), double_conv(c, 2 * c), nn.MaxPool2d(2)
    return nn.Sequential(*parts), (torch.randn(n, 3, side, side),)


@problem("torchvision squeezenet fire module", dict(n=128, c=128, side=55), FEW, INFERENCE)
def fire_module(n, c, side):
    def forward(m, x):
        x = F.relu(m.squeeze(x))
        return torch.cat((F.relu(m.narrow(x)), F.relu(m.wide(x))), 1)

    parts = dict(squeeze=nn.Conv2d(c, c // 8, 1), narrow=nn.Conv2d(c // 8, c, 1))
    wide = nn.Conv2d(c // 8, c, 3, padding=1)
    return Called(forward, **parts, wide=wide), (features(n, c, side, side),)


@problem("torchvision shufflenet_v2 unit", dict(n=512, c=116, side=28), FEW)
def shuffle_unit(n, c, side):
    def forward(m, x):
        left, right = x.chunk(2, dim=1)
        y = torch.cat((left, m.body(right)), dim=1)
        return y.view(len(y), 2, c // 2, side, side).transpose(1, 2).reshape(len(y), c, side, side)

    half = c // 2
    parts = conv_norm(half, half), nn.ReLU(), conv_norm(half, half, 3, groups=half)
    body = nn.Sequential(*parts, conv_norm(half, half), nn.ReLU())
    return Called(forward, body=body), (features(n, c, side, side),)


@problem("Ultralytics YOLO C2f block: conv → batch_norm → silu", dict(n=64, c=128, side=40), FEW)
def yolo_c2f(n, c, side):
    def forward(m, x):
        left, right = m.first(x).chunk(2, dim=1)
        y = right + m.inner(right)
        return m.last(torch.cat((left, right, y), dim=1))

    def silu(*sizes):
        return nn.Sequential(conv_norm(*sizes), nn.SiLU())

    inner = nn.Sequential(silu(c // 2, c // 2, 3), silu(c // 2, c // 2, 3))
    parts = dict(first=silu(c, c), inner=inner, last=silu(3 * c // 2, c))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("ResNet-18, whole", dict(n=64, c=64, side=224), dict(n=2, c=8, side=32), THREE)
def resnet18(n, c, side):
    class Down(nn.Module):
        def __init__(self, inner, outer):
            super().__init__()
            self.conv1, self.conv2 = conv_norm(inner, outer, 3, 2), conv_norm(outer, outer, 3)
            self.short = conv_norm(inner, outer, 1, 2)

        def forward(self, x):
            return F.relu(self.conv2(F.relu(self.conv1(x))) + self.short(x))

    layers = [conv_norm(3, c, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), BasicBlock(c), BasicBlock(c)]
    for i in range(3):
        layers += [Down(c << i, c << i + 1), BasicBlock(c << i + 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * c, 1000)]
    return nn.Sequential(*layers), (torch.randn(n, 3, side, side),)


@problem(
    "ResNet-D style: blur pooling and a squeeze-excite of gelu", dict(n=32, c=128, side=56), FEW
)
def gated_gelu_pool(n, c, side):
    def forward(m, x):
        y = F.gelu(m.norm(m.conv(x)))
        return F.avg_pool2d(m.se(y), 2)

    parts = dict(conv=nn.Conv2d(c, c, 3, padding=1), norm=nn.GroupNorm(8, c))
    return Called(forward, **parts, se=SqueezeExcite(c, c // 4)), (features(n, c, side, side),)
