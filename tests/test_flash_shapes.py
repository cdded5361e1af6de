"""The flash attention kernels at the ends of what they take: head sizes, no queries or keys, memory
far apart, and the same bits every time.
"""

import itertools
import mmap

import pytest
import torch
from fusion_backend.patterns.attention import masked_attention

from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import forward as flash
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.ops.operator import operator_of
from tests.kernel_checks import DEVICE, randn, runs_kernels
from tests.test_flash import SMALL, check, dropout, masks, qkv

pytestmark = pytest.mark.usefixtures("poisoned_empties")
ALL = dict(q=True, k=True, v=True, bias=True, sinks=True)


@runs_kernels
@pytest.mark.parametrize("d", [17, 80, 127, 200, 256])
def test_head_sizes(d):
    """Odd ones and those between powers of two, with the tiles that the launcher chooses."""
    dtype = torch.float32 if d <= 128 else torch.float16
    for masking in (Masking(low=-23), Masking(bias=randn(1, 2, 17, 40, dtype=dtype))):
        check(*qkv(17, 40, d, dtype=dtype, b=1), masking, config=None)


@runs_kernels
@pytest.mark.parametrize("shape", itertools.product((1, 2), (1, 2), (1, 17), (1, 33)))
def test_biases_and_choices_that_broadcast(shape):
    """In every way, with the gradient of the bias."""
    q, k, v = qkv(17, 33, 16)
    check(
        q, k, v, Masking(bias=randn(*shape), high=3, hidden="fill", fill=-2.0)
    )  # else one for all keys changes nothing
    check(q, k, v, Masking(keep=randn(*shape) > -1))


@runs_kernels
@pytest.mark.parametrize("n, m", [(0, 20), (20, 0), (0, 0)])
def test_no_queries_or_no_keys(n, m):
    """Nothing attended to is 0, and a gradient of 0."""
    q, k, v = qkv(n, m, 16)
    for masking in (
        Masking(),
        Masking(low=0, high=3),
        Masking(sinks=randn(1, 2, 1, 1)),
        Masking(bias=randn(1, 2, n, m)),
        Masking(bias=randn(2, 2, n, m), dropout=dropout(0.5)),
        Masking(keys=torch.ones(2, m, dtype=torch.bool, device=DEVICE)),
        Masking(
            keep=torch.ones(2, 1, n, m, dtype=torch.bool, device=DEVICE), hidden="fill", fill=-1e9
        ),
    ):
        out, lse = flash.forward(q, k, v, masking, True, SMALL)
        assert (
            out.shape == q.shape
            and not out.any()
            and lse.shape[:2] == (2, 2)
            and lse.shape[-1] == n
        )
        found = flash_backward.backward(q, k, v, masking, out, lse, out, ALL, (SMALL, SMALL))
        for got, like in zip(found, (q, k, v, masking.bias, masking.sinks), strict=True):
            assert (got is None) == (like is None)
            assert got is None or (got.shape == like.shape and not got.any())


@pytest.mark.parametrize("b, n, m", [(2, 0, 6), (2, 6, 0), (0, 5, 6)])
def test_the_operator_of_nothing(b, n, m):
    """The kernels are not asked."""
    q, k, v = (torch.randn(b, 2, size, 16, device=DEVICE, requires_grad=True) for size in (n, m, m))
    args = (
        q,
        k,
        v,
        None,
        None,
        None,
        None,
        None,
        None,
        0,
        None,
        None,
        0.25,
        None,
        None,
        "nan",
        "seen",
    )
    assert "is empty" in masked_attention.guard_fn(*args).reason
    out = operator_of(masked_attention).overload(*args)[0]
    assert out.shape == q.shape and not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@runs_kernels
@pytest.mark.parametrize(
    "kind",
    ["padding behind", "bias for all batches", "bias of keys", "dense", "dropout, bias", "sinks"],
)
def test_the_same_bits_every_time(kind):
    """No sum depends on who comes first (what the interpreter cannot show, a GPU does)."""
    q, k, v = qkv(20, 40, 16, h=4, kv=2)
    masking = masks(20, 40, h=4)[kind]
    found = []
    for _ in range(2):
        out, lse = flash.forward(q, k, v, masking, True, SMALL)
        grads = flash_backward.backward(q, k, v, masking, out, lse, out, ALL, (SMALL, SMALL))
        found.append([out, lse, *(g for g in grads if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def far(*shape, strides, dtype=torch.float16):
    """Memory of which most is never touched, and so never there."""
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    memory = torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype)
    return memory.as_strided(shape, strides)


@runs_kernels
@pytest.mark.skipif(DEVICE == "cuda", reason="needs memory that is only there when it is touched")
def test_places_beyond_two_to_the_31():
    """Batches, heads and rows that are so far apart that a product of 32 bits would overflow."""
    shape = (2, 2, 20, 16)
    q, k, v = (
        far(*shape, strides=(2**31 + 64, 2**30, 2**22, 1)).copy_(randn(*shape)) for _ in "qkv"
    )
    check(q, k, v, Masking(low=0))
    shape, strides = (2, 2, 20, 20), (2**31 + 64, 2**30, 2**22, 1)
    bias = far(*shape, strides=strides).copy_(randn(*shape))
    keep = far(*shape, strides=strides, dtype=torch.bool).copy_(randn(*shape) > -1)
    check(q, k, v, Masking(bias=bias, keep=keep))
    keys = far(2, 20, strides=(2**31 + 64, 2**22), dtype=torch.bool).fill_(True)
    check(q, k, v, Masking(keys=keys.index_fill_(1, torch.tensor([3, 7], device=DEVICE), False)))


def test_rows_too_far_apart_are_refused():
    q, k, v = (torch.empty_strided((2, 2, 20, 16), (1, 1, 2**23, 1), device="meta") for _ in "qkv")
    bias = torch.empty_strided((20, 20), (2**23, 1), device="meta")
    rest = (None, None, None, None, None, None, None, None, 0.25, None, None, "zero", "seen")
    near = (t.contiguous() for t in (q, k, v))
    for given in ((q, k, v, None), (*near, bias)):
        assert "8388608 apart" in masked_attention.guard_fn(*given, *rest).reason
