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


@problem(
    "insightface ArcFace: cosines, an angular margin for the label, scaled cross entropy",
    dict(rows=4096, n=512),
    dict(rows=6, n=16),
    TRAINING,
)
def angular_margin_loss(rows, n):
    words = 10 * n

    def loss(m, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(m.weight)).clamp(-1 + 1e-7, 1 - 1e-7)
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
        phi = cosine * 0.8776 - sine * 0.4794
        phi = torch.where(cosine > -0.8776, phi, cosine - 0.2397)
        one_hot = torch.zeros_like(cosine).scatter_(1, y.view(-1, 1), 1)
        logits = ((one_hot * phi) + ((1.0 - one_hot) * cosine)) * 64
        return F.cross_entropy(logits, y)

    return Called(loss, weight=torch.nn.Parameter(torch.randn(words, n))), (
        features(rows, n),
        labels(rows, words),
    )


@problem(
    "Barlow Twins: batch norm without weights, cross-correlation, off its diagonal",
    dict(rows=4096, n=2048),
    FEW_PAIRS,
    TRAINING,
)
def barlow_twins_loss(rows, n):
    def loss(m, a, b):
        c = m.norm(a).T @ m.norm(b)
        c = c.div(rows)
        on = torch.diagonal(c).add(-1).pow(2).sum()
        off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].pow(2).sum()
        return on + 0.0051 * off

    return Called(loss, norm=torch.nn.BatchNorm1d(n, affine=False)), (
        features(rows, n),
        features(rows, n),
    )


@problem(
    "VICReg: invariance, standard deviations by a hinge, covariances",
    dict(rows=4096, n=2048),
    FEW_PAIRS,
    TRAINING,
)
def variance_covariance_loss(rows, n):
    def loss(m, x, y):
        apart = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std_x, std_y = torch.sqrt(x.var(dim=0) + 1e-4), torch.sqrt(y.var(dim=0) + 1e-4)
        std = torch.mean(F.relu(1 - std_x)) / 2 + torch.mean(F.relu(1 - std_y)) / 2
        cov = (x.T @ x) / (rows - 1)
        cov = cov.masked_fill(torch.eye(n, dtype=torch.bool, device=x.device), 0.0)
        return 25.0 * apart + 25.0 * std + cov.pow_(2).sum().div(n)

    return Called(loss), (features(rows, n), features(rows, n))


@problem(
    "DINO: centred and sharpened teacher, pairs of views, an EMA of the centre",
    dict(rows=256, n=65536),
    dict(rows=2, n=40),
    TRAINING,
)
def self_distillation_loss(rows, n):
    def loss(m, student, teacher, centre):
        student = (student / 0.1).chunk(4)
        sharp = F.softmax((teacher - centre) / 0.04, dim=-1).detach().chunk(2)
        total, terms = 0, 0
        for i, q in enumerate(sharp):
            for v, s in enumerate(student):
                if v != i:
                    total += torch.sum(-q * F.log_softmax(s, dim=-1), dim=-1).mean()
                    terms += 1
        batch = torch.sum(teacher, dim=0, keepdim=True) / len(teacher)
        return total / terms, centre * 0.9 + batch * (1 - 0.9)

    return Called(loss), (features(4 * rows, n), torch.randn(2 * rows, n), torch.zeros(1, n))


@problem(
    "open_clip SigLIP: log-sigmoid of signed similarities, learnt scale and bias",
    dict(rows=8192, n=768),
    FEW_PAIRS,
    TRAINING,
)
def sigmoid_contrastive_loss(rows, n):
    def loss(m, image, text):
        image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        logits = m.scale.exp() * image @ text.T + m.bias
        eye = 2 * torch.eye(rows, device=image.device, dtype=image.dtype)
        return (
            -F.logsigmoid(
                (eye - torch.ones((rows, rows), device=image.device, dtype=image.dtype)) * logits
            ).sum()
            / rows
        )

    learnt = dict(scale=torch.nn.Parameter(torch.tensor(2.3)))
    return Called(loss, **learnt, bias=torch.nn.Parameter(torch.tensor(-10.0))), (
        features(rows, n),
        features(rows, n),
    )


@problem(
    "PaLM / T5X style: capped logits of 50257 words, cross entropy by hand, z-loss",
    dict(rows=4096, n=50257),
    dict(rows=6, n=41),
    TRAINING,
)
def z_loss(rows, n):
    def loss(m, x, y):
        logits = 30.0 * torch.tanh(x.float() / 30.0)
        log_z = torch.logsumexp(logits, dim=-1)
        at = torch.gather(logits, -1, y[:, None]).squeeze(-1)
        keep = (y != 0).float()
        nll = (log_z - at) * keep
        return (nll + 1e-4 * log_z.square() * keep).sum() / keep.sum().clamp(min=1)

    return Called(loss), (features(rows, n), labels(rows, n))


