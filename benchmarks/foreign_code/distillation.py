"""Losses against soft targets, of teachers, mixed labels and other views, and class weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import Called, features, problem

TRAINS = "train f32, train bf16"
VOCABULARY, FEW = dict(rows=4096, k=768, v=30522), dict(rows=6, k=8, v=20)
LOGITS, FEW_LOGITS = dict(b=4, s=1024, v=32000), dict(b=2, s=5, v=20)
IMAGES, FEW_IMAGES = dict(n=1024, v=1000), dict(n=6, v=9)


@problem(
    "DistilBERT's training: divergence from the teacher at temperature 2, labels, and the cosine",
    VOCABULARY,
    FEW,
    TRAINS,
)
def distil_bert(rows, k, v):
    def forward(m, x, teacher, its_hidden, y):
        hidden = m.norm(F.gelu(m.dense(x)))
        logits = m.vocabulary(hidden)
        loss = F.kl_div(
            F.log_softmax(logits / 2, dim=-1), F.softmax(teacher / 2, dim=-1), reduction="batchmean"
        )
        cosine = F.cosine_embedding_loss(hidden, its_hidden, torch.ones_like(y))
        return 5.0 * loss * 4 + 2.0 * F.cross_entropy(logits, y) + cosine

    parts = dict(dense=nn.Linear(k, k), norm=nn.LayerNorm(k), vocabulary=nn.Linear(k, v))
    inputs = features(rows, k), torch.randn(rows, v), torch.randn(rows, k)
    return Called(forward, **parts), (*inputs, torch.randint(v, (rows,)))


@problem(
    "DeiT: soft distillation from log-probabilities, beside labels", IMAGES, FEW_IMAGES, TRAINS
)
def deit(n, v):
    def forward(m, x, z, teacher, y):
        out, of_token = m.head(x), m.head_dist(z)
        soft = F.kl_div(
            F.log_softmax(of_token / 3.0, dim=1),
            F.log_softmax(teacher / 3.0, dim=1),
            reduction="sum",
            log_target=True,
        )
        soft = soft * (3.0 * 3.0) / of_token.numel()
        return 0.5 * F.cross_entropy(out, y, label_smoothing=0.1) + 0.5 * soft

    module = Called(forward, head=nn.Linear(384, v), head_dist=nn.Linear(384, v))
    inputs = features(n, 384), features(n, 384), torch.randn(n, v), torch.randint(v, (n,))
    return module, inputs


@problem("timm's mixup and SoftTargetCrossEntropy", IMAGES, FEW_IMAGES, TRAINS)
def mixed_labels(n, v):
    def forward(m, x, y):
        on, off = 0.9 + 0.1 / v, 0.1 / v
        one, other = (
            torch.full((n, v), off, device=x.device).scatter_(1, labels.view(-1, 1), on)
            for labels in (y, y.flip(0))
        )
        target = one * 0.7 + other * 0.3
        logits = m.head(x)
        return torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()

    return Called(forward, head=nn.Linear(768, v)), (features(n, 768), torch.randint(v, (n,)))


@problem(
    "torchtune's ForwardKLLoss: the teacher in fp32, ignored tokens", LOGITS, FEW_LOGITS, TRAINS
)
def forward_divergence(b, s, v):
    def forward(m, student, teacher, y):
        p = F.softmax(teacher, dim=-1, dtype=torch.float32)
        hidden = torch.isinf(student)
        log_q = F.log_softmax(student, dim=-1, dtype=torch.float32)
        rows = torch.masked_fill(p * log_q, hidden, 0).sum(dim=-1).view(-1)
        mask = (y != -100).int()
        return -torch.sum(rows * mask.view(-1), dim=0) / torch.sum(mask.view(-1), dim=0)

    y = torch.where(torch.rand(b, s) < 0.1, -100, 1)
    return Called(forward), (features(b, s, v), torch.randn(b, s, v), y)


@problem(
    "divergence of each token from a teacher, masked mean (MiniLLM)", LOGITS, FEW_LOGITS, TRAINS
)
def masked_divergence(b, s, v):
    def forward(m, student, teacher, mask):
        p = F.softmax(teacher, dim=-1, dtype=torch.float32)
        log_p = F.log_softmax(teacher, dim=-1, dtype=torch.float32)
        log_q = F.log_softmax(student, dim=-1, dtype=torch.float32)
        each = (p * (log_p - log_q)).sum(-1)
        return (each * mask).sum() / mask.sum()

    inputs = features(b, s, v), torch.randn(b, s, v), (torch.rand(b, s) < 0.9).float()
    return Called(forward), inputs


@problem("TRL's GKD: generalised Jensen-Shannon divergence", LOGITS, FEW_LOGITS, "train bf16")
def jensen_shannon(b, s, v):
    def forward(m, student, teacher):
        log_q, log_p = F.log_softmax(student / 0.9, -1), F.log_softmax(teacher / 0.9, -1)
        beta = torch.tensor(0.5, dtype=log_q.dtype, device=log_q.device)
        both = torch.stack([log_q + torch.log(1 - beta), log_p + torch.log(beta)])
        mixed = torch.logsumexp(both, dim=0)
        of_p = F.kl_div(mixed, log_p, reduction="none", log_target=True)
        of_q = F.kl_div(mixed, log_q, reduction="none", log_target=True)
        return (beta * of_p + (1 - beta) * of_q).sum() / b

    return Called(forward), (features(b, s, v), torch.randn(b, s, v))


@problem(
    "R-Drop: two passes of dropout, each compared with the other",
    VOCABULARY,
    FEW,
    TRAINS,
    random=True,
)
def r_drop(rows, k, v):
    def forward(m, x, y):
        one, other = (m.out(F.dropout(x, 0.1, m.training)) for _ in range(2))
        loss = 0.5 * (F.cross_entropy(one, y) + F.cross_entropy(other, y))
        there, back = (
            F.kl_div(F.log_softmax(a, -1), F.softmax(b, -1), reduction="none").sum()
            for a, b in ((one, other), (other, one))
        )
        return loss + (there + back) / (2 * rows)

    return Called(forward, out=nn.Linear(k, v)), (features(rows, k), torch.randint(v, (rows,)))


@problem(
    "DINO: two views of a teacher, centred and sharpened, beside eight of a student",
    dict(n=64, k=256, v=65536),
    dict(n=3, k=6, v=20),
    TRAINS,
)
def dino(n, k, v):
    def forward(m, student, teacher):
        views = (m.last(F.normalize(student, dim=-1)) / 0.1).chunk(8)
        targets = F.softmax((teacher - m.center) / 0.04, dim=-1).detach().chunk(2)
        total, count = 0, 0
        for i, q in enumerate(targets):
            for j, view in enumerate(views):
                if i != j:
                    total += torch.sum(-q * F.log_softmax(view, dim=-1), dim=-1).mean()
                    count += 1
        return total / count

    module = Called(forward, last=nn.Linear(k, v, bias=False))
    module.register_buffer("center", torch.zeros(1, v))
    return module, (features(8 * n, k), torch.randn(2 * n, v))


@problem(
    "ALBEF's contrastive loss: similarities against a momentum model's and the diagonal",
    dict(n=512, k=256, v=65536),
    dict(n=6, k=8, v=20),
    TRAINS,
)
def momentum_contrast(n, k, v):
    def forward(m, image, queue, its_own):
        similar = image @ queue / m.temperature
        with torch.no_grad():
            target = torch.zeros_like(similar)
            target.fill_diagonal_(1)
            target = 0.4 * F.softmax(its_own @ queue / m.temperature, dim=1) + 0.6 * target
        return -torch.sum(F.log_softmax(similar, dim=1) * target, dim=1).mean()

    module = Called(forward)
    module.temperature = nn.Parameter(torch.tensor(0.07))
    return module, (features(n, k), torch.randn(k, v), torch.randn(n, k))


@problem("policy gradient with an entropy bonus over the vocabulary", LOGITS, FEW_LOGITS, TRAINS)
def entropy_bonus(b, s, v):
    def forward(m, logits, tokens, advantage):
        logp = F.log_softmax(logits.float(), dim=-1)
        taken = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return -(taken * advantage).mean() - 0.01 * entropy.mean()

    inputs = features(b, s, v), torch.randint(v, (b, s)), torch.randn(b, s)
    return Called(forward), inputs


@problem("entropy of the distribution of each token", LOGITS, FEW_LOGITS, "infer bf16, train bf16")
def entropies(b, s, v):
    def forward(m, logits):
        p = F.softmax(logits, dim=-1)
        return torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)

    return Called(forward), (features(b, s, v),)


@problem(
    "the annotated transformer's label smoothing",
    dict(rows=8192, v=37000),
    dict(rows=6, v=9),
    TRAINS,
)
def smoothed_labels(rows, v):
    def forward(m, x, y):
        target = torch.full_like(x, 0.1 / (v - 2))
        target.scatter_(1, y.unsqueeze(1), 0.9)
        target[:, 0] = 0
        return F.kl_div(F.log_softmax(x, dim=-1), target.detach(), reduction="sum") / rows

    return Called(forward), (features(rows, v), torch.randint(1, v, (rows,)))


@problem("language modelling with class weights", VOCABULARY, FEW, TRAINS)
def weighted_labels(rows, k, v):
    def forward(m, x, y):
        logits = m.vocabulary(x)
        return nn.CrossEntropyLoss(weight=m.weight.to(logits.dtype))(logits, y)

    module = Called(forward, vocabulary=nn.Linear(k, v))
    module.register_buffer("weight", torch.linspace(0.5, 1.5, v))
    return module, (features(rows, k), torch.randint(v, (rows,)))
