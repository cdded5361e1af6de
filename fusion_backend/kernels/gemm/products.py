"""Sums of matrix products that grow in place, over chunks of what is summed.

In a compiled graph `total += a @ b` becomes torch.addmm with a result of its own: cuBLAS's result
is first filled with a copy of the sum so far, a second tensor of that size and two more passes over
it. Functionalisation leaves alone what it cannot see into, and Inductor then finds that nobody else
holds the sum and writes it in place. A triton_op would be seen into, so this is an opaque operator,
though its calls cost the host more: linear_cross_entropy makes three a step, each beside products
of a quarter of its logits that take the GPU far longer.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fusion::add_product", mutates_args=("total", "before"))
def add_product(total: Tensor, a: Tensor, b: Tensor, before: Tensor | None) -> None:
    """total += a b, rounded once; total `[m, n]`, a `[m, k]` and b `[k, n]` of one dtype.

    `before` is left as it is, but counts as written: what is computed from it later waits for the
    product. A product that only the backward needs would else be put off until then, and its
    factors kept.
    """
    torch.addmm(total, a, b, out=total)


@add_product.register_fake
def _(total, a, b, before):
    return None
