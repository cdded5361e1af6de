"""The gradients of attention (flash.py), its probabilities computed again from the kept sums of the
rows.

With p the probabilities, dp = do vᵀ and ds = p (dp - rowsum(do · out)): dv = pᵀ do, dk = scale ·
dsᵀ q, dq = scale · ds k, and the bias has the gradient ds, summed where it broadcasts. Dropout,
drawn again, drops dp and the p of dv. A program has a block of keys and walks through the queries,
of all heads that read them, for dk and dv; another has a block of queries for dq. Nothing is added
up in memory, so that the bits are the same every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.kernels.attention.forward import (
    Masking,
    by_head,
    config_of,
    kind_of,
    laid_out,
    masks_of,
    narrow,
    rows_of,
    shape_of,
    strides,
)
from fusion_backend.kernels.attention.tiles import (
    begins,
    capped,
    edge,
    edges,
    key_range,
    masked,
    place,
    power,
    query_range,
    survive,
    tile,
)
from fusion_backend.kernels.common.inputs import number, same_sizes
from fusion_backend.kernels.common.launch import launch

# As flash.FORWARD, for dk and dv, and for dq.
KEYS = {
    "plain": ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 1)),
    "keys": ((32, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 1)),
    "dropout": ((64, 64, 4, 3), (32, 64, 4, 3), (32, 32, 8, 1)),
    "dense": ((64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 8, 1)),
    "dense keys": ((32, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),  # BM=64 would spill
    "dense dropout": ((64, 64, 4, 2), (32, 64, 4, 3), (32, 32, 8, 1)),
}
QUERIES = {
    "plain": ((128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    "keys": ((64, 64, 4, 3), (128, 32, 8, 3), (64, 32, 8, 2)),
    "dropout": ((64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
    "dense": ((64, 64, 4, 3), (128, 64, 8, 3), (32, 32, 8, 2)),
    "dense keys": ((128, 64, 8, 3), (128, 64, 8, 2), (32, 32, 8, 2)),
    "dense dropout": ((64, 64, 4, 3), (128, 64, 8, 3), (32, 32, 8, 2)),
}
BIAS = (128, 64, 8, 3), (64, 64, 8, 2), (32, 32, 8, 2)  # for the gradient of a bias that broadcasts


def keys_config(d: int, itemsize: int, kind: str, small: bool = False) -> dict:
    """As flash.forward_config. small: the band is narrow."""
    if itemsize == 4:
        return config_of(16, 32, 8, 1)
    if d <= 64 and small and kind == "plain":
        return config_of(32, 64, 4, 3)
    return config_of(*by_head(KEYS, kind, d))


def queries_config(d: int, itemsize: int, kind: str, small: bool = False) -> dict:
    if itemsize == 4:
        return config_of(32, 32 if kind == "dense" and d <= 64 else 16, 8, 1)  # or it spills
    if d <= 64 and small and kind == "plain":  # BM=128 is no faster where nothing is hidden
        return config_of(64, 64, 4, 3)
    return config_of(*by_head(QUERIES, kind, d))


def chosen(q: Tensor, masking: Masking) -> tuple[dict, dict]:
    """The configurations of the two kernels."""
    how = number(q.shape[3]), q.element_size(), kind_of(masking)
    small = narrow(masking)
    return keys_config(*how, small), queries_config(*how, small)


def backward(
    q, k, v, masking: Masking, out, lse, do, needs: dict[str, bool], configs: tuple | None = None
) -> tuple:
    """dq, dk, dv and the gradient of the bias, or None for what nobody needs."""
    b, h, n, d = q.shape
    kv_heads, m = k.shape[1:3]
    bias, d = masking.bias, number(d)
    by_keys, by_queries = configs or chosen(q, masking)
    do = do if statically_known_true(do.stride(-1) == 1) else do.contiguous()
    args, constants = masks_of(q, k, masking)
    sums = torch.empty((b, h, n), dtype=torch.float32, device=q.device)
    launch(
        row_sums_kernel, ((n + 63) // 64 * b * h,), out, do, sums, n, h, *rows_of(out),
        *rows_of(do), D=d,
        BD=constants["BD"], BM=64, num_warps=4,
    )  # fmt: skip
    read = (*args, *rows_of(q), *rows_of(k), *rows_of(v), *rows_of(do))
    dq, dk, dv, db = None, None, None, None
    if needs["k"] or needs["v"]:
        dk, dv = laid_out(k), laid_out(v)
        launch(
            flash_keys_kernel, ((m + by_keys["BN"] - 1) // by_keys["BN"] * b * kv_heads,), q, k, v,
            do, lse, sums, dk,
            dv, *read, *rows_of(dk), *rows_of(dv), **constants, **by_keys,
        )  # fmt: skip
    wide = bias is not None and needs["bias"]
    alone = wide and same_sizes(shape_of(bias)[:2], (b, h))
    if wide:
        # Rows or keys that share a number of the bias are added up at the end. What is left out has
        # no gradient.
        new, full = torch.zeros if alone else torch.empty, same_sizes(shape_of(bias)[2:], (n, m))
        db = new(
            (*shape_of(bias)[:2], n, m),
            dtype=bias.dtype if full else torch.float32,
            device=q.device,
        )
    if needs["q"] or alone:
        dq = laid_out(q)
        launch(
            flash_queries_kernel, ((n + by_queries["BM"] - 1) // by_queries["BM"] * b * h,), q, k,
            v, do, lse, sums, dq,
            db if alone else None, *read, *rows_of(dq), *strides(db if alone else None),
            **constants, **by_queries,
        )  # fmt: skip
    if wide and not alone:
        by_tile = by_queries if q.element_size() == 4 else config_of(*BIAS[(d > 64) + (d > 128)])
        tiles = ((n + by_tile["BM"] - 1) // by_tile["BM"]) * (
            (m + by_tile["BN"] - 1) // by_tile["BN"]
        )
        batches, heads = (
            1 if statically_known_true(size == 1) else size for size in shape_of(bias)[:2]
        )
        launch(
            flash_bias_kernel, (tiles * batches * heads,), q, k, v, do, lse, sums, db, *read,
            *strides(db), b, batches,
            heads, **constants, **by_tile,
        )  # fmt: skip
    db = None if db is None else db.sum_to_size(shape_of(bias)).view(bias.shape).to(bias.dtype)
    wanted = (dq, "q"), (dk, "k"), (dv, "v")
    return *(g if needs[name] else None for g, name in wanted), db


# Bytes: out and do once.
@triton.jit
def row_sums_kernel(
    OUT, DO, SUMS, n, heads, o0, o1, o2, g0, g1, g2, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """rowsum(do · out), in fp32."""
    i0, head, batch = place(n, heads, BM)
    row, d = tl.arange(0, BM)[:, None], tl.arange(0, BD)[None, :]
    keep = (row < n - i0) & (d < D)
    out = tl.load(begins(OUT, batch, head, i0, o0, o1, o2) + row * o2 + d, keep, 0.0).to(tl.float32)
    do = tl.load(begins(DO, batch, head, i0, g0, g1, g2) + row * g2 + d, keep, 0.0).to(tl.float32)
    at = SUMS + (batch * heads + head) * n + i0 + tl.arange(0, BM)
    tl.store(at, tl.sum(out * do, 1), tl.arange(0, BM) < n - i0)


@triton.jit
def weights_of_rows(LSE, before, at, n, BIAS):
    """What is kept of rows of a head, with `before` rows of other heads in front: the logarithm of
    the sum, or with a bias the largest score, and one over the sum.
    """
    if BIAS is None:
        lse = tl.load(LSE + before + at)
        inverse = lse
    else:
        lse = tl.load(LSE + 2 * before + at)
        inverse = 1.0 / tl.load(LSE + 2 * before + n + at)
    return lse, inverse


@triton.jit
def probabilities(
    s, lse, inverse, masks, row, col, i0, j0, SCALE: tl.constexpr, CAP: tl.constexpr,
    FILL: tl.constexpr,
    PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of the products of the tile at i0, j0; and which have a gradient."""
    (
        BIAS,
        KEEP,
        KEYS,
        SEED,
        batch,
        head,
        heads,
        n,
        m,
        low,
        high,
        b0,
        b1,
        b2,
        b3,
        p0,
        p1,
        p2,
        p3,
        y0,
        y1,
    ) = masks
    s, kept = masked(s, masks, row, col, i0, j0, SCALE, CAP, FILL, PADDED, MASKED)
    p = power(s - lse, BIAS)
    if BIAS is not None:
        p *= inverse
    elif FILL is not None:
        # far down, the logarithm of a row that sees nothing has lost its sum, which is m
        if FILL < -30000.0:
            p = tl.where((lse < FILL * 0.5) & (col < m - j0), 1.0 / m, p)
    return p, kept


