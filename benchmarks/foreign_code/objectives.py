"""What training minimises beside cross entropy: rankings, boxes, returns, teachers, likelihoods."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import (
    ALL,
    BOTH_F32,
    INFERENCE,
    TRAINING,
    Called,
    features,
    problem,
)

PAIRS, FEW_PAIRS = dict(rows=4096, n=1024), dict(rows=6, n=16)
MAPS, FEW_MAPS = dict(n=16, classes=80, side=128), dict(n=2, classes=3, side=8)


@problem(
    "MoCo: unit queries and keys, a positive beside a queue of negatives, temperature, label 0",
    dict(rows=1024, n=256, queue=65536),
    dict(rows=4, n=16, queue=12),
    TRAINING,
)
def queue_contrast(rows, n, queue):
    def loss(m, q, k):
        q, k = F.normalize(q, dim=1), F.normalize(k, dim=1)
        positive = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [q, m.queue.clone().detach()])
        logits = torch.cat([positive, negative], dim=1)
        logits = logits / 0.07
        at = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        return F.cross_entropy(logits, at), (logits.argmax(-1) == at).float().mean()

    module = Called(loss)
    module.register_buffer("queue", F.normalize(torch.randn(n, queue), dim=0))
    return module, (features(rows, n), torch.randn(rows, n))


@problem(
    "re-identification: triplets of the hardest pairs of a batch by expanded distances",
    dict(rows=4096, n=2048),
    FEW_PAIRS,
    BOTH_F32,
)
def hardest_triplets(rows, n):
    def loss(m, x, y):
        square = torch.pow(x, 2).sum(1, keepdim=True).expand(rows, rows)
        distances = torch.addmm(square + square.t(), x, x.t(), beta=1, alpha=-2)
        distances = distances.clamp(min=1e-4).sqrt()
        same = y.expand(rows, rows).eq(y.expand(rows, rows).t())
        farthest = distances.masked_fill(~same, -1e4).max(dim=1).values
        nearest = distances.masked_fill(same, 1e4).min(dim=1).values
        return F.margin_ranking_loss(nearest, farthest, torch.ones_like(nearest), margin=0.3)

    return Called(loss), (features(rows, n), torch.arange(rows) // 2 % max(2, rows // 4))


@problem(
    "CenterNet: focal loss of clamped heatmaps, fourth power of what is near, by the positives",
    MAPS,
    FEW_MAPS,
    TRAINING,
)
def heatmap_focal_loss(n, classes, side):
    def loss(m, x, truth):
        x = torch.clamp(x.sigmoid(), min=1e-4, max=1 - 1e-4)
        positive, negative = truth.eq(1).float(), truth.lt(1).float()
        weights = torch.pow(1 - truth, 4)
        hit = torch.log(x) * torch.pow(1 - x, 2) * positive
        missed = torch.log(1 - x) * torch.pow(x, 2) * weights * negative
        return -(hit.sum() + missed.sum()) / positive.sum().clamp(min=1)

    truth = torch.rand(n, classes, side, side)
    truth = torch.where(truth > 0.98, 1.0, truth**4)
    return Called(loss), (features(n, classes, side, side), truth)


@problem(
    "mmdetection: complete IoU of boxes, the angle's weight without gradient",
    dict(rows=2**20),
    dict(rows=16),
    BOTH_F32,
)
def complete_iou(rows):
    def loss(m, boxes, truth):
        x1, y1, w1, h1 = boxes.sigmoid().add(0.1).unbind(-1)
        x2, y2, w2, h2 = truth.unbind(-1)
        wide = torch.min(x1 + w1, x2 + w2) - torch.max(x1, x2)
        high = torch.min(y1 + h1, y2 + h2) - torch.max(y1, y2)
        overlap = wide.clamp(min=0) * high.clamp(min=0)
        iou = overlap / (w1 * h1 + w2 * h2 - overlap + 1e-6)
        cw = torch.max(x1 + w1, x2 + w2) - torch.min(x1, x2)
        ch = torch.max(y1 + h1, y2 + h2) - torch.min(y1, y2)
        apart = (x2 + w2 / 2 - x1 - w1 / 2) ** 2 + (y2 + h2 / 2 - y1 - h1 / 2) ** 2
        v = (4 / math.pi**2) * torch.pow(torch.atan(w2 / h2) - torch.atan(w1 / h1), 2)
        with torch.no_grad():
            alpha = (iou > 0.5).float() * v / (1 - iou + v + 1e-6)
        cious = iou - (apart / (cw**2 + ch**2 + 1e-6) + alpha * v)
        return (1 - cious.clamp(min=-1.0, max=1.0)).mean()

    return Called(loss), (features(rows, 4), torch.rand(rows, 4) + 0.1)


@problem(
    "Lovász-softmax: errors of a class sorted, weights from the sums of what they hide",
    dict(classes=16, pixels=2**18),
    dict(classes=3, pixels=40),
    "train f32",
)
def lovasz_loss(classes, pixels):
    def loss(m, x, y):
        probs = F.softmax(x, dim=0)
        truth = F.one_hot(y, classes).t().type_as(probs)
        errors, at = torch.sort((truth - probs).abs(), 1, descending=True)
        ordered = truth.gather(1, at)
        total = ordered.sum(1, keepdim=True)
        intersection = total - ordered.cumsum(1)
        union = total + (1 - ordered).cumsum(1)
        jaccard = 1.0 - intersection / union
        steps = torch.cat([jaccard[:, :1], jaccard[:, 1:] - jaccard[:, :-1]], dim=1)
        return torch.einsum("cp,cp->c", F.relu(errors), steps).mean()

    return Called(loss), (features(classes, pixels), torch.randint(classes, (pixels,)))


@problem(
    "TRL GKD: generalised Jensen-Shannon divergence of two models at a temperature, masked",
    dict(rows=2048, n=32000),
    dict(rows=6, n=40),
    "train bf16",
)
def jensen_shannon_distillation(rows, n):
    def loss(m, student, teacher, labels):
        student = F.log_softmax(student / 0.9, dim=-1)
        teacher = F.log_softmax(teacher / 0.9, dim=-1)
        beta = 0.5
        mixed = torch.logsumexp(
            torch.stack([student + math.log(1 - beta), teacher + math.log(beta)]), dim=0
        )
        to_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
        to_student = F.kl_div(mixed, student, reduction="none", log_target=True)
        jsd = beta * to_teacher + (1 - beta) * to_student
        keep = labels != -100
        return (jsd * keep.unsqueeze(-1)).sum() / keep.sum()

    labels = torch.where(torch.rand(rows) < 0.2, -100, torch.randint(n, (rows,)))
    labels[0] = 1
    return Called(loss), (features(rows, n), torch.randn(rows, n), labels)


@problem(
    "facebookresearch MAE: patches of an image normed by their mean and variance, masked mean",
    dict(n=128, side=224),
    dict(n=2, side=32),
    TRAINING,
)
def masked_patches_loss(n, side):
    h = side // 16

    def loss(m, images, predicted, mask):
        x = images.reshape(n, 3, h, 16, h, 16)
        x = torch.einsum("nchpwq->nhwpqc", x).reshape(n, h * h, 16**2 * 3)
        mean, var = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True)
        target = (x - mean) / (var + 1.0e-6) ** 0.5
        error = ((predicted - target) ** 2).mean(dim=-1)
        return (error * mask).sum() / mask.sum()

    mask = (torch.rand(n, h * h) < 0.75).float()
    mask[0, 0] = 1
    return Called(loss), (torch.randn(n, 3, side, side), features(n, h * h, 768), mask)


@problem(
    "LPIPS: units along channels, squared difference weighted by 1 × 1, mean of places, two levels",
    dict(n=16, c=128, side=112),
    dict(n=2, c=8, side=8),
)
def perceptual_distance(n, c, side):
    def unit(x):
        return x / (torch.sqrt(torch.sum(x**2, dim=1, keepdim=True)) + 1e-10)

    def loss(m, x, y):
        total = 0
        for level, weight in enumerate(m.lins):
            if level:
                x, y = F.max_pool2d(x, 2), F.max_pool2d(y, 2)
            total = total + weight((unit(x) - unit(y)) ** 2).mean([2, 3], keepdim=True)
        return total

    lins = (nn.Conv2d(c, 1, 1, bias=False) for _ in range(2))
    shape = n, c, side, side
    return Called(loss, lins=nn.ModuleList(lins)), (features(*shape), torch.randn(shape))


@problem(
    "taming-transformers VAE: moments in halves, clamped log-variance, sample, KL, laplace, kernel",
    dict(n=32, c=32, side=128),
    dict(n=2, c=4, side=8),
)
def diagonal_gaussian(n, c, side):
    def loss(m, h, noise, image, reconstruction):
        mean, logvar = torch.chunk(m.quant(h), 2, dim=1)
        logvar = torch.clamp(logvar, -30.0, 20.0)
        std, var = torch.exp(0.5 * logvar), torch.exp(logvar)
        z = mean + std * noise
        kl = 0.5 * torch.sum(torch.pow(mean, 2) + var - 1.0 - logvar, dim=[1, 2, 3])
        rec = torch.abs(image.contiguous() - reconstruction.contiguous())
        nll = rec / torch.exp(m.logvar) + m.logvar
        return m.post_quant(z), torch.sum(nll) / n + 1e-6 * torch.sum(kl) / n

    parts = dict(quant=nn.Conv2d(2 * c, 2 * c, 1), post_quant=nn.Conv2d(c, c, 1))
    parts |= dict(logvar=nn.Parameter(torch.zeros(())))
    image = torch.randn(2, n, 3, side, side)
    return Called(loss, **parts), (
        features(n, 2 * c, side, side),
        torch.randn(n, c, side, side),
        image[0],
        image[1].requires_grad_(),
    )


@problem(
    "allRank: LambdaRank of lists, gains and discounts of all pairs, padded documents masked",
    dict(n=512, items=256),
    dict(n=2, items=6),
    BOTH_F32,
)
def lambda_rank(n, items):
    def loss(m, predicted, truth):
        mask = truth == -1
        predicted = predicted.masked_fill(mask, float("-inf"))
        truth = truth.float().masked_fill(mask, float("-inf"))
        scores, at = predicted.sort(descending=True, dim=-1)
        ordered = torch.gather(truth, dim=1, index=at)
        difference = ordered[:, :, None] - ordered[:, None, :]
        keep = torch.isfinite(difference) & (difference > 0)
        gains = (torch.pow(2, ordered.clamp(min=0.0)) - 1) / 16.0
        discount = torch.log2(1.0 + torch.arange(1, items + 1, device=gains.device))[None]
        weights = torch.abs(discount.pow(-1)[:, :, None] - discount.pow(-1)[:, None, :])
        weights = weights * torch.abs(gains[:, :, None] - gains[:, None, :])
        apart = (scores[:, :, None] - scores[:, None, :]).clamp(min=-1e8, max=1e8)
        apart = apart.masked_fill(torch.isnan(apart), 0.0)
        losses = torch.log2(torch.sigmoid(apart).clamp(min=1e-10) ** weights.type_as(apart))
        return -torch.where(keep, losses, 0.0).sum() / n

    truth = torch.randint(-1, 5, (n, items))
    return Called(loss), (features(n, items), truth)


@problem(
    "CleanRL C51: the distribution of returns projected on fixed atoms, cross entropy of actions",
    dict(rows=65536, actions=6, atoms=51),
    dict(rows=6, actions=2, atoms=7),
    "train f32",
)
def categorical_returns(rows, actions, atoms):
    low, high = -10.0, 10.0

    def loss(m, logits, following, action, reward, done):
        step = (high - low) / (atoms - 1)
        with torch.no_grad():
            pmfs = torch.softmax(following.view(rows, actions, atoms), dim=2)
            best = (pmfs * m.atoms).sum(2).argmax(1)
            pmf = pmfs.gather(1, best[:, None, None].expand(rows, 1, atoms)).squeeze(1)
            moved = (reward[:, None] + 0.99 * m.atoms * (1 - done[:, None])).clamp(low, high)
            # A triangle around each atom shares what falls between two of them.
            b = (moved - low) / step
            places = torch.arange(atoms, device=b.device)
            share = (1 - (b[:, None, :] - places[None, :, None]).abs()).clamp(min=0)
            target = (share * pmf[:, None, :]).sum(-1)
        chosen = logits.view(rows, actions, atoms).gather(
            1, action[:, None, None].expand(rows, 1, atoms)
        )
        old = torch.softmax(chosen.squeeze(1), dim=1)
        return (-(target * old.clamp(min=1e-5, max=1 - 1e-5).log()).sum(-1)).mean()

    module = Called(loss)
    module.register_buffer("atoms", torch.linspace(low, high, atoms))
    action, done = torch.randint(actions, (rows,)), (torch.rand(rows) < 0.1).float()
    shape = rows, actions * atoms
    return module, (features(*shape), torch.randn(shape), action, torch.randn(rows), done)


@problem(
    "generalised advantages: sixteen steps backwards through rewards, values and ends, normalised",
    dict(steps=16, envs=2**18),
    dict(steps=4, envs=6),
    INFERENCE,
)
def generalized_advantages(steps, envs):
    def forward(m, rewards, values, dones):
        last, found = torch.zeros_like(rewards[0]), []
        for t in reversed(range(steps)):
            going = 1.0 - dones[t]
            delta = rewards[t] + 0.99 * values[t + 1] * going - values[t]
            last = delta + 0.99 * 0.95 * going * last
            found.append(last)
        advantages = torch.stack(found[::-1])
        returns = advantages + values[:-1]
        return (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns

    dones = (torch.rand(steps, envs) < 0.05).float()
    return Called(forward), (torch.randn(steps, envs), torch.randn(steps + 1, envs), dones)


@problem(
    "Adan optimizer step: three moments of gradients and their differences",
    dict(rows=4096, n=4096),
    FEW_PAIRS,
    INFERENCE,
)
def adan_step(rows, n):
    def step(m, weight, grad, before, average, moved, square):
        difference = grad - before
        average = average.mul(0.98).add_(grad, alpha=0.02)
        moved = moved.mul(0.92).add_(difference, alpha=0.08)
        update = difference.mul(0.92).add_(grad)
        square = square.mul(0.99).addcmul_(update, update, value=0.01)
        denom = square.sqrt().div_(math.sqrt(1 - 0.99**5)).add_(1e-8)
        weight = weight.addcdiv(average, denom, value=-1e-3 / (1 - 0.98**5))
        weight = weight.addcdiv(moved, denom, value=-1e-3 * 0.92 / (1 - 0.92**5))
        return weight.div_(1 + 1e-3 * 0.02), average, moved, square

    return Called(step), (*torch.randn(5, rows, n), torch.rand(rows, n))


@problem(
    "word tagging: a conditional random field's partition by logsumexp, eight steps, and its score",
    dict(n=4096, seq=9, tags=64),
    dict(n=3, seq=3, tags=5),
    ALL,
)
def random_field(n, seq, tags):
    def loss(m, emissions, at, mask):
        score = m.start + emissions[:, 0]
        gold = m.start[at[:, 0]] + emissions[:, 0].gather(1, at[:, :1]).squeeze(1)
        for i in range(1, seq):
            following = score.unsqueeze(2) + m.transitions + emissions[:, i].unsqueeze(1)
            score = torch.where(mask[:, i, None], torch.logsumexp(following, dim=1), score)
            step = m.transitions[at[:, i - 1], at[:, i]]
            step = step + emissions[:, i].gather(1, at[:, i : i + 1]).squeeze(1)
            gold = gold + step * mask[:, i]
        return (torch.logsumexp(score, dim=1) - gold).mean()

    parts = dict(start=nn.Parameter(torch.randn(tags) * 0.1))
    parts |= dict(transitions=nn.Parameter(torch.randn(tags, tags) * 0.1))
    mask = torch.arange(seq)[None] < torch.linspace(seq // 2 + 1, seq, n).long()[:, None]
    inputs = features(n, seq, tags), torch.randint(tags, (n, seq)), mask
    return Called(loss, **parts), inputs
