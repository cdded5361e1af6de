"""What the launchers of the attention kernels derive from sizes and masks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.masking import Masking, hides_exactly
from fusion_backend.kernels.attention.tiles import load_rows
from fusion_backend.kernels.common.dropout import scale, threshold
from fusion_backend.kernels.common.inputs import number, same_sizes
from fusion_backend.kernels.common.launch import interpreted

LOG2E = 1.4426950408889634
LOWEST = -3.4028234663852886e38  # of fp32


def kind_of(masking: Masking) -> str:
    """The key of a table of configurations. dense: a tile of the mask or the bias is read too. keys
    and dropout take registers; dropout takes more, and decides where there are both.
    """
    hides = masking.keys is not None and masking.keys_are != "added"
    more = "dropout" if masking.dropout is not None else "keys" if hides else ""
    dense = "dense" if masking.bias is not None or masking.keep is not None else ""
    return " ".join(filter(None, (dense, more))) or "plain"


def column_of(q: Tensor, v: Tensor) -> int:
    """Of a table of configurations, by the sizes of the heads."""
    e = number(v.shape[3])
    d = max(number(q.shape[3]), e)
    return (d > 64) + (d > 128) + (d > 128 >= e)


def config_of(bm: int, bn: int, warps: int, stages: int) -> dict:
    return dict(BM=bm, BN=bn, num_warps=warps, num_stages=stages)


def narrow(masking: Masking) -> bool:
    """Is there a band, and so narrow that large blocks would mostly compute what it hides?"""
    low, high = masking.low, masking.high
    return low is not None and high is not None and statically_known_true(high - low < 2048)


def short(q: Tensor, k: Tensor, v: Tensor, masking: Masking, size: int) -> bool:
    """May one tile have all scores of a head? With up to `size` queries and keys of 16 bits, heads
    of up to 64 numbers, as many of k and v as of q, no dense choice of scores and no sinks.
    """
    lengths = all(statically_known_true(0 < t.shape[2]) for t in (q, k))
    lengths = lengths and all(statically_known_true(t.shape[2] <= size) for t in (q, k))
    heads = same_sizes(q.shape[1:2], k.shape[1:2]) and column_of(q, v) == 0
    scores = masking.keep is None and masking.sinks is None
    return lengths and heads and scores and q.element_size() == 2


def constants_of(q: Tensor, v: Tensor, masking: Masking) -> dict:
    """The constants that all kernels take, but for the sizes of their blocks: among them the head
    sizes of q and k, D, and of v, E, and both as powers of two.
    """
    d, e, base = number(q.shape[-1]), number(v.shape[-1]), LOG2E if masking.bias is None else 1.0
    fills, p = masking.hidden == "fill", 0.0 if masking.dropout is None else masking.dropout.p
    return dict(
        SCALE=masking.scale, CAP=masking.cap,
        FILL=max(masking.fill * base, LOWEST) if fills else None,
        KEYS_ARE=masking.keys_are, SKIPS=hides_exactly(masking),
        THRESHOLD=threshold(p), RESCALE=scale(p),
        D=d, BD=max(16, triton.next_power_of_2(d)), E=e, BE=max(16, triton.next_power_of_2(e)),
        UPCAST=interpreted(load_rows),
        PRECISION="ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",
    )  # fmt: skip


def row_strides(t: Tensor) -> tuple:
    """The strides of batch, head and row of `[b, h, n, d]`; that of d is 1."""
    return t.stride()[:3]