@triton.jit
def gradient(s, p, dp, sums, kept, SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr):
    """ds of the scores with their bias, and of the products but for the scale."""
    ds = p * (dp - sums)
    if FILL is not None:
        ds = tl.where(kept, ds, 0.0)
    if CAP is not None:
        t = capped(s, SCALE, CAP)
        return ds, ds * (1.0 - t * t)
    else:
        return ds, ds


# Operations: 8 b h n m d, of those keys that are seen. Bytes: q, k, v, do, dk, dv and the masks
# once.
@triton.jit
def flash_keys_kernel(
    Q, K, V, DO, LSE, SUMS, DK, DV, BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, b0,
    b1, b2, b3, p0, p1,
    p2, p3, y0, y1, q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, dk0, dk1, dk2, dv0, dv1, dv2,
    SCALE: tl.constexpr,
    CAP: tl.constexpr, FILL: tl.constexpr, PADDED: tl.constexpr, SKIPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    RESCALE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # with a lower band the first have the most queries
    j0, kv_head, batch = place(m, heads // group, BN)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(col, m - 1 - j0)
    k = tile(begins(K, batch, kv_head, j0, k0, k1, k2), inside, k2, D, BD, UPCAST)
    v = tile(begins(V, batch, kv_head, j0, v0, v1, v2), inside, v2, D, BD, UPCAST)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    left, begin, stop, end = query_range(SEEN, batch, j0, n, m, low, high, SKIPS, BM, BN)
    for g in tl.range(0, group):
        head = kv_head * group + g
        masks = (
            BIAS, KEEP, KEYS, SEED, batch, head, heads, n, m, low, high, b0, b1, b2, b3, p0, p1, p2,
            p3, y0, y1
        )  # fmt: skip
        q = begins(Q, batch, head, 0, q0, q1, q2)
        do = begins(DO, batch, head, 0, g0, g1, g2)
        before = (batch * heads + head) * n
        for start in tl.range(begin, stop, BM):
            dk, dv = keys_step(
                dk, dv, k, v, q, do, LSE, SUMS, before, masks, row, col, start, j0, n, q2, g2,
                SCALE, CAP,
                FILL, PADDED, THRESHOLD, RESCALE, D, UPCAST, PRECISION, False,
            )  # fmt: skip
        for t in tl.range(0, edges(left, begin, stop, end, BM)):
            dk, dv = keys_step(
                dk, dv, k, v, q, do, LSE, SUMS, before, masks, row, col,
                edge(t, left, begin, stop, BM),
                j0, n, q2, g2, SCALE, CAP, FILL, PADDED, THRESHOLD, RESCALE, D, UPCAST, PRECISION,
                True,
            )  # fmt: skip
    d = tl.arange(0, BD)[None, :]
    kept = (col[:, None] < m - j0) & (d < D)
    if SEED is not None:
        dv *= RESCALE
    tl.store(
        begins(DK, batch, kv_head, j0, dk0, dk1, dk2) + col[:, None] * dk2 + d, dk * SCALE, kept
    )
    tl.store(begins(DV, batch, kv_head, j0, dv0, dv1, dv2) + col[:, None] * dv2 + d, dv, kept)


@triton.jit
def keys_step(
    dk, dv, k, v, Q, DO, LSE, SUMS, before, masks, row, col, start, j0, n, q2, g2,
    SCALE: tl.constexpr,
    CAP: tl.constexpr, FILL: tl.constexpr, PADDED: tl.constexpr, THRESHOLD: tl.constexpr,
    RESCALE: tl.constexpr,
    D: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums with the queries of one block. Scores are transposed: [keys, queries]."""
    at = tl.minimum(row, n - 1 - start) if MASKED else row
    q = tile(Q + tl.cast(start, tl.int64) * q2, at, q2, D, dk.shape[1], UPCAST)
    do = tile(DO + tl.cast(start, tl.int64) * g2, at, g2, D, dk.shape[1], UPCAST)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    lse, inverse = weights_of_rows(LSE, before, start + at, n, masks[0])
    if MASKED:
        lse = tl.where(row < n - start, lse, float("inf"))
    p, kept = probabilities(
        s, lse[None, :], inverse[None, :], masks, row[None, :], col[:, None], start, j0, SCALE, CAP,
        FILL, PADDED,
        MASKED,
    )  # fmt: skip
    left = p
    if masks[3] is not None:
        survives = survive(masks, start, j0, s.shape[1], s.shape[0], THRESHOLD, True)
        left = tl.where(survives, p, 0.0)
    dv = tl.dot(left.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if masks[3] is not None:
        dp = tl.where(survives, dp * RESCALE, 0.0)
    sums = tl.load(SUMS + before + (start + at))  # not before: they would spill
    _, ds = gradient(s, p, dp, sums[None, :], kept, SCALE, CAP, FILL)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


# Operations: 6 b h n m d, of those keys that are seen. Bytes: q, k, v, do, dq and the masks once.
@triton.jit
def flash_queries_kernel(
    Q, K, V, DO, LSE, SUMS, DQ, DB, BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, b0,
    b1, b2, b3, p0, p1,
    p2, p3, y0, y1, q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, dq0, dq1, dq2, db0, db1, db2,
    db3,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, PADDED: tl.constexpr,
    SKIPS: tl.constexpr,
    THRESHOLD: tl.constexpr, RESCALE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i0, head, batch = place(n, heads, BM, low)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    inside = tl.minimum(row, n - 1 - i0)
    K = begins(K, batch, head // group, 0, k0, k1, k2)
    V = begins(V, batch, head // group, 0, v0, v1, v2)
    if DB is not None:
        DB = begins(DB, batch, head, i0, db0, db1, db2)
    masks = (
        BIAS, KEEP, KEYS, SEED, batch, head, heads, n, m, low, high, b0, b1, b2, b3, p0, p1, p2, p3,
        y0, y1
    )  # fmt: skip
    q = tile(begins(Q, batch, head, i0, q0, q1, q2), inside, q2, D, BD, UPCAST)
    do = tile(begins(DO, batch, head, i0, g0, g1, g2), inside, g2, D, BD, UPCAST)
    before = (batch * heads + head) * n
    lse, inverse = weights_of_rows(LSE, before, i0 + inside, n, BIAS)
    kept = lse, inverse, tl.load(SUMS + before + (i0 + inside))
    dq = tl.zeros([BM, BD], tl.float32)
    left, begin, stop, end = key_range(SEEN, batch, i0, n, m, low, high, SKIPS, BM, BN)
    for start in tl.range(begin, stop, BN):
        dq, ds = queries_step(
            dq, q, do, kept, K, V, masks, row, col, i0, start, m, k2, v2, SCALE, CAP, FILL, PADDED,
            THRESHOLD, RESCALE, D, UPCAST, PRECISION, False,
        )  # fmt: skip
        if DB is not None:
            tl.store(
                DB + row[:, None] * db2 + (start + col)[None, :] * db3, ds, row[:, None] < n - i0
            )
    for t in tl.range(0, edges(left, begin, stop, end, BN)):
        start = edge(t, left, begin, stop, BN)
        dq, ds = queries_step(
            dq, q, do, kept, K, V, masks, row, col, i0, start, m, k2, v2, SCALE, CAP, FILL, PADDED,
            THRESHOLD, RESCALE, D, UPCAST, PRECISION, True,
        )  # fmt: skip
        if DB is not None:
            within = (row[:, None] < n - i0) & (col[None, :] < m - start)
            tl.store(DB + row[:, None] * db2 + (start + col)[None, :] * db3, ds, within)
    d = tl.arange(0, BD)[None, :]
    DQ = begins(DQ, batch, head, i0, dq0, dq1, dq2)
    tl.store(DQ + row[:, None] * dq2 + d, dq * SCALE, (row[:, None] < n - i0) & (d < D))


@triton.jit
def queries_step(
    dq, q, do, kept, K, V, masks, row, col, i0, start, m, k2, v2, SCALE: tl.constexpr,
    CAP: tl.constexpr,
    FILL: tl.constexpr, PADDED: tl.constexpr, THRESHOLD: tl.constexpr, RESCALE: tl.constexpr,
    D: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sum with the keys of one block, and the gradient of its scores. `kept`: what is kept of
    the rows, see weights_of_rows, and rowsum(do · out).
    """
    lse, inverse, sums = kept
    at = tl.minimum(col, m - 1 - start) if MASKED else col
    k = tile(K + tl.cast(start, tl.int64) * k2, at, k2, D, dq.shape[1], UPCAST)
    v = tile(V + tl.cast(start, tl.int64) * v2, at, v2, D, dq.shape[1], UPCAST)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p, kept = probabilities(
        s, lse[:, None], inverse[:, None], masks, row[:, None], col[None, :], i0, start, SCALE, CAP,
        FILL, PADDED,
        MASKED,
    )  # fmt: skip
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if masks[3] is not None:
        dp = tl.where(
            survive(masks, i0, start, s.shape[0], s.shape[1], THRESHOLD, False), dp * RESCALE, 0.0
        )
    dscore, ds = gradient(s, p, dp, sums[:, None], kept, SCALE, CAP, FILL)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION), dscore


# Operations: 4 b h n m d. Bytes: the bias and its gradient once; q, k, v and do come from L2.
@triton.jit
def flash_bias_kernel(
    Q, K, V, DO, LSE, SUMS, DB, BIAS, KEEP, KEYS, SEEN, SEED, n, m, heads, group, low, high, b0, b1,
    b2, b3, p0, p1, p2,
    p3, y0, y1, q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, db0, db1, db2, db3, batches,
    bias_batches, bias_heads,
    SCALE: tl.constexpr, CAP: tl.constexpr, FILL: tl.constexpr, PADDED: tl.constexpr,
    SKIPS: tl.constexpr,
    THRESHOLD: tl.constexpr, RESCALE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The gradient of a bias that several batches or heads share: a program adds up one tile over
    all of them.
    """
    pid, across, down = tl.program_id(0), tl.cdiv(m, BN), tl.cdiv(n, BM)
    j0, i0 = pid % across * BN, pid // across % down * BM
    bias_head = (pid // across // down % bias_heads).to(tl.int64)
    bias_batch = (pid // across // down // bias_heads).to(tl.int64)
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    if SEED is not None:
        SEED = tl.load(SEED)
    at, key = tl.minimum(row, n - 1 - i0), tl.minimum(col, m - 1 - j0)
    sum_heads = heads // bias_heads
    BIAS += bias_batch * b0 + bias_head * b1
    ds = tl.zeros([BM, BN], tl.float32)
    for t in tl.range(0, batches // bias_batches * sum_heads):
        batch, head = bias_batch + t // sum_heads, bias_head + t % sum_heads
        masks = (
            BIAS, KEEP, KEYS, SEED, batch, head, heads, n, m, low, high, 0, 0, b2, b3, p0, p1, p2,
            p3, y0, y1
        )  # fmt: skip
        q = tile(begins(Q, batch, head, i0, q0, q1, q2), at, q2, D, BD, UPCAST)
        k = tile(begins(K, batch, head // group, j0, k0, k1, k2), key, k2, D, BD, UPCAST)
        v = tile(begins(V, batch, head // group, j0, v0, v1, v2), key, v2, D, BD, UPCAST)
        do = tile(begins(DO, batch, head, i0, g0, g1, g2), at, g2, D, BD, UPCAST)
        before = (batch * heads + head) * n
        lse, inverse = weights_of_rows(LSE, before, i0 + at, n, BIAS)
        sums = tl.load(SUMS + before + (i0 + at))
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, kept = probabilities(
            s,
            lse[:, None],
            inverse[:, None],
            masks,
            row[:, None],
            col[None, :],
            i0,
            j0,
            SCALE,
            CAP,
            FILL,
            PADDED,
            True,
        )
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if masks[3] is not None:
            dp = tl.where(survive(masks, i0, j0, BM, BN, THRESHOLD, False), dp * RESCALE, 0.0)
        of_scores, _ = gradient(s, p, dp, sums[:, None], kept, SCALE, CAP, FILL)
        ds += of_scores
    DB = begins(DB, bias_batch, bias_head, i0, db0, db1, db2)
    inside = (row[:, None] < n - i0) & (col[None, :] < m - j0)
    tl.store(DB + row[:, None] * db2 + (j0 + col)[None, :] * db3, ds, inside)
