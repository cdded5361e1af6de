"""Losses, from logits or embeddings to one number."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.foreign_code.problems import ALL, TRAINING, Called, features, problem

LOGITS, FEW = dict(rows=8192, n=32000), dict(rows=6, n=40)
PAIRS, FEW_PAIRS = dict(rows=65536, n=1024), dict(rows=6, n=16)


def labels(rows: int, n: int) -> torch.Tensor:
    return torch.randint(n, (rows,))


@problem("KernelBench level 1 style: cross entropy", LOGITS, FEW, TRAINING)
def cross_entropy(rows, n):
    return Called(lambda m, x, y: F.cross_entropy(x, y)), (features(rows, n), labels(rows, n))


@problem("nanoGPT style: cross entropy of logits in fp32, ignored labels", LOGITS, FEW)
def cross_entropy_with_ignored(rows, n):
    def loss(m, x, y):
        return F.cross_entropy(x.float(), y, ignore_index=-100)

    y = torch.where(torch.rand(rows) < 0.1, -100, labels(rows, n))
    return Called(loss), (features(rows, n), y)


@problem("timm LabelSmoothingCrossEntropy", dict(rows=65536, n=1000), FEW, TRAINING)
def label_smoothing(rows, n):
    def loss(m, x, y):
        logp = F.log_softmax(x, dim=-1)
        nll = -logp.gather(-1, y[:, None]).squeeze(1)
        return (0.9 * nll - 0.1 * logp.mean(dim=-1)).mean()

    return Called(loss), (features(rows, n), labels(rows, n))


@problem("knowledge distillation: KL divergence at a temperature", LOGITS, FEW, "train bf16")
def distillation(rows, n):
    def loss(m, student, teacher):
        s, t = F.log_softmax(student / 2, dim=-1), F.softmax(teacher / 2, dim=-1)
        return F.kl_div(s, t, reduction="batchmean") * 4

    return Called(loss), (features(rows, n), torch.randn(rows, n))


@problem("KernelBench level 1 style: mean squared error", PAIRS, FEW_PAIRS, ALL)
def mse_loss(rows, n):
    return Called(lambda m, x, y: torch.mean((x - y) ** 2)), (
        features(rows, n),
        torch.randn(rows, n),
    )


@problem("KernelBench level 1 style: smooth l1 loss", PAIRS, FEW_PAIRS, TRAINING)
def smooth_l1_loss(rows, n):
    return Called(lambda m, x, y: F.smooth_l1_loss(x, y)), (features(rows, n), torch.randn(rows, n))


@problem("KernelBench level 1 style: hinge loss", PAIRS, FEW_PAIRS, "infer f32, train f32")
def hinge_loss(rows, n):
    def loss(m, x, y):
        return torch.mean(torch.clamp(1 - x * y, min=0))

    return Called(loss), (features(rows, n), torch.randn(rows, n).sign())


@problem("KernelBench level 1 style: cosine similarity loss", PAIRS, FEW_PAIRS, TRAINING)
def cosine_loss(rows, n):
    def loss(m, x, y):
        return torch.mean(1 - F.cosine_similarity(x, y, dim=1))

    return Called(loss), (features(rows, n), features(rows, n))


@problem("sentence-transformers style: triplet loss by cosine", PAIRS, FEW_PAIRS, TRAINING)
def triplet_cosine_loss(rows, n):
    def loss(m, anchor, positive, negative):
        near, far = (1 - F.cosine_similarity(anchor, y) for y in (positive, negative))
        return F.relu(near - far + 0.5).mean()

    return Called(loss), tuple(features(rows, n) for _ in range(3))


@problem(
    "CLIP style: contrastive loss of normalised embeddings",
    dict(rows=8192, n=512),
    FEW_PAIRS,
    "train f32, train bf16",
)
def contrastive_loss(rows, n):
    def loss(m, image, text):
        image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        logits = 14.3 * image @ text.t()
        target = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    return Called(loss), (features(rows, n), features(rows, n))


@problem("torchvision sigmoid_focal_loss", dict(rows=131072, n=91), FEW, "train f32")
def focal_loss(rows, n):
    def loss(m, x, y):
        p = torch.sigmoid(x)
        ce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
        p_t = p * y + (1 - p) * (1 - y)
        return ((0.25 * y + 0.75 * (1 - y)) * ce * (1 - p_t) ** 2).sum() / len(x)

    return Called(loss), (features(rows, n), (torch.rand(rows, n) < 0.01).float())


@problem(
    "monai DiceLoss", dict(n=16, classes=4, side=96), dict(n=2, classes=3, side=4), "train f32"
)
def dice_loss(n, classes, side):
    def loss(m, x, y):
        p = torch.softmax(x, dim=1)
        both, sizes = (p * y).sum((2, 3, 4)), (p + y).sum((2, 3, 4))
        return 1 - ((2 * both + 1e-5) / (sizes + 1e-5)).mean()

    target = F.one_hot(torch.randint(classes, (n, side, side, side)), classes)
    return Called(loss), (features(n, classes, side, side, side), target.movedim(-1, 1).float())
