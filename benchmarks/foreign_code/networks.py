"""Whole networks of convolutions, from pixels or latents to a result, in training; the images are
contiguous, as most scripts have them. Some stages have fewer blocks than their models have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.convnets import Bottleneck, conv_norm, double_conv
from benchmarks.foreign_code.diffusion import ResnetBlock
from benchmarks.foreign_code.mixed_precision import under_autocast
from benchmarks.foreign_code.problems import Called, problem

TRAINS, AUTOCAST = "train bf16", "train f32"
FEW = dict(n=2, side=32)


class Strided(nn.Module):
    """The first bottleneck of a stage, with a projection beside it."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = conv_norm(inner, outer // 4)
        self.conv2 = conv_norm(outer // 4, outer // 4, 3, stride)
        self.conv3, self.short = conv_norm(outer // 4, outer), conv_norm(inner, outer, 1, stride)

    def forward(self, x):
        y = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.relu(self.conv3(y) + self.short(x))


def stem(c: int) -> list[nn.Module]:
    return [conv_norm(3, c, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]


def head(c: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1000)]


def bottlenecks(c: int) -> list[nn.Module]:
    layers, inner = [], c
    for i in range(4):
        outer = 4 * c << i
        layers += [Strided(inner, outer, 1 if i == 0 else 2), Bottleneck(outer)]
        inner = outer
    return layers


def autocasting(network: nn.Module, inputs: tuple) -> tuple[nn.Module, tuple]:
    def forward(m, x):
        with under_autocast(x):
            return m.network(x)

    return Called(forward, network=network), inputs


def pixels(n: int, side: int) -> torch.Tensor:
    return torch.randn(n, 3, side, side)


@problem("torchvision resnet50, two blocks a stage", dict(n=256, side=224), FEW, TRAINS)
def resnet_from_pixels(n, side):
    return nn.Sequential(*stem(64), *bottlenecks(64), *head(2048)), (pixels(n, side),)


@problem(
    "torchvision resnet50 under autocast, two blocks a stage", dict(n=256, side=224), FEW, AUTOCAST
)
def resnet_from_pixels_under_autocast(n, side):
    return autocasting(*resnet_from_pixels(n, side))


@problem("torchvision vgg16_bn without its classifier", dict(n=128, side=224), FEW, TRAINS)
def vgg_from_pixels(n, side):
    layers, inner = [], 3
    for outer, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            conv = nn.Conv2d(inner, outer, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
            inner = outer
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, *head(512)), (pixels(n, side),)


class DenseLayer(nn.Module):
    def __init__(self, inner: int, growth: int):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inner), nn.Conv2d(inner, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x):
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat((x, self.conv2(F.relu(self.norm2(y)))), 1)


@problem("torchvision densenet121, three layers a block", dict(n=256, side=224), FEW, TRAINS)
def densenet_from_pixels(n, side):
    layers, c = stem(64), 64
    for last in (False, False, True):
        for _ in range(3):
            layers.append(DenseLayer(c, 32))
            c += 32
        norm = nn.BatchNorm2d(c), nn.ReLU(inplace=True)
        layers += norm if last else (*norm, nn.Conv2d(c, c // 2, 1, bias=False), nn.AvgPool2d(2))
        c = c if last else c // 2
    return nn.Sequential(*layers, *head(c)), (pixels(n, side),)


class Aggregated(nn.Module):
    """ResNeXt's block: the convolution of 3 × 3 has 32 groups."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = conv_norm(inner, outer // 2)
        self.conv2 = conv_norm(outer // 2, outer // 2, 3, stride, groups=32)
        self.conv3 = conv_norm(outer // 2, outer)
        self.short = None if inner == outer else conv_norm(inner, outer, 1, stride)

    def forward(self, x):
        y = self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


@problem("torchvision resnext50_32x4d, two blocks a stage", dict(n=128, side=224), FEW, TRAINS)
def resnext_from_pixels(n, side):
    layers, inner = stem(64), 64
    for i in range(4):
        outer = 256 << i
        layers += [Aggregated(inner, outer, 1 if i == 0 else 2), Aggregated(outer, outer, 1)]
        inner = outer
    return nn.Sequential(*layers, *head(2048)), (pixels(n, side),)


@problem("milesial/Pytorch-UNet: three levels", dict(n=16, side=256), FEW, f"{TRAINS}, {AUTOCAST}")
def unet_from_pixels(n, side):
    def forward(m, x):
        first = m.down[0](x)
        second = m.down[1](F.max_pool2d(first, 2))
        x = m.down[2](F.max_pool2d(second, 2))
        x = m.merge[0](torch.cat((second, m.up[0](x)), 1))
        return m.last(m.merge[1](torch.cat((first, m.up[1](x)), 1)))

    down = nn.ModuleList([double_conv(3, 64), double_conv(64, 128), double_conv(128, 256)])
    up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in (128, 64))
    merge = nn.ModuleList([double_conv(256, 128), double_conv(128, 64)])
    module = Called(forward, down=down, up=up, merge=merge, last=nn.Conv2d(64, 2, 1))
    return module, (pixels(n, side),)


@problem("milesial/Pytorch-UNet under autocast: three levels", dict(n=16, side=256), FEW, AUTOCAST)
def unet_from_pixels_under_autocast(n, side):
    return autocasting(*unet_from_pixels(n, side))


class C2f(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.first, self.last = silu(c, c), silu(2 * c, c)
        self.inner = nn.ModuleList(
            nn.Sequential(silu(c // 2, c // 2, 3), silu(c // 2, c // 2, 3)) for _ in range(2)
        )

    def forward(self, x):
        y = [*self.first(x).chunk(2, 1)]
        for part in self.inner:
            y.append(y[-1] + part(y[-1]))
        return self.last(torch.cat(y, 1))


def silu(inner: int, outer: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(conv_norm(inner, outer, kernel, stride), nn.SiLU(inplace=True))


@problem("Ultralytics YOLOv8: the first three stages of the backbone", dict(n=128, side=320), FEW,
         TRAINS)  # fmt: skip
def yolo_from_pixels(n, side):
    layers = [silu(3, 32, 3, 2)]
    for c in (64, 128, 256):
        layers += [silu(c // 2, c, 3, 2), C2f(c)]
    return nn.Sequential(*layers), (pixels(n, side),)


class Inverted(nn.Module):
    """MobileNetV2's block: expanded, by channels, projected."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        wide, self.same = 6 * inner, inner == outer and stride == 1
        self.body = nn.Sequential(
            conv_norm(inner, wide), nn.ReLU6(inplace=True),
            conv_norm(wide, wide, 3, stride, groups=wide), nn.ReLU6(inplace=True),
            conv_norm(wide, outer),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x) if self.same else self.body(x)


@problem("torchvision mobilenet_v2, two blocks a width", dict(n=256, side=224), FEW, TRAINS)
def mobilenet_from_pixels(n, side):
    layers, inner = [conv_norm(3, 32, 3, 2), nn.ReLU6(inplace=True)], 32
    for outer in (24, 32, 64, 96):
        layers += [Inverted(inner, outer, 2 if outer != 96 else 1), Inverted(outer, outer, 1)]
        inner = outer
    return nn.Sequential(*layers, *head(inner)), (pixels(n, side),)


@problem("diffusers UNet2DModel, of latents: two levels", dict(n=64, side=64),
         dict(n=2, side=8), TRAINS)  # fmt: skip
def diffusion_from_latents(n, side):
    def forward(m, x):
        first = m.down[0](m.first(x))
        x = m.middle(m.down[1](m.shrink(first)))
        x = m.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = m.up(torch.cat((x, first), 1).mul(0.5)[:, :320] + first)
        return m.last(F.silu(m.norm(x)))

    parts = dict(first=nn.Conv2d(4, 320, 3, padding=1), shrink=nn.Conv2d(320, 320, 3, 2, 1))
    parts |= dict(down=nn.ModuleList(ResnetBlock(320) for _ in range(2)), up=ResnetBlock(320))
    parts |= dict(middle=ResnetBlock(320), grow=nn.Conv2d(320, 320, 3, padding=1))
    parts |= dict(norm=nn.GroupNorm(32, 320), last=nn.Conv2d(320, 4, 3, padding=1))
    return Called(forward, **parts), (torch.randn(n, 4, side, side),)


@problem("torchvision's fcn_resnet50 and its loss, two blocks a stage", dict(n=32, side=384), FEW,
         TRAINS)  # fmt: skip
def segmentation_from_pixels(n, side):
    def forward(m, x, target):
        logits = m.classifier(m.features(x))
        logits = F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(logits.float(), target, ignore_index=255)

    classifier = conv_norm(1024, 256, 3), nn.ReLU(), nn.Conv2d(256, 21, 1)
    features = nn.Sequential(*stem(64), *bottlenecks(64)[:6])
    target = torch.randint(0, 21, (n, side, side))
    module = Called(forward, features=features, classifier=nn.Sequential(*classifier))
    return module, (pixels(n, side), target)
