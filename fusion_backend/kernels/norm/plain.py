"""Layer and RMS normalisation of rows in plain torch code, for patterns that take either."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["layer", "rms"]


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, norm: Kind):
    """The norm over the last dimension. Raises ValueError for an RMS norm with a bias."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if bias is not None:
        raise ValueError("an RMS norm has no bias")
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def statistics(x: Tensor, eps: float, norm: Kind) -> tuple[Tensor, Tensor]:
    """mean and rstd `[rows]` in fp32, the mean of an RMS norm empty; operator for operator as in
    the norm, so that nothing is computed twice.
    """
    if norm == "layer":
        _, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], None, None, eps)
        return mean.reshape(-1), rstd.reshape(-1)
    rstd = torch.rsqrt(x.float().pow(2).mean(x.dim() - 1, keepdim=True) + eps)
    return rstd.new_empty(0), rstd.reshape(-1)
