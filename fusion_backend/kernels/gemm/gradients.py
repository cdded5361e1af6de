"""The gradients of a linear layer's operands in plain torch code: products for the library."""

from __future__ import annotations

import torch
from torch import Tensor


def weight_gradient(x: Tensor, d: Tensor, weight: Tensor) -> Tensor:
    """xᵀ d, laid out in memory as the weight is: the view of a linear layer's weight gets a
    gradient it can keep.
    """
    found = (d.mT @ x).mT if weight.stride(-2) == 1 else x.mT @ d
    return found.sum_to_size(weight.shape)


def bias_gradient(d: Tensor, bias: Tensor) -> Tensor:
    """The sums of d, in fp32, over what a bias is broadcast to."""
    return d.sum_to_size(bias.shape).to(bias.dtype)


def with_bias(product: Tensor, b: Tensor | None) -> Tensor:
    """Their sum, in fp32."""
    return product.float() if b is None else product.float() + b.float()


def as_matrices(x: Tensor, *others: Tensor, weight: Tensor) -> list[Tensor]:
    """x `[..., k]` and others `[..., n]` as matrices, so that there is one product of all rows. A
    weight of more dimensions leaves them as they are.
    """
    given = [x, *others]
    if weight.dim() == 2:
        return [t.reshape(-1, t.shape[-1]) for t in given]
    return [t.unsqueeze(-2) for t in given] if x.dim() == 1 else given


def linear_gradients(
    d: Tensor, x: Tensor, w: Tensor, b: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, w and b, from d, that of x W + b in fp32. needs: whose are wanted.

    The bias sums what the products read, and comes after them: before it is written for them,
    Inductor would compute it again for the sum, and keep parts of it in fp32.
    """
    d = d.to(x.dtype)
    rows, d_rows = as_matrices(x, d, weight=w)
    d_x = (d_rows @ w.mT).sum_to_size(rows.shape).reshape(x.shape) if needs[0] else None
    d_w = weight_gradient(rows, d_rows, w) if needs[1] else None
    return d_x, d_w, bias_gradient(d.float(), b) if b is not None and needs[2] else None


def sum_of_products(a: Tensor, v: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """a vᵀ + b wᵀ."""
    if a.dim() == v.dim() == w.dim() == 2:
        return torch.addmm(a @ v.t(), b, w.t())
    return a @ v.mT + b @ w.mT
