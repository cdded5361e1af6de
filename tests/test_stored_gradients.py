"""The gradients of attention beside a bias or a dense mask, by way of probabilities and score
gradients in memory, against the written-out formula in fp64.
"""

import pytest
import torch

from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import backward_stored
from fusion_backend.kernels.attention.backward_common import Operands
from fusion_backend.kernels.attention.configs import constants_of
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.kernels.attention.masking import mask_arguments
from tests.kernel_checks import DEVICE, randn, runs_kernels
from tests.test_flash import check, dropout, qkv

pytestmark = pytest.mark.usefixtures("poisoned_empties")
HALF = torch.bfloat16


def randomly(*shape) -> torch.Tensor:
    """A dense mask that leaves each row a key."""
    keep = torch.rand(*shape, device=DEVICE) > 0.3
    keep[..., 0] = True
    return keep


@pytest.fixture
def stored(monkeypatch):
    """The heads at once, for each backward that took this way."""
    taken = []

    def gradients(operands, of_bias, at_once, by_queries):
        taken.append(at_once)
        return backward_stored.stored_gradients(operands, of_bias, at_once, by_queries)

    monkeypatch.setattr(flash_backward, "stored_gradients", gradients)
    return taken


@runs_kernels
@pytest.mark.parametrize("room", [1, 1 << 20])
@pytest.mark.parametrize(
    "n, m, d, h, kv, shape, dtype",
    [
        (130, 130, 80, 4, 4, (1, 4, 130, 130), HALF),
        (65, 129, 72, 3, 3, (3, 65, 129), torch.float16),
        (40, 100, 80, 4, 2, (2, 4, 40, 100), HALF),
        (40, 100, 128, 1, 1, (1, 1, 40, 100), HALF),
        (1, 70, 100, 2, 1, (1, 2, 1, 70), HALF),
    ],
)
def test_a_bias_with_a_gradient(n, m, d, h, kv, shape, dtype, room, stored, monkeypatch):
    """A bias for all batches, and for each; one group of heads at a time, and all at once."""
    monkeypatch.setattr(backward_stored, "ROOM", room)
    bias = randn(*shape, dtype=dtype)
    check(*qkv(n, m, d, h=h, kv=kv, dtype=dtype), Masking(bias=bias), config=None)
    assert stored == [h // kv if room == 1 else h]


@runs_kernels
@pytest.mark.parametrize("room", [1, 1 << 20])
@pytest.mark.parametrize("d, e", [(80, 80), (96, 64), (16, 128)])
@pytest.mark.parametrize("kind", ["causal", "window", "dropout", "fill", "added"])
def test_beside_other_masks(kind, d, e, room, stored, monkeypatch):
    """Where tiles are left out, memory that nobody has written to is not read."""
    monkeypatch.setattr(backward_stored, "ROOM", room)
    n = 150
    masks = dict(
        causal=dict(low=0),
        window=dict(low=0, high=20),
        dropout=dict(dropout=dropout(0.3)),
        fill=dict(keep=randomly(2, 1, n, n), hidden="fill", fill=-3.0),
        added=dict(keys=randn(2, 1, 1, n, dtype=HALF), keys_are="added"),
    )[kind]
    masking = Masking(bias=randn(1, 2, n, n, dtype=HALF), **masks)
    check(*qkv(n, n, d, e=e, dtype=HALF), masking, config=None)
    assert len(stored) == 1


@runs_kernels
def test_without_a_gradient_of_a_mask(stored):
    bias = randn(1, 2, 70, 70, dtype=HALF)
    check(*qkv(70, 70, 80, dtype=HALF), Masking(bias=bias), config=None, needs=["q", "k", "v"])
    check(*qkv(70, 70, 80, dtype=HALF), Masking(bias=bias), config=None, needs=["v"])
    check(*qkv(70, 70, 80, dtype=HALF), Masking(keep=randomly(2, 1, 70, 70)), config=None)
    bias = randn(1, 2, 130, 130, dtype=HALF)
    check(*qkv(130, 130, 64, dtype=HALF), Masking(bias=bias, dropout=dropout(0.3)), config=None)
    check(*qkv(130, 130, 64, dtype=HALF), Masking(bias=bias), config=None, needs=["k"])
    assert stored == [2, 2, 2, 2, 2]


@runs_kernels
def test_without_dq(stored):
    """Its kernel would have written the sums that the others read."""
    check(*qkv(40, 70, 80, dtype=HALF), Masking(low=0), config=None, needs=["k"])
    shared = Masking(bias=randn(1, 1, 40, 70, dtype=HALF))
    check(*qkv(40, 70, 80, dtype=HALF), shared, config=None, needs=["bias"])
    assert not stored


@runs_kernels
@pytest.mark.parametrize("d, e", [(64, 64), (30, 20), (16, 64)])
def test_heads_of_up_to_64(d, e, stored):
    bias = randn(1, 2, 70, 130, dtype=HALF)
    check(*qkv(70, 130, d, e=e, b=3, dtype=HALF), Masking(bias=bias), config=None)
    assert stored == [2]


@runs_kernels
@pytest.mark.parametrize(
    "d, dtype, masks, needs",
    [
        (80, HALF, dict(bias=randn(1, 2, 70, 130)), "qkv bias"),  # it would be rounded
        (80, HALF, dict(bias=randn(1, 2, 1, 130, dtype=HALF)), "qkv bias"),
        (80, torch.float32, dict(bias=randn(1, 2, 70, 130)), "qkv bias"),
        (64, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF), low=0), "qkv bias"),  # slower
        (64, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF), low=0, dropout=dropout(0.3)), "qkv"),
        (80, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF), low=0), "qkv"),
        (64, HALF, dict(keep=randomly(2, 1, 70, 130)), "qkv"),
        (80, HALF, dict(low=0), "qkv"),
        (130, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF)), "qkv bias"),  # not timed
        (80, HALF, dict(bias=randn(1, 1, 70, 130, dtype=HALF)), "qkv bias"),
        (80, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF), cap=0.5), "qkv bias"),
        (80, HALF, dict(keep=randomly(2, 1, 70, 130), cap=0.5), "qkv"),
        (80, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF), keys=randomly(2, 130)), "qkv bias"),
        (80, HALF, dict(bias=randn(1, 2, 70, 130, dtype=HALF)), "q bias"),
    ],
)
def test_where_the_other_kernels_are_used(d, dtype, masks, needs, stored):
    names = [*needs.split()[0], *needs.split()[1:]]
    check(*qkv(70, 130, d, dtype=dtype), Masking(**masks), config=None, needs=names)
    assert not stored


