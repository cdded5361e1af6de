"""Reinforcement learning and robotics: losses of policies, critics, world models, actors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_code.problems import ALL, TRAINING, Called, features, problem

STEPS, FEW = dict(n=2097152, actions=18), dict(n=9, actions=4)
TEXTS, FEW_TEXTS = dict(n=4, seq=512, words=50257), dict(n=2, seq=6, words=41)


def unit(x):
    return (x - x.mean()) / (x.std() + 1e-8)


@problem(
    "CleanRL PPO: clipped ratios and values, entropy, normalised advantages", STEPS, FEW, TRAINING
)
def ppo_loss(n, actions):
    def loss(m, logits, value, action, old, advantage, returns, old_value):
        logp = logits - logits.logsumexp(dim=-1, keepdim=True)
        new = logp.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp * F.softmax(logp, dim=-1)).sum(-1)
        ratio = (new - old).exp()
        advantage = unit(advantage)
        policy = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        value = value.view(-1)
        clipped = old_value + torch.clamp(value - old_value, -0.2, 0.2)
        worst = torch.max((value - returns) ** 2, (clipped - returns) ** 2)
        return policy - 0.01 * entropy.mean() + 0.5 * worst.mean() * 0.5

    others = (torch.randn(n) for _ in range(3))
    return Called(loss), (
        features(n, actions),
        features(n, 1),
        torch.randint(actions, (n,)),
        torch.randn(n) - 3,
        *others,
    )


def token_log_probs(logits, tokens):
    """TRL's selective_log_softmax: of the chosen words alone."""
    chosen = torch.gather(logits, dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def texts(n: int, seq: int, words: int):
    lengths = torch.linspace(seq, seq // 2, n).long()
    return torch.randint(words, (n, seq)), torch.arange(seq)[None] < lengths[:, None]


@problem(
    "TRL GRPO: log probabilities at a temperature, KL by exponents, masked mean",
    TEXTS,
    FEW_TEXTS,
    TRAINING,
)
def grpo_loss(n, seq, words):
    def loss(m, logits, tokens, mask, advantage, old, reference):
        logp = token_log_probs(logits / 0.9, tokens)
        kl = torch.exp(reference - logp) - (reference - logp) - 1
        ratio = torch.exp(logp - old)
        clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
        a = advantage.unsqueeze(1)
        each = -torch.min(ratio * a, clipped * a) + 0.04 * kl
        return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(), (kl * mask).sum()

    near = (-torch.rand(n, seq) - 4 for _ in range(2))
    return Called(loss), (
        features(n, seq, words),
        *texts(n, seq, words),
        torch.randn(n),
        *near,
    )


@problem(
    "TRL DPO: sums of shifted log-softmax, chosen and rejected halves, log-sigmoid",
    TEXTS,
    FEW_TEXTS,
    TRAINING,
)
def dpo_loss(n, seq, words):
    def loss(m, logits, tokens, mask, reference):
        logits, tokens, mask = logits[:, :-1, :], tokens[:, 1:].clone(), mask[:, 1:]
        tokens[~mask] = 0
        logp = torch.gather(logits.log_softmax(-1), 2, tokens.unsqueeze(2)).squeeze(2)
        logp = (logp * mask).sum(-1)
        chosen, rejected = (logp - reference).chunk(2)
        margin = 0.1 * (chosen - rejected)
        return (-F.logsigmoid(margin) * 0.95 - F.logsigmoid(-margin) * 0.05).mean(), margin.detach()

    return Called(loss), (features(n, seq, words), *texts(n, seq, words), torch.randn(n) * 10)


@problem(
    "Stable-Baselines3 SAC: squashed gaussian actor, two critics, their smaller value",
    dict(n=16384, width=256),
    dict(n=9, width=16),
)
def soft_actor_critic(n, width):
    def critic(m, i, x, a):
        return m.critics[i](torch.cat([x, a], dim=-1))

    def forward(m, x, noise):
        mean, log_std = m.actor(x).chunk(2, dim=-1)
        log_std = torch.clamp(log_std, -20, 2)
        u = mean + noise * log_std.exp()
        action = torch.tanh(u)
        logp = (-0.5 * ((u - mean) / log_std.exp()) ** 2 - log_std - 0.9189385).sum(dim=1)
        logp -= torch.sum(2 * (0.6931472 - u - F.softplus(-2 * u)), dim=1)
        q = torch.cat([critic(m, i, x, action) for i in range(2)], dim=1)
        least, _ = torch.min(q, dim=1, keepdim=True)
        return (m.log_alpha.exp().detach() * logp.reshape(-1, 1) - least).mean(), logp

    def mlp(a: int, b: int):
        layers = nn.Linear(a, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(width, b))

    critics = nn.ModuleList(mlp(64 + 17, 1) for _ in range(2))
    alpha = nn.Parameter(torch.zeros(1), requires_grad=False)
    return Called(forward, actor=mlp(64, 34), critics=critics, log_alpha=alpha), (
        features(n, 64),
        torch.randn(n, 17),
    )


@problem(
    "QR-DQN: all pairs of quantiles, huber loss weighted by quantile",
    dict(n=1024, quantiles=200),
    dict(n=3, quantiles=6),
    "infer f32, train f32, train bf16",
)
def quantile_huber_loss(n, quantiles):
    def loss(m, theta, target):
        u = target.unsqueeze(-2) - theta.unsqueeze(-1)
        huber = torch.where(u.abs() <= 1.0, 0.5 * u.pow(2), u.abs() - 0.5)
        tau = (torch.arange(quantiles, device=u.device, dtype=u.dtype) + 0.5) / quantiles
        weight = torch.abs(tau[None, :, None] - (u.detach() < 0).to(u.dtype))
        return (weight * huber).sum(dim=-2).mean()

    return Called(loss), (features(n, quantiles), torch.randn(n, quantiles))


@problem(
    "TD-MPC2 world model: linear, layer norm, mish; softmax over groups of eight",
    dict(n=16384, width=512),
    dict(n=9, width=16),
    ALL,
)
def simplicial_world_model(n, width):
    def forward(m, z, action):
        y = torch.cat([z, action], dim=-1)
        y = F.mish(m.norm1(m.linear1(y)))
        y = F.mish(m.norm2(F.dropout(m.linear2(y), 0.0, m.training)))
        y = m.norm3(m.linear3(y))
        shape = y.shape
        y = F.softmax(y.view(*shape[:-1], -1, 8), dim=-1)
        return y.view(*shape), m.reward(torch.cat([y.view(*shape), action], dim=-1))

    parts = dict(linear1=nn.Linear(width + 24, width), reward=nn.Linear(width + 24, 101))
    parts |= {f"linear{i}": nn.Linear(width, width) for i in (2, 3)}
    parts |= {f"norm{i}": nn.LayerNorm(width) for i in (1, 2, 3)}
    return Called(forward, **parts), (features(n, width), torch.randn(n, 24))


@problem(
    "DreamerV3: block gates of a recurrent state, symlog, two-hot targets, straight-through",
    dict(n=4096, width=1024),
    dict(n=5, width=32),
)
def recurrent_state_space(n, width):
    def forward(m, h, z, reward, noise):
        x = F.silu(m.norm(m.inside(torch.cat((torch.sign(z) * torch.log1p(z.abs()), h), -1))))
        reset, candidate, update = m.gates(x).chunk(3, dim=-1)
        reset, update = torch.sigmoid(reset), torch.sigmoid(update - 1)
        h = update * torch.tanh(reset * candidate) + (1 - update) * h
        logits = m.prior(h).unflatten(-1, (-1, 32))
        probs = 0.99 * F.softmax(logits, dim=-1) + 0.01 / 32
        hard = F.one_hot((probs.log() + noise).argmax(-1), 32).to(probs.dtype)
        stoch = hard + probs - probs.detach()
        value = torch.sign(reward) * torch.log(torch.abs(reward) + 1.0)
        low = (m.bins <= value[:, None]).sum(-1).clamp(1, 254) - 1
        below, above = m.bins[low], m.bins[low + 1]
        share = ((value - below) / (above - below)).clamp(0, 1)
        logp = F.log_softmax(m.reward(h).float(), dim=-1)
        two = F.one_hot(low, 255) * (1 - share[:, None]) + F.one_hot(low + 1, 255) * share[:, None]
        return h, stoch.flatten(1), -(two * logp).sum(-1).mean()

    parts = dict(inside=nn.Linear(2 * width, width), norm=nn.RMSNorm(width, eps=1e-3))
    parts |= dict(gates=nn.Linear(width, 3 * width), prior=nn.Linear(width, 32 * 32))
    module = Called(forward, **parts, reward=nn.Linear(width, 255))
    module.register_buffer("bins", torch.linspace(-20, 20, 255))
    gumbel = -torch.log(-torch.log(torch.rand(n, 32, 32).clamp(1e-6, 1 - 1e-6)))
    return module, (features(n, width), features(n, width), torch.randn(n), 8 * gumbel)


@problem(
    "Diffusion Policy: residual block over actions, group norm, mish, scale and bias of FiLM",
    dict(n=256, c=256, length=64),
    dict(n=2, c=16, length=8),
)
def conditional_residual_block(n, c, length):
    def forward(m, x, condition):
        out = m.first(x)
        scale, bias = m.condition(condition).reshape(n, 2, 2 * c, 1).unbind(1)
        out = scale * out + bias
        return m.second(out) + m.residual(x)

    def block(a: int):
        return nn.Sequential(nn.Conv1d(a, 2 * c, 5, padding=2), nn.GroupNorm(8, 2 * c), nn.Mish())

    condition = nn.Sequential(nn.Mish(), nn.Linear(128, 4 * c))
    parts = dict(first=block(c), second=block(2 * c), residual=nn.Conv1d(c, 2 * c, 1))
    return Called(forward, **parts, condition=condition), (
        features(n, c, length),
        features(n, 128),
    )


@problem(
    "OpenVLA / Octo action head: pooled tokens, residual MLP with norms first, clipped tanh",
    dict(n=64, seq=257, width=1024),
    dict(n=2, seq=6, width=16),
)
def action_head(n, seq, width):
    def forward(m, x):
        x = x[:, 1:].mean(dim=1) + x[:, 0]
        x = F.relu(m.fc1(m.norm1(x)))
        for block in m.blocks:
            x = x + block(x)
        means = m.fc2(m.norm2(x)).view(n, 8, 7)
        return torch.tanh(means / 5.0) * 5.0

    def block():
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    parts = dict(norm1=nn.LayerNorm(width), norm2=nn.LayerNorm(width), fc1=nn.Linear(width, width))
    blocks = nn.ModuleList(block() for _ in range(2))
    return Called(forward, **parts, fc2=nn.Linear(width, 56), blocks=blocks), (
        features(n, seq, width),
    )
