"""A class for each pixel or voxel: losses and maps of segmentation, and attention of slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import Called, features, problem

TRAINS = "train f32, train bf16"


def classes(count: int, *shape: int, ignored: int | None = None) -> torch.Tensor:
    y = torch.randint(0, count, shape)
    return y if ignored is None else torch.where(torch.rand(shape) < 0.1, ignored, y)


@problem(
    "torchvision's reference training of DeepLabV3: two heads, enlarged, 255 is ignored",
    dict(n=8, c=256, side=64, count=21),
    dict(n=2, c=6, side=4, count=5),
    TRAINS,
)
def deep_lab_loss(n, c, side, count):
    def forward(m, x, y):
        out = F.interpolate(m.out(x), size=y.shape[1:], mode="bilinear", align_corners=False)
        aux = F.interpolate(m.aux(x), size=y.shape[1:], mode="bilinear", align_corners=False)
        losses = [F.cross_entropy(logits, y, ignore_index=255) for logits in (out, aux)]
        return losses[0] + 0.5 * losses[1]

    heads = dict(out=nn.Conv2d(c, count, 1), aux=nn.Conv2d(c, count, 1))
    target = classes(count, n, 8 * side, 8 * side, ignored=255)
    return Called(forward, **heads), (features(n, c, side, side), target)


@problem(
    "transformers SegformerForSemanticSegmentation: batch norm, classifier, enlarged, its loss",
    dict(n=4, c=256, side=128, count=150),
    dict(n=2, c=6, side=4, count=7),
    TRAINS,
)
def segformer_loss(n, c, side, count):
    def forward(m, x, y):
        logits = m.classifier(F.relu(m.norm(m.fuse(x))))
        logits = F.interpolate(logits, size=y.shape[-2:], mode="bilinear", align_corners=False)
        return nn.CrossEntropyLoss(ignore_index=255)(logits, y)

    parts = dict(fuse=nn.Conv2d(c, c, 1, bias=False), norm=nn.BatchNorm2d(c))
    target = classes(count, n, 4 * side, 4 * side, ignored=255)
    return Called(forward, **parts, classifier=nn.Conv2d(c, count, 1)), (
        features(n, c, side, side),
        target,
    )


@problem(
    "nnU-Net's loss of volumes: Dice of the softmax and weighted cross entropy",
    dict(n=2, c=32, side=96, count=4),
    dict(n=2, c=4, side=4, count=3),
    TRAINS,
)
def dice_and_cross_entropy(n, c, side, count):
    def forward(m, x, y):
        logits = m.head(x)
        probs = logits.softmax(1)
        onehot = F.one_hot(y, count).movedim(-1, 1).to(probs.dtype)
        both = (probs * onehot).sum((0, 2, 3, 4))
        all_of = (probs + onehot).sum((0, 2, 3, 4))
        dice = (2 * both + 1e-5) / (all_of + 1e-5)
        return F.cross_entropy(logits, y, m.weight.to(logits.dtype)) - dice[1:].mean()

    module = Called(forward, head=nn.Conv3d(c, count, 1))
    module.register_buffer("weight", torch.linspace(0.5, 1.5, count))
    return module, (features(n, c, side, side, side), classes(count, n, side, side, side))


@problem(
    "U-Net's loss: cross entropy of each pixel, times a map of weights near borders",
    dict(n=16, c=64, side=388, count=2),
    dict(n=2, c=4, side=5, count=2),
    TRAINS,
)
def border_weighted_loss(n, c, side, count):
    def forward(m, x, y, weights):
        losses = F.cross_entropy(m.head(x), y, reduction="none")
        return (losses * weights).mean()

    inputs = features(n, c, side, side), classes(count, n, side, side), torch.rand(n, side, side)
    return Called(forward, head=nn.Conv2d(c, count, 1)), inputs


@problem(
    "a map of classes and how sure they are: softmax over the classes, its largest",
    dict(n=8, c=64, side=512, count=19),
    dict(n=2, c=4, side=5, count=3),
    "infer f32, infer bf16",
)
def class_map(n, c, side, count):
    def forward(m, x):
        probs = F.softmax(m.head(x), dim=1)
        return probs.max(1)

    return Called(forward, head=nn.Conv2d(c, count, 1)), (features(n, c, side, side),)


@problem(
    "Slot Attention (Locatello et al.): slots compete for each token, weighted mean of the values",
    dict(n=64, slots=11, tokens=4096, width=64),
    dict(n=2, slots=3, tokens=10, width=8),
    "infer bf16, train f32, train bf16",
)
def slot_attention(n, slots, tokens, width):
    def forward(m, x, q):
        x = m.norm(x)
        dots = torch.einsum("bid,bjd->bij", m.q(q), m.k(x)) * width**-0.5
        weights = dots.softmax(dim=1) + 1e-8
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return torch.einsum("bjd,bij->bid", m.v(x), weights)

    parts = {name: nn.Linear(width, width, bias=False) for name in "qkv"}
    return Called(forward, norm=nn.LayerNorm(width), **parts), (
        features(n, tokens, width),
        features(n, slots, width),
    )