@runs_kernels
def test_a_bias_that_repeats_over_the_batches(stored):
    masking = Masking(bias=randn(2, 2, 40, 70, dtype=HALF))
    check(*qkv(40, 70, 80, b=4, dtype=HALF), masking, config=None)
    assert not stored


@pytest.mark.parametrize("b, n, m", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_at_all(b, n, m):
    assert at_once(b, 2, n, m) is None


def at_once(b, h, n, m, kv=None):
    """heads_at_once, with heads of 128 and a bias with a gradient."""
    q, k = (
        torch.empty(b, *size, 128, dtype=HALF, device="meta") for size in ((h, n), (kv or h, m))
    )
    masking = Masking(bias=torch.empty(1, h, n, m, dtype=HALF, device="meta"))
    masks, constants = mask_arguments(q, k, masking), constants_of(q, k, masking)
    operands = Operands(q, k, k, q, q, q, q, masks, constants)
    return backward_stored.heads_at_once(operands, ((1, h, n, m), HALF))


def test_how_many_heads_take_a_turn():
    assert at_once(16, 16, 512, 512) == 16  # 256 MiB
    assert at_once(8, 16, 2048, 2048) == 2
    assert at_once(8, 16, 2048, 2049) == 1  # a row has 2,064 numbers in memory
    assert at_once(3, 12, 1024, 1024) == 12
    assert at_once(7, 12, 1024, 1024) == 6  # nine would fit
    assert at_once(16, 16, 4096, 4096) == 1  # 1 GiB a head
    assert at_once(8, 16, 4096, 4096, kv=8) == 2
    assert at_once(8, 16, 4096, 4096, kv=4) is None  # 2 GiB
    assert at_once(16, 32, 4096, 4096) is None  # 32 turns
