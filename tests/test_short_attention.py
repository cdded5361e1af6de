"""Short attention, of which a tile has all scores of a head: its kernels against the written-out
formula in fp64, what they take, and how programs share heads and batches.
"""

import pytest
import torch
from fusion_backend.patterns.attention import masked_attention

from fusion_backend.kernels.attention import backward, forward, parts
from fusion_backend.kernels.attention.configs import short
from fusion_backend.kernels.attention.forward import Masking
from tests.kernel_checks import randn, runs_kernels
from tests.selection import only_full, product
from tests.test_flash import check, dropout, masks, qkv

pytestmark = pytest.mark.usefixtures("poisoned_empties")
HALF = torch.float16
SIZES = [(17, 40), (1, 33), (64, 64), (49, 49)]
KINDS = [kind for kind in masks(4, 4) if "sinks" not in kind]
SIZED = [(SIZES[i % 4], kind) for i, kind in enumerate(KINDS)]
SIZED += [
    only_full(size, kind)
    for i, kind in enumerate(KINDS)
    for size in (*SIZES[: i % 4], *SIZES[i % 4 + 1 :])
]
BOTH = ["short_forward", "short_gradients"]


@pytest.fixture
def launchers(monkeypatch) -> list[str]:
    """Which of the two kernels have run."""
    names: list[str] = []

    def counted(module, name):
        function = getattr(module, name)

        def call(*args):
            names.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, call)

    counted(forward, "short_forward")
    counted(backward, "short_gradients")
    return names


@runs_kernels
@pytest.mark.parametrize("size, kind", SIZED)
def test_masks(size, kind, launchers):
    check(*qkv(*size, 16, dtype=HALF), masks(*size, dtype=HALF)[kind], config=None)
    assert launchers == BOTH


@runs_kernels
@product(
    sizes=[(16, 16), (40, 17), (24, 64)],
    dtype=[torch.bfloat16, HALF],
    kind=["padding", "bias for all batches", "dropout"],
)
def test_head_sizes(sizes, dtype, kind, launchers):
    d, e = sizes
    check(*qkv(17, 40, d, e=e, dtype=dtype), masks(17, 40, dtype=dtype)[kind], config=None)
    assert launchers == BOTH


@runs_kernels
@pytest.mark.parametrize(
    "shape, programs",
    [((1, 2), 1), ((1, 2), 264), ((1, 1), 7), ((3, 2), 7), ((3, 1), 264), ((9, 2), 7), ((9, 1), 1)],
)
def test_heads_and_batches_that_share_a_bias(shape, programs, launchers, monkeypatch):
    """One for all, one a head, those of windows that repeat over the batches, and one a batch. One
    program a bias, one a batch and head, and between.
    """
    monkeypatch.setattr(parts, "PROGRAMS", programs)
    bias = randn(*shape, 17, 40, dtype=HALF)
    masking = Masking(bias=bias[..., ::2], low=-10, dropout=dropout(0.3))
    check(*qkv(17, 20, 16, b=9, dtype=HALF), masking, config=None)
    assert launchers == BOTH


@runs_kernels
@pytest.mark.parametrize("needs", [["q"], ["k"], ["v"], ["bias"], ["q", "bias"]])
def test_only_wanted_gradients(needs, launchers):
    masking = Masking(bias=randn(1, 2, 17, 33, dtype=HALF))
    check(*qkv(17, 33, 40, dtype=HALF), masking, needs=needs, config=None)
    assert launchers == BOTH


@runs_kernels
def test_layouts(launchers):
    """A packed projection, rows that are apart, expanded values, and a bias whose keys are."""
    packed = randn(2, 33, 3, 2, 24, dtype=HALF).permute(2, 0, 3, 1, 4)
    bias = randn(1, 2, 33, 33, dtype=HALF).mT
    out = check(*packed, Masking(bias=bias), config=None)
    assert out.transpose(1, 2).is_contiguous()
    wide, one = randn(2, 2, 66, 40, dtype=HALF)[:, :, ::2, 8:32], randn(2, 1, 33, 24, dtype=HALF)
    check(wide, wide, one.expand(-1, 2, -1, -1), Masking(bias=bias), config=None)
    assert launchers == BOTH * 2


