"""The activations that patterns name with a word, as plain torch code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def activate(x: Tensor, act: str) -> Tensor:
    """act(x) for the words that patterns take; quick_gelu is x · sigmoid(1.702 x)."""
    match act:
        case "identity":
            return x
        case "relu":
            return F.relu(x)
        case "exp_relu":
            return torch.exp(F.relu(x))
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "silu":
            return F.silu(x)
        case "tanh":
            return torch.tanh(x)
        case "sigmoid":
            return torch.sigmoid(x)
    raise ValueError(f"no activation is called {act!r}")


def activation_gradient(dy: Tensor, x: Tensor, act: str) -> Tensor:
    """dy · act'(x), for the activations of gated linear units."""
    match act:
        case "identity":
            return dy
        case "relu":
            return torch.where(x > 0, dy, 0.0)
        case "gelu" | "gelu_tanh":
            return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if act == "gelu_tanh" else "none")
        case "silu":
            return torch.ops.aten.silu_backward(dy, x)
        case "sigmoid":
            return dy * torch.sigmoid(x) * (1 - torch.sigmoid(x))
    raise ValueError(f"no gradient of {act!r}")
