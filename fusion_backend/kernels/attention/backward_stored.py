"""All gradients of attention beside a dense mask or a bias, by way of memory: the kernel of dq also
writes the probabilities and the gradients of the scores, and another multiplies them by do and q.

The kernel of dk and dv has its scores transposed: a tile of the mask or the bias changes its layout
for each of its steps, which takes longer than to read the tiles that the kernel of dq has computed.
The gradient of the bias is theirs, added up; each is rounded before, as in eager. Heads take turns,
so that the tiles of a turn need no more memory than ROOM, or what one head of k needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusion_backend.kernels.attention.backward_common import Operands, empty_like_in_memory
from fusion_backend.kernels.attention.backward_queries import Tiles, queries_gradient
from fusion_backend.kernels.attention.configs import config_of, row_strides
from fusion_backend.kernels.attention.masking import strides_of
from fusion_backend.kernels.attention.ranges import program_block, query_range
from fusion_backend.kernels.attention.tiles import load_rows, row_pointer
from fusion_backend.kernels.common.inputs import same_sizes
from fusion_backend.kernels.common.launch import launch

ROOM = 1 << 28  # bytes of the tiles of a turn
LARGEST = 1 << 30  # if one head of k has more, the other kernels are used
TURNS = 16  # at most: each is some launches more


def heads_at_once(operands: Operands, of_bias: tuple[tuple, torch.dtype] | None) -> int | None:
    """How many heads take a turn. None where the other kernels are used: for masks and heads with
    which these were not timed to be faster; for fp32; for sizes that only a run knows; for a cap,
    padding and documents; and for a bias that repeats over the batches, that heads, queries or keys
    share, or that is in fp32, whose gradient must stay in fp32 until it is added up.
    """
    q, masks, constants = operands.q, operands.masks, operands.constants
    size = max(constants["BD"], constants["BE"])
    wide, dense = size == 128, masks.bias is not None or masks.keep is not None
    timed = wide or (size <= 64 and masks.bias is not None)
    keys = None if constants["KEYS_ARE"] == "added" else masks.keys
    others = keys, masks.bias_period, constants["CAP"]
    if not (dense and timed) or any(it is not None for it in others) or q.element_size() != 2:
        return None
    if banded(operands) and not (wide and of_bias):
        return None
    b, h, n, m, group = *q.shape[:3], masks.keys_count, masks.heads_of_a_key
    if not all(isinstance(size, int) and size > 0 for size in (b, h, n, m)):
        return None
    if of_bias is not None and not (of_bias[1] == q.dtype and same_sizes(of_bias[0][1:2], (h,))):
        return None
    groups, bytes_of_group = h // group, 2 * b * group * n * width(m) * q.element_size()
    most = max(1, ROOM // bytes_of_group)
    at_once = max(t for t in range(1, groups + 1) if groups % t == 0 and t <= most)
    fits = bytes_of_group <= LARGEST and groups // at_once <= TURNS
    return at_once * group if fits else None


def banded(operands: Operands) -> bool:
    """May there be tiles that no kernel writes?"""
    masks = operands.masks
    return operands.constants["SKIPS"] and (masks.low is not None or masks.high is not None)


def width(m: int) -> int:
    """The length of a row of the tiles in memory: a multiple of 16, so that each row is aligned."""
    return (m + 15) // 16 * 16


def stored_gradients(
    operands: Operands, of_bias: tuple[tuple, torch.dtype] | None, at_once: int, by_queries: dict
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dq, dk and dv, in memory as q, k and v are, and the gradient of the bias, of the shape
    `[b or 1, h, n, m]` and dtype `of_bias`.
    """
    q, h = operands.q, operands.q.shape[1]
    dq, dk, dv = (empty_like_in_memory(t) for t in (q, operands.k, operands.v))
    db = None
    if of_bias is not None:
        db = torch.empty(of_bias[0], dtype=of_bias[1], device=q.device)
    by_queries, by_keys = configs_of(operands, by_queries)
    firsts = [None]
    if at_once != h:
        firsts = torch.empty((h // at_once, 4), dtype=torch.int32, device=q.device)
        launch(first_heads_kernel, (h // at_once,), firsts, at_once, num_warps=1)
    for first in firsts:
        tiles = new_tiles(operands, at_once, first)
        queries_gradient(operands, dq, tiles, by_queries)
        keys_products(operands, tiles, dk, dv, by_keys)
        if db is not None:
            batches_sums(tiles, db)
        del tiles  # before the next are made
    return dq, dk, dv, db


def new_tiles(operands: Operands, heads: int, first: Tensor | None) -> Tiles:
    b, n, m = operands.q.shape[0], operands.q.shape[2], operands.masks.keys_count
    make = torch.zeros if banded(operands) else torch.empty
    how = dict(dtype=operands.q.dtype, device=operands.q.device)
    return Tiles(*(make((b, heads, n, width(m)), **how) for _ in range(2)), first)


@triton.jit
def first_heads_kernel(FIRSTS, step):
    """The first head of each turn, at a multiple of 16 bytes. Inductor would compute it anew for
    each kernel that reads it.
    """
    turn = tl.program_id(0)
    tl.store(FIRSTS + turn * 4, turn * step)


def batches_sums(tiles: Tiles, db: Tensor) -> None:
    """Fills the heads of db `[b or 1, h, n, m]` that the tiles have, with their scores' gradients,
    added up over the batches if these share a bias. Grid: blocks of the numbers of a batch of db.
    """
    ds = tiles.score_gradients
    b, _, n, m = db.shape
    each = ds.shape[1] * n * ds.shape[3]
    launch(
        flash_sum_kernel, ((each + 2047) // 2048 * b,),
        ds, db, tiles.first, ds.stride(0), *strides_of(db)[:2], ds.shape[0] // b, each,
        ds.shape[3], m, BLOCK=2048, num_warps=4,
    )  # fmt: skip


# Bytes: ds and db once.
@triton.jit
def flash_sum_kernel(
    DS, DB, FIRST, ds_batch, db_batch, db_head, batches, each, width, m, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(each, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, batches):
        there = DS + (batch * batches + i) * ds_batch
        total += tl.load(there + at, at < each, 0.0).to(tl.float32)
    DB += batch * db_batch
    if FIRST is not None:
        DB += tl.load(FIRST).to(tl.int64) * db_head
    col = at % width
    tl.store(DB + at // width * m + col, total, (at < each) & (col < m))


def configs_of(operands: Operands, by_queries: dict) -> tuple[dict, dict]:
    """The configurations of the kernel of dq, which has `by_queries` without tiles, and of the
    kernel that multiplies the tiles, by the sizes of the heads, up to 128.
    """
    if max(operands.constants["BD"], operands.constants["BE"]) > 64:
        return by_queries, config_of(64, 128, 8, 3)
    if operands.masks.seed is None:
        by_queries = config_of(64, 32, 4, 3)
    return by_queries, config_of(64, 64, 4, 3)


def keys_products(operands: Operands, tiles: Tiles, dk: Tensor, dv: Tensor, config: dict) -> None:
    """Fills the heads of dk `[b, h / group, m, d]` and dv `[b, h / group, m, e]` that the tiles
    have. Grid: blocks of keys of these heads of all batches.
    """
    q, do, masks, constants = operands.q, operands.do, operands.masks, operands.constants
    ds, p, first = tiles
    group, block = masks.heads_of_a_key, config["BN"]
    kv_heads, m = ds.shape[1] // group, dk.shape[2]
    wanted = "SCALE", "SKIPS", "D", "BD", "E", "BE", "UPCAST", "PRECISION"
    launch(
        flash_products_kernel, ((m + block - 1) // block * kv_heads * ds.shape[0],),
        q, do, ds, p, dk, dv, first, q.shape[2], m, kv_heads, group, masks.low, masks.high,
        *strides_of(ds)[:3], *(s for t in (q, do, dk, dv) for s in row_strides(t)),
        **{name: constants[name] for name in wanted}, **config,
    )  # fmt: skip


# Operations: 2 b h n m (d + e), of the keys in the band. Bytes: the tiles, q, do, dk and dv once.
@triton.jit
def flash_products_kernel(
    Q, DO, DS, P, DK, DV, FIRST, n, m, kv_heads, group, low, high, tile_batch, tile_head, tile_row,
    q_batch, q_head, q_row, do_batch, do_head, do_row, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row,
    SCALE: tl.constexpr, SKIPS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    j0, at_head, batch = program_block(m, kv_heads, BN)
    kv_head = at_head if FIRST is None else at_head + tl.load(FIRST) // group
    row, col = tl.arange(0, BM), tl.arange(0, BN)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BE], tl.float32)
    left, begin, stop, end = query_range(None, batch, j0, n, m, low, high, "seen", SKIPS, BM, BN)
    for g in tl.range(0, group):
        head = kv_head * group + g
        tiles = batch * tile_batch + (at_head * group + g) * tile_head + j0
        for start in tl.range(left, end, BM):
            inside = tl.minimum(row, n - 1 - start)
            at = tiles + (start + row[:, None]).to(tl.int64) * tile_row + col[None, :]
            keep = (row[:, None] < n - start) & (col[None, :] < m - j0)
            p = tl.load(P + at, keep, 0.0)
            ds = tl.load(DS + at, keep, 0.0)
            q_rows = row_pointer(Q, (q_batch, q_head, q_row), batch, head, start)
            q = load_rows(q_rows, inside, q_row, D, BD, UPCAST)
            do_rows = row_pointer(DO, (do_batch, do_head, do_row), batch, head, start)
            do = load_rows(do_rows, inside, do_row, E, BE, UPCAST)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision=PRECISION)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
    d, e, keep = tl.arange(0, BD)[None, :], tl.arange(0, BE)[None, :], col[:, None] < m - j0
    DK = row_pointer(DK, (dk_batch, dk_head, dk_row), batch, kv_head, j0)
    tl.store(DK + col[:, None] * dk_row + d, dk * SCALE, keep & (d < D))
    DV = row_pointer(DV, (dv_batch, dv_head, dv_row), batch, kv_head, j0)
    tl.store(DV + col[:, None] * dv_row + e, dv, keep & (e < E))
