"""The gradients of attention (forward.py), its probabilities computed again from the saved sums of
the rows.

With p the probabilities, dp = do vᵀ and ds = p (dp - rowsum(do · out)): dv = pᵀ do, dk = scale ·
dsᵀ q, dq = scale · ds k, and the bias has the gradient ds, summed where it broadcasts. A sink has
no row of v, so that its gradient is -p · rowsum(do · out), with its own p. Dropout,
with the mask of the forward, drops dp and the p of dv. Nothing is added up in memory, so that the
bits are the same every time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.backward_bias import bias_gradient
from fusion_backend.kernels.attention.backward_common import (
    Operands,
    empty_like_in_memory,
    fill_sums,
)
from fusion_backend.kernels.attention.backward_keys import keys_gradients
from fusion_backend.kernels.attention.backward_queries import Tiles, queries_gradient
from fusion_backend.kernels.attention.backward_short import short_gradients
from fusion_backend.kernels.attention.backward_stored import heads_at_once, stored_gradients
from fusion_backend.kernels.attention.configs import (
    LOG2E,
    column_of,
    config_of,
    constants_of,
    kind_of,
    narrow,
    short,
)
from fusion_backend.kernels.attention.masking import Masking, mask_arguments, shape_of
from fusion_backend.kernels.common.inputs import same_sizes

# As FORWARD in forward.py: KEYS for dk and dv, QUERIES for dq. Beside "dense keys" BM=64 would
# spill for heads of 64.
KEYS = {
    "plain": ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 1), (64, 64, 8, 2)),
    "keys": ((32, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 1), (64, 64, 8, 2)),
    "dropout": ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 1), (32, 64, 8, 2)),
    "dense": ((64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 8, 1), (32, 64, 8, 2)),
    "dense keys": ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1), (32, 64, 8, 2)),
    "dense dropout": ((64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 8, 1), (32, 64, 8, 2)),
}
QUERIES = {
    "plain": ((128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2), (128, 64, 8, 2)),
    "keys": ((64, 64, 4, 3), (128, 32, 8, 3), (64, 32, 8, 2), (128, 64, 8, 2)),
    "dropout": ((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2), (64, 32, 8, 2)),
    "dense": ((64, 64, 4, 3), (128, 64, 8, 3), (32, 32, 8, 2), (64, 32, 8, 2)),
    "dense keys": ((128, 64, 8, 3), (128, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2)),
    "dense dropout": ((64, 64, 4, 3), (128, 64, 8, 3), (32, 32, 8, 2), (64, 32, 8, 2)),
}
# For the gradient of a bias that broadcasts.
BIAS = (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2), (64, 32, 8, 2)


def keys_config(column: int, itemsize: int, kind: str, small: bool = False) -> dict:
    """For dk and dv, as forward_config in forward.py. small: the band is narrow."""
    if itemsize == 4:
        return config_of(16, 32, 8, 1)
    if column == 0 and small and kind == "plain":
        return config_of(32, 64, 4, 3)
    return config_of(*KEYS[kind][column])


def queries_config(column: int, itemsize: int, kind: str, small: bool = False) -> dict:
    """For dq, as keys_config."""
    if itemsize == 4:
        return config_of(32, 32 if kind == "dense" and column == 0 else 16, 8, 1)  # or it spills
    if column == 0 and small and kind == "plain":  # BM=128 is no faster where nothing is hidden
        return config_of(64, 64, 4, 3)
    return config_of(*QUERIES[kind][column])


def bias_config(q: Tensor, v: Tensor, by_queries: dict) -> dict:
    """For the gradient of a bias that broadcasts."""
    column = column_of(q, v)
    if q.element_size() == 4:
        return by_queries
    if column < 2 and statically_known_true(q.shape[2] <= 64):
        return config_of(64, 64, 8 if column else 4, 2)
    return config_of(*BIAS[column])


def configs_for(q: Tensor, v: Tensor, masking: Masking) -> tuple[dict, dict]:
    """The configurations of the kernels for dk and dv, and for dq."""
    what = column_of(q, v), q.element_size(), kind_of(masking)
    small = narrow(masking)
    return keys_config(*what, small), queries_config(*what, small)


def config_in_one(q: Tensor, k: Tensor, v: Tensor, masking: Masking, of_bias: bool) -> dict | None:
    """For all gradients in one kernel; None where several are faster, or the one was not timed.
    Both were timed by benchmarks/results/sweep-short-attention.json.
    """
    if short(q, k, v, masking, 64):
        return config_of(64, 64, 4, 2)
    others = masking.dropout, masking.keys, masking.cap
    alone = all(other is None for other in others) and masking.hidden != "fill"
    if not (of_bias and alone and short(q, k, v, masking, 128)):
        return None
    long = all(statically_known_true(t.shape[2] > 64) for t in (q, k))
    return config_of(128, 128, 8, 2) if long and shared(masking.bias) else None


def shared(bias: Tensor) -> bool:
    """Do all batches have one bias?"""
    return statically_known_true(shape_of(bias)[0] == 1)


def backward(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, out: Tensor, lse: Tensor, do: Tensor,
    needs: dict[str, bool], configs: tuple[dict, dict] | None = None,
) -> tuple:  # fmt: skip
    """dq, dk, dv and the gradients of bias and sinks, or None for what nobody needs: `needs` has
    "q", "k", "v", "bias" and "sinks".

    q, k and v as in the forward, out and lse what it gave; do `[b, h, n, e]` of q's dtype, copied
    where its last stride is not 1. dq, dk and dv have the dtypes and shapes of q, k and v, and lie
    in memory as they do; the gradients of bias and sinks have their dtypes and shapes.
    """
    do = do if statically_known_true(do.stride(-1) == 1) else do.contiguous()
    of_bias = None
    if masking.bias is not None and needs["bias"]:
        of_bias = summed_scores(q, k, masking.bias)
    in_one = None if configs else config_in_one(q, k, v, masking, of_bias is not None)
    masks, constants = mask_arguments(q, k, masking, not in_one), constants_of(q, v, masking)
    read = Operands(q, k, v, do, lse, None, out, masks, constants)
    if in_one:
        *found, db = short_gradients(read, of_bias, in_one)
    else:
        sums = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        read = read._replace(sums=sums)
        by_keys, by_queries = configs or configs_for(q, v, masking)
        at_once = None if configs else heads_at_once(read, of_bias)
        if at_once and (needs["k"] or needs["v"]):
            *found, db = stored_gradients(read, of_bias, at_once, by_queries)
        else:
            *found, db = long_gradients(read, of_bias, needs, by_keys, by_queries)
    if db is not None:
        db = db.sum_to_size(shape_of(masking.bias)).view(masking.bias.shape).to(masking.bias.dtype)
    of_sinks = masking.sinks is not None and needs["sinks"]
    dsinks = sinks_gradient(masking, lse, read.sums) if of_sinks else None
    return *(g if needs[name] else None for g, name in zip(found, "qkv", strict=True)), db, dsinks


def long_gradients(
    operands: Operands, of_bias: tuple[tuple, torch.dtype] | None, needs: dict[str, bool],
    by_keys: dict, by_queries: dict,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As short_gradients, kernel by kernel and only what is needed, for any lengths."""
    q, v = operands.q, operands.v
    dq, dk, dv, db = None, None, None, None
    unshared = of_bias is not None and same_sizes(of_bias[0][:2], q.shape[:2])
    if unshared:  # zeros where a kernel leaves scores out, which have no gradient
        db = torch.zeros(of_bias[0], dtype=of_bias[1], device=q.device)
    if needs["q"] or unshared:
        dq = empty_like_in_memory(q)
        queries_gradient(operands, dq, Tiles(db) if unshared else None, by_queries)
    else:
        fill_sums(operands)
    if needs["k"] or needs["v"]:
        dk, dv = keys_gradients(operands, by_keys)
    if of_bias is not None and not unshared:
        db = bias_gradient(operands, *of_bias, bias_config(q, v, by_queries))
    return dq, dk, dv, db


def sinks_gradient(masking: Masking, lse: Tensor, sums: Tensor) -> Tensor:
    """-p · rowsum(do · out), added up over the rows that share a sink; lse and sums as
    `Operands` has them.
    """
    sinks = masking.sinks.view(shape_of(masking.sinks)).float()[..., 0]
    if masking.bias is None:
        p = torch.exp2(sinks * LOG2E - lse)
    else:
        p = torch.exp(sinks - lse[:, :, 0]) / lse[:, :, 1]
    found = -(p * sums)[..., None].sum_to_size(shape_of(masking.sinks))
    return found.view(masking.sinks.shape).to(masking.sinks.dtype)


def summed_scores(q: Tensor, k: Tensor, bias: Tensor) -> tuple[tuple, torch.dtype]:
    """Shape `[b or 1, h or 1, n, m]` and dtype of the scores' gradients, added up over the batches
    and heads that share a bias: rows or keys that share a number of it are added up at the end,
    from fp32.
    """
    n, m = q.shape[2], k.shape[2]
    full = same_sizes(shape_of(bias)[2:], (n, m))
    return (*shape_of(bias)[:2], n, m), bias.dtype if full else torch.float32
