"""Short attention, of which a tile has all scores of a head: its kernels against the written-out
formula in fp64, what they take, and how programs share heads and batches.
"""

import pytest
import torch
from fusion_backend.patterns.attention import masked_attention

import fusion_backend.decide.gate
from fusion_backend.kernels.attention import backward, forward, parts
from fusion_backend.kernels.attention.configs import short
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.testing.asserts import Collector
from tests.kernel_checks import DEVICE, distance, randn, runs_kernels
from tests.selection import only_full, product
from tests.test_flash import check, dropout, masks, qkv, seen

pytestmark = pytest.mark.usefixtures("poisoned_empties")
HALF = torch.float16
SIZES = [(17, 40), (1, 33), (64, 64), (49, 49)]
KINDS = [kind for kind in masks(4, 4) if "sinks" not in kind and not kind.startswith("dense")]
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
@pytest.mark.parametrize("shape", [(33,), (17, 1), (2, 17, 33), (3, 1, 1, 33), (3, 1, 17, 1)])
def test_biases_of_fewer_numbers(shape, launchers):
    """Of keys or of queries alone; without heads or batches."""
    masking = Masking(bias=randn(*shape, dtype=HALF))
    check(*qkv(17, 33, 16, b=6, dtype=HALF), masking, config=None)
    assert launchers == BOTH


@runs_kernels
@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize(
    "masking",
    [
        Masking(keys=torch.arange(40, device=DEVICE) < torch.tensor([[0], [25]], device=DEVICE)),
        Masking(low=5),
        Masking(high=-25),
    ],
    ids=["keys", "low", "high"],
)
def test_rows_that_see_nothing(masking, fills, launchers):
    """0 and without a gradient, NaN, or the mean over all keys: as the masking says."""
    q, k, v = qkv(20, 40, 16, dtype=HALF)
    dead = ~seen((2, 2, 20, 40), masking).any(-1)
    assert dead.any()
    lowest = torch.finfo(torch.float32).min
    if fills:
        out = check(q, k, v, masking._replace(hidden="fill", fill=lowest), config=None)
        mean = v.float().mean(2)[:, :, None].expand_as(out)
        assert torch.allclose(out[dead].float(), mean[dead], atol=1e-3)
    else:
        out = check(q, k, v, masking, config=None)
        assert not out[dead].any() and out[~dead].ne(0).any(-1).all()
        out, lse = forward.forward(q, k, v, masking._replace(hidden="nan"), True)
        assert torch.equal(out.isnan().all(-1), dead) and torch.equal(out.isnan().any(-1), dead)
        needs = dict(q=True, k=True, v=True, bias=False, sinks=False)
        masking = masking._replace(hidden="nan")
        dq, *_ = backward.backward(q, k, v, masking, out, lse, torch.ones_like(out), needs)
        assert torch.equal(dq.isnan().all(-1), dead)
    assert launchers == BOTH * (1 if fills else 2)


@runs_kernels
@pytest.mark.parametrize("size", [(65, 80), (128, 128)])
def test_longer_ones_with_the_gradient_of_a_bias(size, launchers):
    bias = randn(1, 2, *size, dtype=HALF)
    check(*qkv(*size, 24, dtype=HALF), Masking(bias=bias, low=-50), config=None)
    assert launchers == BOTH[1:]


# What changes in the bias, the lengths, the masking and what has a gradient.
LONGER = {
    "no gradient of the bias": dict(needs=["q", "k", "v"]),
    "a bias of each batch": dict(bias=(2, 2)),
    "few queries": dict(n=20),
    "few keys": dict(m=20),
    "no bias": dict(bias=None, masking=dict(low=0)),
    "dropout": dict(masking=dict(dropout=dropout(0.3))),
    "capped": dict(masking=dict(cap=2.0)),
    "filled": dict(masking=dict(low=0, hidden="fill", fill=-3.0)),
    "padding": dict(masking=dict(keys=torch.arange(80, device=DEVICE)[None] < 70)),
    "dense": dict(masking=dict(keep=torch.arange(80, device=DEVICE) % 3 != 1)),
}


@runs_kernels
@pytest.mark.parametrize("name", LONGER)
def test_longer_ones_that_several_kernels_compute(name, launchers):
    """In one, they were not faster or not timed."""
    case = dict(n=70, m=80, bias=(1, 2), needs=["q", "k", "v", "bias"], masking={}) | LONGER[name]
    n, m, bias = case["n"], case["m"], case["bias"]
    masking = Masking(bias=bias and randn(*bias, n, m, dtype=HALF))._replace(**case["masking"])
    check(*qkv(n, m, 24, dtype=HALF), masking, needs=case["needs"], config=None)
    assert not launchers


