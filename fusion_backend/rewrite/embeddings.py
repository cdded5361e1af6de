"""A kernel computes the gradient of large embeddings.

Inductor adds the gradients of the tokens to a table of zeros in fp32 by atomics, and rounds the
table afterwards. For each element of the weight it moves 10 bytes where the gradient has 2. It may
also fuse these additions with other readers of the same gradients. Here the tokens are sorted, and
each row of the gradient is written once, with the same bits every time.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_backend.compat.torch import is_traceable_wrapper_subclass
from fusion_backend.kernels.common.inputs import dynamic, reject_dtypes
from fusion_backend.kernels.common.launch import on_gpu
from fusion_backend.kernels.common.reachable import make_known
from fusion_backend.kernels.embedding.gradient import gradient
from fusion_backend.ops.op import Op
from fusion_backend.ops.operator import operator_of
from fusion_backend.reporting.places import location
from fusion_backend.reporting.reject import Reject

LARGE = 50_000_000  # elements of the weight
SIGNATURE = inspect.signature(F.embedding)


@Op
def sorted_embedding(ids: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """The rows of weight, `[v, n]`, that ids select, int64 or int32 of any shape: `[*ids.shape,
    n]`. The row padding_idx has no gradient; -1 stands for no such row.
    """
    return torch.ops.aten.embedding.default(weight, ids, padding_idx)


@sorted_embedding.guard
def _(ids, weight, padding_idx):
    if any(map(dynamic, weight.shape)):
        return Reject("a size of the weight is dynamic")
    if not statically_known_true(ids.numel() > 0):
        return Reject("there may be no ids")
    return reject_dtypes(weight=weight)


@sorted_embedding.kernel
def _(ids, weight, padding_idx):
    # never chosen; but an op without a kernel has no backward kernel either
    return torch.ops.aten.embedding.default(weight, ids, padding_idx)


@sorted_embedding.backward
def _(saved, d):
    return None, gradient(d, saved.ids, saved.weight, saved.padding_idx)


@sorted_embedding.inputs(dict(rows=7, v=100, n=24), dict(rows=16384, v=50257, n=1024))
def _(tensor, rows, v, n):
    ids = (tensor(rows).abs() * v / 4).long().clamp(max=v - 1)
    return ids, tensor(v, n), 3


def give_gradients(gm: fx.GraphModule) -> list[str]:
    """Have the large embeddings of a rewritten graph call `sorted_embedding`. Returns a sentence
    for each, with its place in the user's code.
    """
    found = []
    for n in gm.graph.find_nodes(op="call_function", target=F.embedding):
        given = SIGNATURE.bind(*n.args, **n.kwargs)
        given.apply_defaults()
        ids, weight, padding, largest_norm, _, by_frequency, sparse = given.args
        if largest_norm is not None or by_frequency or sparse or not is_large(ids, weight):
            continue
        rows, columns = weight.meta["example_value"].shape
        padding = -1 if padding is None else padding % rows
        found.append((n, (ids, weight, padding), f"{location(n)}: {rows:,} × {columns:,}"))
    for n, args, _ in found:
        n.target = operator_of(sorted_embedding).overload
        n.args, n.kwargs = args, dict(forward="reference")
    if found:
        make_known([sorted_embedding.backward_fn])
        gm.recompile()
    return [told for *_, told in found]


def is_large(ids: object, weight: object) -> bool:
    """Is it a weight in 16 bits on a GPU, with a gradient, and large enough for the kernel?"""
    table, which = (
        n.meta.get("example_value") if isinstance(n, fx.Node) else None for n in (weight, ids)
    )
    return (
        isinstance(table, Tensor)
        and isinstance(which, Tensor)
        and not any(map(is_traceable_wrapper_subclass, (table, which)))
        and torch.is_grad_enabled()
        and table.requires_grad
        and table.itemsize == 2
        and on_gpu(table)
        and sorted_embedding.ask("guard", which, table, -1) is None
        and table.numel() >= LARGE
    )
