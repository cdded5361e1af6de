"""Networks for images, trained in channels-last, as torch's guide to performance has it: with
weights in 16 bits, and with weights in fp32 under autocast.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.foreign_code import convnets
from benchmarks.foreign_code.convnets import FEW
from benchmarks.foreign_code.mixed_precision import under_autocast
from benchmarks.foreign_code.problems import Called, problem

TRAINS, AUTOCAST = "train bf16", "train f32"
LAST = torch.channels_last


def channels_last(found):
    """A module and its images in that format."""
    module, images = found
    images = (t.detach().to(memory_format=LAST).requires_grad_(t.requires_grad) for t in images)
    return module.to(memory_format=LAST), tuple(images)


def in_16_bits(found):
    """A module in fp32 that runs under autocast."""
    module, images = channels_last(found)

    def forward(m, x):
        with under_autocast(x):
            return m.network(x)

    return Called(forward, network=module), images


@problem(
    "torchvision resnet18 basic blocks, channels-last", dict(n=128, c=64, side=56), FEW, TRAINS
)
def basic_blocks_channels_last(n, c, side):
    return channels_last(convnets.resnet_basic_blocks(n, c, side))


@problem(
    "torchvision resnet50 bottlenecks, channels-last", dict(n=128, c=256, side=56), FEW, TRAINS
)
def bottlenecks_channels_last(n, c, side):
    return channels_last(convnets.resnet_bottlenecks(n, c, side))


@problem(
    "torchvision resnet50 bottlenecks, under autocast", dict(n=128, c=1024, side=14), FEW, AUTOCAST
)
def bottlenecks_under_autocast(n, c, side):
    return in_16_bits(convnets.resnet_bottlenecks(n, c, side))


@problem(
    "torchvision resnet stem, channels-last", dict(n=128, side=224), dict(n=2, side=32), TRAINS
)
def stem_channels_last(n, side):
    return channels_last(convnets.resnet_stem(n, side))


@problem(
    "timm efficientnet MBConv, channels-last",
    dict(n=64, c=40, side=56),
    FEW,
    f"{TRAINS}, {AUTOCAST}",
)
def mbconv_channels_last(n, c, side):
    return in_16_bits(convnets.mbconv(n, c, side))


@problem("Ultralytics YOLO C2f block, channels-last", dict(n=64, c=128, side=40), FEW, TRAINS)
def yolo_channels_last(n, c, side):
    return channels_last(convnets.yolo_c2f(n, c, side))


@problem(
    "torchvision densenet121 dense layers, channels-last", dict(n=64, c=128, side=28), FEW, TRAINS
)
def dense_layers_channels_last(n, c, side):
    return channels_last(convnets.dense_layers(n, c, side))


@problem(
    "torchvision mobilenet_v2 inverted residual, channels-last",
    dict(n=128, c=24, side=56),
    FEW,
    TRAINS,
)
def inverted_residual_channels_last(n, c, side):
    return channels_last(convnets.inverted_residual(n, c, side))


@problem("a step of a U-Net: two convolutions", dict(n=16, c=64, side=256), FEW, AUTOCAST)
def double_convolution_under_autocast(n, c, side):
    parts = (
        part
        for _ in range(2)
        for part in (nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True))
    )
    images = torch.randn(n, c, side, side, requires_grad=True)
    return in_16_bits((nn.Sequential(*parts), (images,)))


@problem(
    "ResNet-18, whole, under autocast",
    dict(n=64, c=64, side=224),
    dict(n=2, c=8, side=32),
    AUTOCAST,
)
def resnet18_under_autocast(n, c, side):
    return in_16_bits(convnets.resnet18(n, c, side))