@pytest.mark.skipif(DEVICE == "cuda", reason="this decision is for fake tensors")
def test_a_number_of_batches_that_only_a_run_knows(launchers, monkeypatch):
    """A mask of each batch, and a bias that all share."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)

    def fn(q, k, v, mask, bias):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, mask) + sdpa(q, k, v, bias[None])

    def results(call, tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        for t in leaves[:4]:
            torch._dynamo.mark_dynamic(t, 0)
        out = call(*leaves)
        return [out, *torch.autograd.grad((out * out.detach()).sum(), leaves)]

    collector = Collector({"fusion.gate": "always"})
    compiled = torch.compile(fn, backend=collector)
    for b in (3, 5):
        sizes = *((b, 2, 20, 16) for _ in "qkv"), (b, 1, 20, 20), (2, 20, 20)
        inputs = [randn(*size, dtype=HALF) for size in sizes]
        exactly = results(fn, [t.double() for t in inputs])
        for got, want in zip(results(compiled, inputs), exactly, strict=True):
            assert distance(got, want) < 2e-3
    assert len(collector.graphs) == 1 and launchers == (BOTH[:1] * 2 + BOTH[1:] * 2) * 2


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
        (dict(n=0), Masking(), False),
        ({}, Masking(sinks=torch.zeros(1, 2, 1, 1)), False),
        ({}, Masking(keep=torch.ones(64, dtype=torch.bool)), False),
    ],
)
def test_which_are_short(sizes, masking, fits):
    assert short(*qkv(**LARGEST | dict(dtype=HALF) | sizes), masking, 64) == fits


@pytest.mark.parametrize(
    "biases, shared, found",
    [
        (3, 4096, 88),  # one wave of all that run at once
        (192, 64, 4),  # three waves of 16, not one of 64
        (264, 9, 1),
        (1, 768, 256),  # three each
        (1, 5, 5),
        (0, 3, 3),
        (2000, 3, 1),
        (3, None, 88),
        (None, 12, 12),
        (None, 40, 16),
        (None, None, 1),
    ],
)
def test_how_many_parts(biases, shared, found):
    """None: only a run knows it."""
    unknown = torch.SymInt.__new__(torch.SymInt)
    sizes = (unknown if size is None else size for size in (biases, shared))
    assert parts.parts_of(*sizes) == found


SHARED, EACH = torch.empty(1, 12, 49, 49, dtype=HALF), torch.empty(256, 1, 49, 49, dtype=HALF)


@pytest.mark.parametrize(
    "sizes, more, known",
    [
        (dict(b=256, h=12, n=49, d=32), dict(bias=SHARED), True),
        (dict(b=256, h=12, n=49, d=32), dict(bias=EACH), False),
        (dict(b=256, h=12, n=49, d=32), {}, False),
        (dict(b=256, h=12, n=49, d=32), dict(bias=SHARED, windows=torch.zeros(4, 49, 49)), False),
        (dict(b=256, h=12, n=49, d=32), dict(bias=SHARED, cap=20.0), False),
        (dict(b=256, h=12, n=49, d=32), dict(bias=SHARED, p=0.1), False),
        (dict(b=128, h=12, n=49, d=32), dict(bias=SHARED), False),
        (dict(b=512, h=12, n=49, d=48), dict(bias=SHARED), False),
        (dict(b=512, h=12, n=32, d=32), dict(bias=SHARED[..., :32, :32]), False),
        (dict(b=256, h=12, n=65, d=32), dict(bias=torch.empty(12, 65, 65)), False),
        (dict(b=256, h=12, n=60, d=64), dict(p=0.1), True),
        (dict(b=128, h=12, n=60, d=64), {}, False),
    ],
)
def test_which_are_taken_without_a_measurement(sizes, more, known):
    """Those of heads of 32 that were timed: see docs/performance/attention.md. Heads of
    64 as before.
    """
    b, h, n, d = sizes.values()
    q = torch.empty(b, h, n, d, dtype=HALF, device="meta")
    given = {p.name: more.get(p.name) for p in masked_attention.params} | dict(q=q, k=q, v=q)
    answer = masked_attention.worthwhile_fn(*given.values(), False)
    assert (answer is None) == known
