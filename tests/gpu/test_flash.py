"""On a GPU: the flash attention kernels in graphs with dropout, and with more scores than 31 bits
count.
"""

import pytest
import torch

from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import forward as flash
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.kernels.common.dropout import Dropout
from tests.test_flash_dropout import (  # noqa: F401  (the same tests, here with the kernels)
    taken,
    test_batches_and_heads_are_of_one_draw,
    test_checkpoint_draws_the_same_again,
    test_graphs_draw_a_seed,
    test_nothing_and_everything_dropped,
    test_sites_differ_and_seeds_repeat,
    test_tiles_are_parts_of_one_matrix,
)
from tests.test_flash_shapes import test_head_sizes, test_the_same_bits_every_time  # noqa: F401

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 300])
def test_beyond_31_bits(window):
    """The last queries of 65,536 squared scores, and the keys that they alone see."""
    n, last = 1 << 16, 64
    q, k, v, do = (torch.randn(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    dropout = Dropout(torch.tensor([9], device="cuda"), 0.5) if window is None else None
    masking = Masking(low=0, high=window, scale=0.125, dropout=dropout)
    out, lse = flash.forward(q, k, v, masking, True)
    needs = dict(q=True, k=True, v=True, bias=False)
    dq, dk, dv, *_ = flash_backward.backward(q, k, v, masking, out, lse, do, needs)
    assert all(t.isfinite().all() for t in (out, dq, dk, dv))
    if window is None:  # half of the probabilities, which dv shows too
        ones, _ = flash.forward(q, k, torch.ones_like(v), masking, False)
        assert abs(ones.double().mean().item() - 1) < 0.05
        return
    tail = torch.arange(n - last, n, device="cuda")
    apart = tail[:, None] - torch.arange(n, device="cuda")
    s = (q[0, 0, -last:].double() @ k[0, 0].double().T * 0.125).masked_fill(
        (apart < 0) | (apart > window), -torch.inf
    )
    want = s.softmax(-1) @ v[0, 0].double()
    assert ((out[0, 0, -last:].double() - want).norm() / want.norm()).item() < 1e-2
    alone = s.softmax(-1)[:, -last:].T @ do[0, 0, -last:].double()
    assert ((dv[0, 0, -last:].double() - alone).norm() / alone.norm()).item() < 1e-2
