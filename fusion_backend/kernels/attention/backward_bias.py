"""The gradient of a bias of attention that several batches or heads share: a program adds up one
tile over them. Where there are few tiles, as with the windows of Swin, each program adds up a part
of the batches and heads, and the parts are added up afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.backward_common import (
    Operands,
    probabilities,
    saved_of_rows,
    score_gradient,
)
from fusion_backend.kernels.attention.masking import strides_of
from fusion_backend.kernels.attention.tiles import load_rows, row_pointer, survivors
from fusion_backend.kernels.common.launch import launch

PROGRAMS = 264  # two for each multiprocessor of an H100 or H200


def bias_gradient(operands: Operands, shape: tuple, dtype: torch.dtype, config: dict) -> Tensor:
    """The sums `[b or 1, h or 1, n, m]` of the scores' gradients over the batches and heads that
    share a bias, in the dtype or, if they are sums of parts, in fp32. Grid: tiles times parts.
    """
    (b, h), (batches, heads, n, m) = operands.q.shape[:2], shape
    batches, heads = (1 if statically_known_true(size == 1) else size for size in (batches, heads))
    tiles = -(-n // config["BM"]) * -(-m // config["BN"]) * batches * heads
    parts = parts_of(tiles, (b // batches) * (h // heads))
    dtype = dtype if parts == 1 else torch.float32
    db = torch.empty((parts, *shape), dtype=dtype, device=operands.q.device)
    launch(
        flash_bias_kernel, (tiles * parts,),
        *operands.tensors, db, *operands.numbers, *strides_of(db[0]), db.stride(0),
        b, batches, heads, parts if parts > 1 else None, **operands.constants, **config,
    )  # fmt: skip
    return db[0] if parts == 1 else db.sum(0)


def parts_of(tiles, shared) -> int:
    """How many programs share a tile that `shared` batches and heads are added up for; one where a
    number is not known at compile time.
    """
    if not all(isinstance(size, int) for size in (tiles, shared)):
        return 1
    return max(1, min(shared, PROGRAMS // max(tiles, 1)))


# Operations: 2 b h n m (d + e). Bytes: the bias and its gradient once; q, k, v and do come from L2.
@triton.jit
def flash_bias_kernel(
    Q, K, V, DO, LSE, SUMS, DB,
    BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, bias_period,
    bias_batch, bias_head, bias_row, bias_col, keep_batch, keep_head, keep_row, keep_col,
    keys_batch, keys_col,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    do_batch, do_head, do_row, db_batch, db_head, db_row, db_col, db_part,
    batches, bias_batches, bias_heads, parts,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr,
    KEYS_ARE: tl.constexpr, SKIPS: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    pid, first, step = tl.program_id(0), 0, 1
    if parts is not None:
        pid, first, step = pid // parts, pid % parts, parts
        DB += first.to(tl.int64) * db_part
    across, down = tl.cdiv(m, BN), tl.cdiv(n, BM)
    j0, i0 = pid % across * BN, pid // across % down * BM
    shared_head = (pid // across // down % bias_heads).to(tl.int64)
    shared_batch = (pid // across // down // bias_heads).to(tl.int64)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    query, key = tl.minimum(row, n - 1 - i0), tl.minimum(col, m - 1 - j0)
    sum_heads = heads // bias_heads
    BIAS += shared_batch * bias_batch + shared_head * bias_head
    ds = tl.zeros([BM, BN], tl.float32)
    for t in tl.range(first, batches // bias_batches * sum_heads, step):
        batch = shared_batch + t // sum_heads * bias_batches
        head = shared_head + t % sum_heads
        masks = (
            (BIAS, (0, 0, bias_row, bias_col), None),
            (KEEP, (keep_batch, keep_head, keep_row, keep_col)),
            (KEYS, (keys_batch, keys_col)), (low, high), SEED, (batch, head, heads, n, m),
        )  # fmt: skip
        q_rows = row_pointer(Q, (q_batch, q_head, q_row), batch, head, i0)
        q = load_rows(q_rows, query, q_row, D, BD, UPCAST)
        k_rows = row_pointer(K, (k_batch, k_head, k_row), batch, head // group, j0)
        k = load_rows(k_rows, key, k_row, D, BD, UPCAST)
        v_rows = row_pointer(V, (v_batch, v_head, v_row), batch, head // group, j0)
        v = load_rows(v_rows, key, v_row, E, BE, UPCAST)
        do_rows = row_pointer(DO, (do_batch, do_head, do_row), batch, head, i0)
        do = load_rows(do_rows, query, do_row, E, BE, UPCAST)
        before = (batch * heads + head) * n
        lse, inverse = saved_of_rows(LSE, before, i0 + query, n, BIAS)
        sums = tl.load(SUMS + before + (i0 + query))
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, visible = probabilities(
            s, lse[:, None], inverse[:, None], masks, row[:, None], col[None, :], i0, j0,
            SCALE, CAP, FILL, KEYS_ARE, True,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if SEED is not None:
            dp = tl.where(survivors(masks, i0, j0, BM, BN, THRESHOLD, False), dp * RESCALE, 0.0)
        of_scores, _ = score_gradient(s, p, dp, sums[:, None], visible, SCALE, CAP, FILL)
        ds += of_scores
    DB = row_pointer(DB, (db_batch, db_head, db_row), shared_batch, shared_head, i0)
    inside = (row[:, None] < n - i0) & (col[None, :] < m - j0)
    tl.store(DB + row[:, None] * db_row + (j0 + col)[None, :] * db_col, ds, inside)
