"""The gradient of a bias that many batches share, and a bias that repeats over the batches: the
kernels against the written-out formula in fp64.
"""

import pytest
import torch

from fusion_backend.kernels.attention import backward_bias
from fusion_backend.kernels.attention.forward import Masking
from tests.kernel_checks import randn, runs_kernels
from tests.test_flash import check, dropout, qkv

pytestmark = pytest.mark.usefixtures("poisoned_empties")


@runs_kernels
@pytest.mark.parametrize("b, h, n, kind", [(9, 2, 17, "bias for all batches"), (5, 1, 40, "bias")])
@pytest.mark.parametrize("programs", [1, 7, 264])
def test_batches_that_share_a_bias_are_added_up_in_parts(b, h, n, kind, programs, monkeypatch):
    """As the windows of Swin: few tiles, many batches. One part, one a batch, and between."""
    monkeypatch.setattr(backward_bias, "PROGRAMS", programs)
    shape = (1, h, n, n) if "all" in kind else (1, 1, n, n)
    masking = Masking(bias=randn(*shape), low=-3)
    check(*qkv(n, n, 16, h=h, b=b), masking, needs=["bias"])
    check(
        *qkv(n, n, 16, h=h, b=b, dtype=torch.bfloat16),
        masking._replace(bias=randn(*shape).bfloat16()),
    )


@runs_kernels
@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize("shape", [(3, 2, 17, 20), (3, 1, 17, 1)])
def test_a_bias_that_repeats_over_the_batches(shape, programs, monkeypatch):
    """As that of the windows of Swin, which come image by image."""
    monkeypatch.setattr(backward_bias, "PROGRAMS", programs)
    bias = randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    check(*qkv(17, 20, 16, b=6), Masking(bias=bias, low=-10, dropout=dropout(0.3)))


@pytest.mark.parametrize(
    "tiles, shared, parts", [(3, 4096, 88), (300, 64, 1), (264, 9, 1), (1, 5, 5), (0, 3, 3)]
)
def test_how_many_parts(tiles, shared, parts):
    assert backward_bias.parts_of(tiles, shared) == parts
