"""What becomes of the scores of attention, and how kernels are told.

A `Masking` says it on the host; `mask_arguments` makes of it the arguments that all kernels of this
package take, in one order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.common.inputs import same_sizes
from fusion_backend.kernels.common.launch import launch


class Masking(NamedTuple):
    """What becomes of the scores `[b, h, n, m]`.

    bias: a tensor that is added to them and broadcasts to their shape; or that has w batches, where
    w divides b: batch i then gets that of i modulo w.
    keep: a bool tensor that broadcasts to their shape, true where a key is seen.
    keys: what `keys_are` says. "seen", "padding": a bool tensor `[b or 1, m]`, or of four
    dimensions, of which the two in the middle do not count: true where a key is seen, or where it
    is padding. "added": numbers that broadcast to `[b, 1, 1, m]` and are added to the scores beside
    a bias. "documents": integers `[b or 1, m]` or `[m]`; a query sees the keys that have
    the number of its own place, of as many queries as keys; `hidden` is no fill then.
    low, high: the band, low <= i - j <= high for query i and key j; None: no such bound.
    hidden: what a score that is not seen becomes. "zero" and "nan": -infinity, and the result of a
    row that sees nothing is 0 or NaN; "fill": the number `fill`, which gives no gradient.
    scale: what the products q kᵀ are multiplied with.
    cap: what the scaled products are capped at, before the bias: cap · tanh(s / cap).
    dropout: of the probabilities.
    sinks: a tensor that broadcasts to `[b, h, n, 1]`: one score more in each row, of a key that
    has no value and that nothing hides. A row that sees nothing else gives 0.
    """

    bias: Tensor | None = None
    keep: Tensor | None = None
    keys: Tensor | None = None
    keys_are: str = "seen"
    low: int | None = None
    high: int | None = None
    hidden: str = "zero"
    fill: float = 0.0
    scale: float = 1.0
    cap: float | None = None
    dropout: Dropout | None = None
    sinks: Tensor | None = None


class MaskArguments(NamedTuple):
    """The arguments of a kernel that are about the scores, in the kernels' order."""

    bias: Tensor | None
    keep: Tensor | None
    keys: Tensor | None
    seen: Tensor | None  # see seen_kernel, and documents.py; None: every tile is read
    seed: Tensor | None
    queries: int
    keys_count: int
    heads: int
    heads_of_a_key: int  # query heads that share a head of k and v
    low: int | None
    high: int | None
    bias_period: int | None  # batches so far apart share a bias; None: one or all do
    bias_strides: tuple
    keep_strides: tuple
    keys_strides: tuple

    def flat(self) -> tuple:
        """One by one: Inductor passes no tuples to kernels."""
        *single, bias, keep, keys = self
        return (*single, *bias, *keep, *keys)


def shape_of(mask: Tensor) -> tuple:
    """The shape with four dimensions."""
    return (1,) * (4 - mask.dim()) + tuple(mask.shape)


def strides_of(mask: Tensor | None) -> tuple:
    """The strides of four dimensions, 0 where the mask broadcasts. The tensor stays as it is:
    Inductor would compute a view anew.
    """
    given = [] if mask is None else zip(mask.shape, mask.stride(), strict=True)
    found = [0 if statically_known_true(size == 1) else stride for size, stride in given]
    return (0, 0, 0, 0, *found)[-4:]


def period_of(bias: Tensor | None, q: Tensor) -> int | None:
    """How many batches have a bias of their own, in turn; None where each has, or all share one."""
    if bias is None or bias.dim() < 4 or statically_known_true(bias.shape[0] == 1):
        return None
    return None if same_sizes(bias.shape[:1], q.shape[:1]) else bias.shape[0]


def rows_in_memory(mask: Tensor | None) -> Tensor | None:
    """With neighbouring keys next to each other: every block of queries of every head and batch
    reads such rows.
    """
    if (
        mask is None
        or statically_known_true(mask.shape[-1] == 1)
        or statically_known_true(mask.stride(-1) <= 1)
    ):
        return mask
    return mask.contiguous()


def strides_of_keys(keys: Tensor | None) -> tuple:
    """The strides of the batch and of the keys."""
    if keys is None:
        return (0, 0)
    one = keys.dim() == 1 or statically_known_true(keys.shape[0] == 1)
    same = statically_known_true(keys.shape[-1] == 1)
    return 0 if one else keys.stride(0), 0 if same else keys.stride(-1)


def hides_exactly(masking: Masking) -> bool:
    """May tiles that band or keys hide be left out? Under a fill a row that sees nothing is the
    mean over all keys: then nothing may be.
    """
    bounded = masking.low is not None or masking.high is not None or masking.keep is not None
    return masking.hidden != "fill" or not bounded


def mask_arguments(q: Tensor, k: Tensor, masking: Masking, ranges: bool = True) -> MaskArguments:
    """For q `[b, h, n, d]` and k `[b, h / group, m, d]`; with `ranges` finds out which keys each
    batch sees, unless they depend on the query.
    """
    bias, keep, keys = rows_in_memory(masking.bias), rows_in_memory(masking.keep), masking.keys
    ranges = ranges and keys is not None and masking.keys_are in ("seen", "padding")
    seen = seen_keys(q, k, masking) if ranges else None
    return MaskArguments(
        bias, keep, keys, seen, None if masking.dropout is None else masking.dropout.seed,
        q.shape[2], k.shape[2], q.shape[1], q.shape[1] // k.shape[1], masking.low, masking.high,
        period_of(bias, q), strides_of(bias), strides_of(keep), strides_of_keys(keys),
    )  # fmt: skip


def seen_keys(q: Tensor, k: Tensor, masking: Masking) -> Tensor:
    """`[b, 3]` int32, as seen_kernel says. Grid: batches."""
    seen = torch.empty((q.shape[0], 3), dtype=torch.int32, device=q.device)
    everything = "none seen" if masking.hidden == "fill" else "never"
    everything = everything if hides_exactly(masking) else "always"
    launch(
        seen_kernel, (q.shape[0],), masking.keys, seen, k.shape[2], *strides_of_keys(masking.keys),
        PADDED=masking.keys_are == "padding", ALL=everything,
        BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return seen


# Bytes: keys once.
@triton.jit
def seen_kernel(
    KEYS, SEEN, m, keys_batch, keys_col,
    PADDED: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each batch the first key that is seen, the one after the last, and whether all between
    them are.
    """
    batch = tl.program_id(0)
    KEYS += batch.to(tl.int64) * keys_batch
    first = tl.full([BLOCK], 2147483647, tl.int32)
    end = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, m, BLOCK):
        j = start + tl.arange(0, BLOCK)
        visible = (tl.load(KEYS + j.to(tl.int64) * keys_col, j < m, 0) != 0) != PADDED
        visible = visible & (j < m)
        first = tl.minimum(first, tl.where(visible, j, 2147483647))
        end = tl.maximum(end, tl.where(visible, j + 1, 0))
        count += visible.to(tl.int32)
    first, end, count = tl.min(first, 0), tl.max(end, 0), tl.sum(count, 0)
    whole = (count == end - first).to(tl.int32)
    if ALL == "always":
        first, end, whole = first * 0, end * 0 + m, tl.where(count == m, 1, 0)
    if ALL == "none seen":
        end = tl.where(count == 0, m, end)
        whole = tl.where(count == 0, 0, whole)
    first = tl.minimum(first, end)
    if ALL == "none seen":
        first = tl.where(count == 0, 0, first)
    at = SEEN + batch * 3
    tl.store(at, first)
    tl.store(at + 1, end)
    tl.store(at + 2, whole)