@runs_kernels
@pytest.mark.parametrize("size", [(65, 20), (20, 128), (128, 128)])
def test_longer_ones_with_the_gradient_of_a_bias(size, launchers):
    bias = randn(1, 2, *size, dtype=HALF)
    check(*qkv(*size, 24, dtype=HALF), Masking(bias=bias, low=-50), config=None)
    assert launchers == BOTH[1:]


@runs_kernels
@pytest.mark.parametrize(
    "more",
    [
        dict(keep=torch.ones(1, 1, 70, 80, dtype=torch.bool)),
        dict(dropout=dropout(0.3)),
        dict(bias=None, low=0),
        "no gradient of the bias",
    ],
)
def test_longer_ones_that_several_kernels_compute(more, launchers):
    masking = Masking(bias=randn(1, 2, 70, 80, dtype=HALF))
    needs = ["q", "k", "v"] if isinstance(more, str) else ["q", "k", "v", "bias"]
    masking = masking if isinstance(more, str) else masking._replace(**more)
    check(*qkv(70, 80, 24, dtype=HALF), masking, needs=needs, config=None)
    assert not launchers


LARGEST = dict(n=64, m=64, d=64)


@pytest.mark.parametrize(
    "sizes, masking, fits",
    [
        ({}, Masking(), True),
        (dict(n=65), Masking(), False),
        (dict(m=65), Masking(), False),
        (dict(d=65), Masking(), False),
        (dict(e=65), Masking(), False),
        (dict(kv=1), Masking(), False),
        (dict(dtype=torch.float32), Masking(), False),
        ({}, Masking(sinks=torch.zeros(1, 2, 1, 1)), False),
    ],
)
def test_which_are_short(sizes, masking, fits):
    assert short(*qkv(**LARGEST | dict(dtype=HALF) | sizes), masking, 64) == fits


@pytest.mark.parametrize(
    "tiles, shared, found",
    [(3, 4096, 88), (192, 64, 4), (300, 64, 3), (264, 9, 1), (1, 5, 5), (0, 3, 3), (2000, 3, 1)],
)
def test_how_many_parts(tiles, shared, found):
    """As many programs as run at once, or several times as many without most of a wave idle."""
    assert parts.parts_of(tiles, shared) == found


def test_sizes_that_only_a_run_knows():
    unknown = torch.SymInt.__new__(torch.SymInt)
    assert parts.parts_of(3, unknown) == 88 and parts.parts_of(unknown, 3) == 1


@pytest.mark.parametrize(
    "sizes, more, known",
    [
        (dict(b=256, h=12, n=49, d=32), {}, True),
        (dict(b=256, h=12, n=49, d=32), dict(windows=torch.zeros(4, 49, 49)), False),
        (dict(b=256, h=12, n=49, d=32), dict(cap=20.0), False),
        (dict(b=128, h=12, n=49, d=32), {}, False),
        (dict(b=512, h=12, n=49, d=48), {}, False),
        (dict(b=256, h=12, n=65, d=32), {}, False),
        (dict(b=256, h=12, n=60, d=64), dict(p=0.1), True),
        (dict(b=100, h=12, n=60, d=64), dict(p=0.1), False),
        (dict(b=100, h=12, n=60, d=64), {}, True),
    ],
)
def test_which_are_taken_without_a_measurement(sizes, more, known):
    """Those that were timed: see the rows of short attention in docs/performance.md."""
    b, h, n, d = sizes.values()
    q = torch.empty(b, h, n, d, dtype=HALF, device="meta")
    given = {p.name: more.get(p.name) for p in masked_attention.params} | dict(q=q, k=q, v=q)
    answer = masked_attention.worthwhile_fn(*given.values(), False)
    assert (answer is None) == known
