"""A linear layer and its activation as one call of the library: cuBLASLt adds the bias and applies
relu, or the tanh form of gelu, before it rounds and stores its product.
"""

from __future__ import annotations

from torch import Tensor

from fusion_backend.compat.torch import addmm_activation
from fusion_backend.kernels.gemm.specialised_linear import tile_of
from fusion_backend.kernels.gemm.tiles import are_many, measured

ACTIVATIONS = ("relu", "gelu_tanh")


def library_takes(x: Tensor, w: Tensor, b: Tensor | None, act: str) -> bool:
    """Is act(x W + b) one call of the library, and none of our tiles known to be faster? On a CPU
    its gelu is another one.
    """
    if act not in ACTIVATIONS or b is None or not x.is_cuda or x.element_size() != 2:
        return False
    if are_many(x) and tile_of(x, w, act).finishers:  # faster at every size that was timed
        return measured(1, *w.shape, act, specialised=True) == ()
    return not measured(1, *w.shape, act)


def library_linear(x: Tensor, w: Tensor, b: Tensor, act: str) -> Tensor:
    """act(x W + b) `[..., n]`, contiguous, for what `library_takes`. Sums in fp32, rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    y = addmm_activation(b, rows, w, use_gelu=act == "gelu_tanh")
    return y.view(*x.shape[:-1], w.shape[1])
