"""What an optimizer does with a weight, without in-place results, and averages of weights."""

from __future__ import annotations

import torch

from benchmarks.foreign_code.problems import INFERENCE, Called, problem

WEIGHT, FEW = dict(rows=4096, n=4096), dict(rows=12, n=8)


def tensors(count: int, rows: int, n: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(rows, n) for _ in range(count))


@problem("torch.optim.AdamW: decay, moments by lerp, bias corrections", WEIGHT, FEW, INFERENCE)
def adamw_step(rows, n):
    def step(m, weight, grad, average, square):
        weight = weight.mul(1 - 1e-3 * 0.01)
        average = average.lerp(grad, 1 - 0.9)
        square = square.mul(0.999).addcmul(grad, grad.conj(), value=1 - 0.999)
        denom = (square.sqrt() / (1 - 0.999**10) ** 0.5).add_(1e-8)
        return weight.addcdiv(average, denom, value=-1e-3 / (1 - 0.9**10)), average, square

    weight, grad, average = tensors(3, rows, n)
    return Called(step), (weight, grad, average, torch.rand(rows, n))


@problem(
    "lion-pytorch: sign of an interpolation, clipped by the norm of the gradient",
    WEIGHT,
    FEW,
    INFERENCE,
)
def lion_step(rows, n):
    def step(m, weight, grad, average):
        norm = torch.linalg.vector_norm(grad)
        grad = grad * torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        update = average.clone().mul_(0.9).add(grad, alpha=0.1).sign_()
        return weight * (1 - 1e-4) - update * 1e-4, average * 0.99 + grad * (1 - 0.99)

    return Called(step), tensors(3, rows, n)


@problem(
    "Muon: Newton-Schulz iterations of a momentum matrix", dict(rows=2048, n=1024), FEW, INFERENCE
)
def newton_schulz_step(rows, n):
    a, b, c = 3.4445, -4.7750, 2.0315

    def step(m, weight, grad, momentum):
        momentum = momentum.lerp(grad, 0.05)
        x = grad.lerp(momentum, 0.95)
        x = x.mT if rows > n else x
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(3):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = (x.mT if rows > n else x) * max(1, rows / n) ** 0.5
        return weight * (1 - 0.01) - 0.02 * x, momentum

    return Called(step), tensors(3, rows, n)


@problem(
    "transformers Adafactor: factored second moments, update clipped by its rms",
    WEIGHT,
    FEW,
    INFERENCE,
)
def adafactor_step(rows, n):
    def rms(x):
        return x.norm(2) / (x.numel() ** 0.5)

    def step(m, weight, grad, by_row, by_column):
        square = grad**2 + 1e-30
        by_row = by_row * 0.9 + square.mean(dim=-1) * (1.0 - 0.9)
        by_column = by_column * 0.9 + square.mean(dim=-2) * (1.0 - 0.9)
        r = (by_row / by_row.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
        update = r * by_column.unsqueeze(-2).rsqrt() * grad
        update = update / (rms(update) / 1.0).clamp(min=1.0)
        lr = 1e-2 * torch.clamp(rms(weight), min=1e-3)
        return weight - update * lr, by_row, by_column

    return Called(step), (*tensors(2, rows, n), torch.rand(rows) + 0.1, torch.rand(n) + 0.1)


@problem(
    "LAMB with an exponential average of the weights: trust ratio of two norms",
    WEIGHT,
    FEW,
    INFERENCE,
)
def lamb_step(rows, n):
    def step(m, weight, grad, average, square, ema):
        average = 0.9 * average + 0.1 * grad
        square = 0.999 * square + 0.001 * grad * grad
        update = average / (square.sqrt() + 1e-6) + 0.01 * weight
        w, u = weight.norm(), update.norm()
        trust = torch.where(w > 0, torch.where(u > 0, w / u, 1.0), 1.0).clamp(max=10.0)
        weight = weight - 1e-3 * trust * update
        return weight, ema.lerp(weight, 1 - 0.9999), average, square

    weight, grad, average, ema = tensors(4, rows, n)
    return Called(step), (weight, grad, average, torch.rand(rows, n), ema)