@problem(
    "SupCon: similarities less their detached maximum, masked exponents, mean of positives",
    dict(rows=4096, n=128),
    FEW_PAIRS,
    TRAINING,
)
def supervised_contrastive_loss(rows, n):
    def loss(m, x, y):
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-12)
        dots = torch.div(torch.matmul(x, x.T), 0.07)
        logits = dots - torch.max(dots, dim=1, keepdim=True)[0].detach()
        mask = torch.eq(y[:, None], y[None]).to(x.dtype)
        others = torch.scatter(
            torch.ones_like(mask), 1, torch.arange(rows, device=x.device).view(-1, 1), 0
        )
        mask = mask * others
        exps = torch.exp(logits) * others
        log_prob = logits - torch.log(exps.sum(1, keepdim=True) + 1e-12)
        return -((mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)).mean()

    return Called(loss), (features(rows, n), labels(rows, max(2, rows // 64)))


@problem(
    "timm AsymmetricLossMultiLabel: shifted negatives, two focusing powers",
    dict(rows=1048576, n=80),
    FEW,
    TRAINING,
)
def asymmetric_loss(rows, n):
    def loss(m, x, y):
        positive = torch.sigmoid(x)
        negative = (1 - positive + 0.05).clamp(max=1)
        total = y * torch.log(positive.clamp(min=1e-8))
        total = total + (1 - y) * torch.log(negative.clamp(min=1e-8))
        pt = positive * y + negative * (1 - y)
        gamma = 1 * y + 4 * (1 - y)
        return -(total * torch.pow(1 - pt, gamma)).sum()

    return Called(loss), (features(rows, n), (torch.rand(rows, n) < 0.05).float())


@problem(
    "torchvision generalized_box_iou_loss",
    dict(rows=8388608),
    dict(rows=9),
    "infer f32, train f32, train bf16",
)
def generalized_iou_loss(rows):
    def loss(m, boxes, target):
        x1, y1, x2, y2 = boxes.unbind(dim=-1)
        a1, b1, a2, b2 = target.unbind(dim=-1)
        left, top, right, low = (
            torch.max(x1, a1),
            torch.max(y1, b1),
            torch.min(x2, a2),
            torch.min(y2, b2),
        )
        both = torch.zeros_like(x1)
        mask = (low > top) & (right > left)
        both = torch.where(mask, (right - left) * (low - top), both)
        union = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - both
        hull = (torch.max(x2, a2) - torch.min(x1, a1)) * (torch.max(y2, b2) - torch.min(y1, b1))
        iou = both / (union + 1e-7)
        return (1 - (iou - (hull - union) / (hull + 1e-7))).mean()

    def boxes():
        first = torch.rand(rows, 2) * 4
        return torch.cat((first, first + 1 + torch.rand(rows, 2)), dim=1)

    return Called(loss), (boxes().requires_grad_(), boxes())


@problem(
    "pytorch-msssim: structural similarity by a separable gaussian",
    dict(n=16, side=512),
    dict(n=2, side=14),
    "infer f32, train f32",
)
def structural_similarity(n, side):
    def loss(m, x, y):
        def blur(z):
            z = F.conv2d(z, m.window.transpose(2, 3), groups=3)
            return F.conv2d(z, m.window, groups=3)

        mu1, mu2 = blur(x), blur(y)
        mu1_sq, mu2_sq, mu12 = mu1.pow(2), mu2.pow(2), mu1 * mu2
        sigma1, sigma2 = blur(x * x) - mu1_sq, blur(y * y) - mu2_sq
        cs = (2 * (blur(x * y) - mu12) + 9e-4) / (sigma1 + sigma2 + 9e-4)
        ssim = ((2 * mu12 + 1e-4) / (mu1_sq + mu2_sq + 1e-4)) * cs
        return 1 - torch.flatten(ssim, 2).mean(-1).relu().mean()

    module = Called(loss)
    window = torch.exp(-((torch.arange(11.0) - 5) ** 2) / 4.5)
    module.register_buffer("window", (window / window.sum()).expand(3, 1, 1, 11).contiguous())
    return module, (features(n, 3, side, side), torch.rand(n, 3, side, side))


@problem(
    "mixture density network: logsumexp of gaussians and log-softmax weights",
    dict(rows=1048576, n=32),
    dict(rows=6, n=4),
    TRAINING,
)
def mixture_density_loss(rows, n):
    def loss(m, x, y):
        pi, mu, log_sigma = x.chunk(3, dim=-1)
        log_pi = F.log_softmax(pi, dim=-1)
        log_sigma = torch.clamp(log_sigma, -5, 2)
        z = (y.unsqueeze(-1) - mu) / torch.exp(log_sigma)
        log_prob = -0.5 * (z**2) - log_sigma - 0.9189385332046727
        return -torch.logsumexp(log_pi + log_prob, dim=-1).mean()

    return Called(loss), (features(rows, 3 * n), torch.randn(rows))
