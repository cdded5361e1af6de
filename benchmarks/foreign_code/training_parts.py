"""What training is made of: objectives, unusual norms and attention, tables, moments, metrics."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import ALL, INFERENCE, TRAINING, Called, features, problem

TEXT, FEW = dict(n=8, seq=1024, width=1024), dict(n=2, seq=8, width=32)
ROWS, FEW_ROWS = dict(rows=8192, width=1024), dict(rows=8, width=8)
PAIRS, FEW_PAIRS = dict(rows=2048, width=512), dict(rows=6, width=8)
LOGITS, FEW_LOGITS = dict(rows=32768, n=1000), dict(rows=12, n=5)


@problem("DINOv2 SinkhornKnoppTeacher: assignments balanced in three rounds", ROWS, FEW_ROWS)
def balanced_assignments(rows, width):
    prototypes = 4 * width

    def forward(m, student, teacher):
        kernel = F.normalize(m.weight, dim=-1)
        with torch.no_grad():
            scores = F.normalize(teacher, dim=-1) @ kernel.t()
            q = torch.exp((scores.float() - scores.max()) / 0.07).t()
            q /= torch.sum(q)
            for _ in range(3):
                q /= torch.sum(q, dim=1, keepdim=True)
                q /= prototypes
                q /= torch.sum(q, dim=0, keepdim=True)
                q /= rows
            q = (q * rows).t()
        logits = F.linear(F.normalize(student, dim=-1, p=2, eps=1e-6), kernel)
        return -torch.sum(q * F.log_softmax(logits.float() / 0.1, dim=-1), dim=-1).mean()

    weight = nn.Parameter(torch.randn(prototypes, width) * 0.1)
    return Called(forward, weight=weight), (features(rows, width), torch.randn(rows, width))


@problem("DINOv2 KoLeoLoss: logarithm of the nearest distance", ROWS, FEW_ROWS, TRAINING)
def nearest_neighbour_entropy(rows, width):
    def loss(m, x):
        x = F.normalize(x, eps=1e-8, p=2, dim=-1)
        with torch.no_grad():
            dots = torch.mm(x, x.t())
            dots.view(-1)[:: (rows + 1)].fill_(-1)
            _, at = torch.max(dots, dim=1)
        distances = F.pairwise_distance(x, x[at], p=2, eps=1e-8)
        return -torch.log(distances + 1e-8).mean()

    # Rows in pairs: which is the nearest does not depend on roundings.
    x = torch.randn(rows // 2, width).repeat_interleave(2, dim=0)
    return Called(loss), ((x + 0.4 * torch.randn(rows, width)).requires_grad_(),)


@problem(
    "lenscloth RKD: distances over their mean and angles of all triples, by smooth l1",
    dict(rows=256, width=256),
    FEW_PAIRS,
    ALL,
)
def relational_distillation(rows, width):
    def distances(x, same):
        square = x.pow(2).sum(dim=1)
        d = square.unsqueeze(1) + square.unsqueeze(0) - 2 * (x @ x.t())
        d = d.clamp(min=1e-4).sqrt().masked_fill(same, 0.0)
        return d / (d.sum() / (rows * (rows - 1)))

    def angles(x):
        apart = x.unsqueeze(0) - x.unsqueeze(1)
        unit = F.normalize(apart, p=2, dim=2)
        return torch.bmm(unit, unit.transpose(1, 2)).view(-1)

    def loss(m, student, teacher):
        same = torch.eye(rows, dtype=torch.bool, device=student.device)
        student = m.embed(student)
        with torch.no_grad():
            to_distances, to_angles = distances(teacher, same), angles(teacher)
        distance = F.smooth_l1_loss(distances(student, same), to_distances)
        return distance * 25.0, F.smooth_l1_loss(angles(student), to_angles) * 50.0

    inputs = features(rows, width), torch.randn(rows, width)
    return Called(loss, embed=nn.Linear(width, width, bias=False)), inputs


@problem("easezyc MMDLoss: five gaussians of all distances", PAIRS, FEW_PAIRS)
def kernel_discrepancy(rows, width):
    def loss(m, source, target):
        total = torch.cat([m.bottleneck(source), m.bottleneck(target)], dim=0)
        square = (total * total).sum(-1)
        distances = (square[:, None] + square[None, :] - 2 * torch.mm(total, total.T)).relu()
        bandwidth = torch.sum(distances.detach()) / (4 * rows**2 - 2 * rows) / 2.0**2
        kernels = sum(torch.exp(-distances / (bandwidth * 2.0**i)) for i in range(5))
        within = kernels[:rows, :rows] + kernels[rows:, rows:]
        between = kernels[:rows, rows:] + kernels[rows:, :rows]
        return torch.mean(within - between)

    bottleneck = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
    target = torch.randn(rows, width) * 1.5 + 0.5
    return Called(loss, bottleneck=bottleneck), (features(rows, width), target.requires_grad_())


@problem("apple ml-sigmoid-attention: scores less a slope and a logarithm, norms", TEXT, FEW)
def sigmoid_attention(n, seq, width):
    heads = max(2, width // 128)

    def forward(m, x):
        qkv = m.qkv(F.rms_norm(x, (width,), m.weight, 1e-5))
        q, k, v = qkv.view(n, seq, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = m.q_norm(q), m.k_norm(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // heads)
        positions = torch.arange(seq, device=x.device)
        far = (positions[:, None] - positions[None, :]).to(scores.dtype)
        scores = scores - m.slopes[:, None, None] * far.abs() - math.log(seq)
        scores = scores.masked_fill(far < 0, float("-inf"))
        a = torch.sigmoid(scores).matmul(v).transpose(1, 2).reshape(n, seq, width)
        return x + m.scale * m.out_norm(m.o(a))

    parts = dict(qkv=nn.Linear(width, 3 * width), o=nn.Linear(width, width))
    parts |= {k: nn.LayerNorm(width // heads) for k in ("q_norm", "k_norm")}
    parts |= dict(out_norm=nn.LayerNorm(width), scale=nn.Parameter(torch.full((width,), 0.1)))
    module = Called(forward, **parts, weight=nn.Parameter(torch.ones(width)))
    module.register_buffer("slopes", 2.0 ** -torch.linspace(3, 8, heads))
    return module, (features(n, seq, width),)


@problem("jiachenzhu DyT: tanh of a learnt multiple where norms were", TEXT, FEW)
def dynamic_tanh_block(n, seq, width):
    def bounded(m, i, x):
        return torch.tanh(m.alpha[i] * x) * m.weight[i] + m.bias[i]

    def forward(m, x):
        x = x + m.gamma * m.fc2(F.gelu(m.fc1(bounded(m, 0, x))))
        x = x + m.gamma * m.down(F.silu(m.gate(bounded(m, 1, x))) * m.up(bounded(m, 1, x)))
        return m.head(bounded(m, 2, x.mean(dim=1)))

    sizes = dict(fc1=(1, 4), fc2=(4, 1), gate=(1, 2), up=(1, 2), down=(2, 1))
    parts = {k: nn.Linear(a * width, b * width) for k, (a, b) in sizes.items()}
    parts |= dict(alpha=nn.Parameter(torch.full((3, 1), 0.5)))
    parts |= dict(weight=nn.Parameter(1 + torch.randn(3, width) * 0.1))
    parts |= dict(bias=nn.Parameter(torch.zeros(3, width)), head=nn.Linear(width, 1000))
    parts |= dict(gamma=nn.Parameter(torch.full((width,), 0.1)))
    return Called(forward, **parts), (features(n, seq, width),)


@problem(
    "switchablenorms SwitchNorm2d: moments of image, sample and batch mixed by learnt softmaxes",
    dict(n=32, c=128, side=56),
    dict(n=3, c=8, side=6),
    ALL,
)
def switchable_norm(n, c, side):
    def forward(m, x):
        flat = m.conv(x).view(n, c, -1)
        mean_in, var_in = flat.mean(-1, keepdim=True), flat.var(-1, keepdim=True)
        square = var_in + mean_in**2
        mean_ln, mean_bn = mean_in.mean(1, keepdim=True), mean_in.mean(0, keepdim=True)
        var_ln = square.mean(1, keepdim=True) - mean_ln**2
        var_bn = square.mean(0, keepdim=True) - mean_bn**2
        a, b = F.softmax(m.mean_weight, 0), F.softmax(m.var_weight, 0)
        mean = a[0] * mean_in + a[1] * mean_ln + a[2] * mean_bn
        var = b[0] * var_in + b[1] * var_ln + b[2] * var_bn
        flat = (flat - mean) / (var + 1e-5).sqrt()
        return F.relu(flat.view(n, c, side, side) * m.weight + m.bias + x)

    parts = dict(weight=torch.ones(1, c, 1, 1), bias=torch.zeros(1, c, 1, 1))
    parts |= dict(mean_weight=torch.randn(3), var_weight=torch.ones(3))
    parts = {k: nn.Parameter(v) for k, v in parts.items()}
    parts |= dict(conv=nn.Conv2d(c, c, 1, bias=False))
    return Called(forward, **parts), (features(n, c, side, side),)


@problem("megvii mdistiller DKD: target and other classes apart", LOGITS, FEW_LOGITS, TRAINING)
def decoupled_distillation(rows, n):
    def loss(m, student, teacher, y):
        hit = torch.zeros_like(student).scatter_(1, y.unsqueeze(1), 1).bool()

        def parts(x):
            probs = F.softmax(x / 4.0, dim=1)
            own = (probs * hit).sum(1, keepdim=True)
            return torch.cat([own, (probs * ~hit).sum(1, keepdim=True)], dim=1)

        known = F.kl_div(torch.log(parts(student)), parts(teacher), reduction="sum")
        others = F.softmax(teacher / 4.0 - 1000.0 * hit, dim=1)
        found = F.log_softmax(student / 4.0 - 1000.0 * hit, dim=1)
        unknown = F.kl_div(found, others, reduction="none").sum(dim=1).mean()
        return F.cross_entropy(student, y) + 0.35 * 16.0 * (known / rows + 8.0 * unknown)

    return Called(loss), (features(rows, n), torch.randn(rows, n) * 2, torch.randint(n, (rows,)))


@problem(
    "dreamquark TabNet: sparsemax of a prior times ghost-normed features, gated units, entropy",
    dict(rows=65536, fields=128, width=64),
    dict(rows=8, fields=12, width=8),
)
def sparse_feature_masks(rows, fields, width):
    def ghost(x, weight, bias):
        parts = x.view(max(2, rows // 256), -1, x.shape[-1])
        mean, var = parts.mean(1, keepdim=True), parts.var(1, unbiased=False, keepdim=True)
        return ((parts - mean) / torch.sqrt(var + 1e-5)).view_as(x) * weight + bias

    def sparsemax(x):
        x = x - x.max(dim=-1, keepdim=True)[0]
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        total = ordered.cumsum(-1) - 1
        rho = torch.arange(1, fields + 1, device=x.device, dtype=x.dtype)
        size = (rho * ordered > total).sum(dim=-1, keepdim=True)
        tau = total.gather(-1, size - 1) / size.to(x.dtype)
        return torch.clamp(x - tau, min=0)

    def forward(m, x, prior, attended):
        mask = sparsemax(ghost(m.attend(attended), m.weight, m.bias) * prior)
        entropy = torch.mean(torch.sum(torch.mul(mask, torch.log(mask + 1e-6)), dim=1))
        value, gate = ghost(m.shared(mask * x), m.unit_weight, m.unit_bias).chunk(2, dim=-1)
        h = (attended + value * torch.sigmoid(gate)) * math.sqrt(0.5)
        return F.relu(h), (1.3 - mask) * prior, entropy

    parts = dict(weight=torch.ones(fields), bias=torch.zeros(fields))
    parts |= dict(unit_weight=torch.ones(2 * width), unit_bias=torch.zeros(2 * width))
    parts = {k: nn.Parameter(v) for k, v in parts.items()}
    parts |= dict(attend=nn.Linear(width, fields, bias=False))
    parts |= dict(shared=nn.Linear(fields, 2 * width, bias=False))
    prior = torch.rand(rows, fields) + 0.3
    return Called(forward, **parts), (features(rows, fields), prior, features(rows, width))


@problem(
    "Meta Wukong layer: factorisation machines squeezed along fields, linear ones beside them",
    dict(n=8192, fields=64, width=64),
    dict(n=3, fields=8, width=8),
)
def factorisation_stack(n, fields, width):
    half, rank = fields // 2, max(2, fields // 4)

    def forward(m, x):
        squeezed = x.permute(0, 2, 1) @ m.squeeze
        machine = torch.bmm(x, squeezed).flatten(1)
        machine = m.mlp(m.machine_norm(machine)).view(n, half, width)
        linear = torch.einsum("nfd,fg->ngd", x, m.linear)
        return m.norm(torch.cat((machine, linear), dim=1) + torch.einsum("nfd,fg->ngd", x, m.skip))

    size = fields * rank
    mlp = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, half * width), nn.ReLU())
    parts = dict(squeeze=(fields, rank), linear=(fields, half), skip=(fields, fields))
    parts = {k: nn.Parameter(torch.randn(shape) / fields**0.5) for k, shape in parts.items()}
    parts |= dict(machine_norm=nn.LayerNorm(size), norm=nn.LayerNorm(width))
    return Called(forward, **parts, mlp=mlp), (features(n, fields, width),)


@problem(
    "yandex-research TabM with periodic embeddings: products by feature, an ensemble of scalings",
    dict(n=2048, fields=64, k=48),
    dict(n=4, fields=4, k=3),
)
def periodic_ensemble(n, fields, k):
    d, members, width = 16, 16, 16 * fields

    def forward(m, x, y):
        x = 2 * math.pi * m.frequencies * x[..., None]
        x = torch.cat([torch.cos(x), torch.sin(x)], -1)
        x = F.relu((x[..., None, :] @ m.weight).squeeze(-2) + m.bias).flatten(1)
        h = x[:, None, :] * m.r1
        h = F.relu(F.linear(h, m.w1) * m.s1 + m.b1)
        h = F.relu(F.linear(h * m.r2, m.w2) * m.s2 + m.b2)
        logits = torch.einsum("bki,kio->bko", h, m.head)
        loss = F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(members))
        return loss, logits.detach().float().softmax(-1).mean(1)

    shapes = dict(weight=(fields, 2 * k, d), w1=(width, width), w2=(width, width))
    parts = {k: torch.randn(shape) / shape[-2] ** 0.5 for k, shape in shapes.items()}
    parts |= {name: torch.randn(members, width).sign() for name in ("r1", "r2")}
    parts |= {name: torch.ones(members, width) for name in ("s1", "s2")}
    parts |= {name: torch.zeros(members, width) for name in ("b1", "b2")}
    parts |= dict(frequencies=torch.randn(fields, k) * 0.1, bias=torch.zeros(fields, d))
    parts |= dict(head=torch.randn(members, width, 8) / width**0.5)
    parts = {name: nn.Parameter(part) for name, part in parts.items()}
    return Called(forward, **parts), (features(n, fields), torch.randint(8, (n,)))


@problem(
    "bitsandbytes Adam8bit: moments in bytes by blocks of 256, read, stepped and rounded again",
    dict(blocks=65536, size=256),
    dict(blocks=4, size=16),
    INFERENCE,
)
def moments_in_bytes(blocks, size):
    def step(m, weight, grad, q1, scale1, q2, scale2):
        grad = grad * torch.clamp(1.0 / (grad.float().norm() / size + 1e-6), max=1.0)
        first = q1.float() / 127 * scale1[:, None]
        second = (q2.float() / 255).square() * scale2[:, None]
        first = 0.9 * first + 0.1 * grad.float()
        second = 0.999 * second + 0.001 * grad.float().square()
        update = first / (1 - 0.9**9) / ((second / (1 - 0.999**9)).sqrt() + 1e-8)
        weight = weight.float() * (1 - 1e-3 * 0.01) - 1e-3 * update
        scale1, scale2 = first.abs().amax(dim=1), second.amax(dim=1)
        q1 = torch.round(first / scale1[:, None] * 127).to(torch.int8)
        q2 = torch.round((second / scale2[:, None]).sqrt() * 255).clamp(0, 255).to(torch.uint8)
        return weight.to(grad.dtype), q1, scale1, q2, scale2

    q1 = torch.randint(-127, 128, (blocks, size)).to(torch.int8)
    q2 = torch.randint(1, 256, (blocks, size)).to(torch.uint8)
    weight, grad = torch.randn(2, blocks, size)
    scale1, scale2 = torch.rand(2, blocks) * 0.1 + 0.1
    return Called(step), (weight, grad, q1, scale1, q2, scale2)


@problem("torchmetrics CalibrationError and Brier score", LOGITS, FEW_LOGITS, INFERENCE)
def calibration_errors(rows, n):
    def metric(m, logits, y):
        probs = torch.softmax(logits.float() / m.temperature.exp().float(), dim=-1)
        confidence, right = probs.amax(dim=-1), (logits.argmax(dim=-1) == y).float()
        bounds = torch.linspace(0, 1, 16, device=logits.device)
        at = torch.bucketize(confidence, bounds, right=True).sub(1).clamp(0, 14)
        total = torch.zeros(15, device=logits.device)
        count = total.scatter_add(0, at, torch.ones_like(confidence))
        held = total.scatter_add(0, at, confidence) / count.clamp(min=1)
        hits = total.scatter_add(0, at, right) / count.clamp(min=1)
        gap = (held - hits).abs()
        brier = (probs.square().sum(-1) - 2 * probs.gather(1, y[:, None]).squeeze(1) + 1).mean()
        return (gap * count / count.sum()).sum(), gap.amax(), brier, count

    module = Called(metric, temperature=nn.Parameter(torch.tensor(0.1)))
    return module, (torch.randn(rows, n) * 3, torch.randint(n, (rows,)))
