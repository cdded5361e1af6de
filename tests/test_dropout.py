"""Dropout from a seed: the generator, its statistics, and compiled graphs that draw, keep and draw
again.
"""

import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels.common.dropout import dropout_factors, dropped, kept, philox
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import PatternError
from fusion_backend.testing import collect, fused_nodes, in_fp64, value_and_gradients
from tests.kernel_checks import DEVICE, randn, runs_kernels
from tests.without_interpreter import output_of

patterns()
NAMES = ["dropout_add", "dropout_add_layer_norm"]
ALWAYS = {"fusion.gate": "always"}


def seed(number: int) -> torch.Tensor:
    return torch.tensor([number], device=DEVICE)


# The generator


def test_the_generator_is_philox():
    """The first of the vectors published with it: counter and key of zeros."""
    words = [w.item() for w in philox(torch.tensor([0]), torch.tensor([0]))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@triton.jit
def factors_kernel(SEED, OUT, start, THRESHOLD: tl.constexpr, BLOCK: tl.constexpr):
    counter = tl.cast(start, tl.int64) + tl.arange(0, BLOCK // 4)
    tl.store(OUT + tl.arange(0, BLOCK), dropout_factors(tl.load(SEED), counter, THRESHOLD, 1.0))


@runs_kernels
@pytest.mark.parametrize("start", [0, 2**31 - 8, 2**32 - 8, 2**40 + 12345])
@pytest.mark.parametrize("number", [0, 1, 2**32 + 7, 2**63 - 1])
def test_counters_and_seeds_have_64_bits(start, number):
    out = torch.empty(64, device=DEVICE)
    factors_kernel[(1,)](seed(number), out, start, THRESHOLD=2**31, BLOCK=64)
    words = torch.stack(
        philox(seed(number), torch.arange(start, start + 16, device=DEVICE)), 1
    ).flatten()
    assert torch.equal(out, (words >= 2**31).float())


# Statistics


def survivors(p: float, number: int, rows: int = 512, n: int = 1024) -> torch.Tensor:
    """As 1.0 and 0.0, through the kernel where there is a GPU."""
    if DEVICE == "cpu":
        return kept(seed(number), (rows, n), p).double()
    ones = torch.ones(rows, n, device=DEVICE)
    return (
        FUSION_RULES["dropout_add"].kernel_fn(ones, torch.zeros_like(ones), p, seed(number)) != 0
    ).double()


def within(mean: torch.Tensor, want: float, count: int, sigmas: float = 5) -> bool:
    return abs(mean.item() - want) <= sigmas * (want * (1 - want) / count) ** 0.5


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_that_survives(p):
    keep = survivors(p, 7)
    assert within(keep.mean(), 1 - p, keep.numel())
    for axis in (0, 1):  # no row, no column is special
        shares = keep.mean(axis)
        sigma = (p * (1 - p) / keep.shape[axis]) ** 0.5
        assert (shares - (1 - p)).abs().max() <= 6 * sigma
        assert 0.8 < shares.std() / sigma < 1.2


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_rows_and_seeds_are_independent(p):
    keep, both = survivors(p, 7), (1 - p) ** 2
    for other in (survivors(p, 8), survivors(p, 7 + 2**32),
        *(keep.roll(k, 1) for k in (1, 2, 3, 4, 64)),
                  *(keep.roll(k, 0) for k in (1, 4))):  # fmt: skip
        assert within((keep * other).mean(), both, keep.numel())


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_survivors_are_scaled(dtype):
    x = torch.ones(8, 512, dtype=dtype, device=DEVICE)
    for p in (1e-12, 0.1, 0.5, 0.99):
        out = FUSION_RULES["dropout_add"].kernel_fn(x, torch.zeros_like(x), p, seed(3))
        want = torch.tensor(1 / (1 - p), dtype=torch.float64).to(dtype)
        if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts off
            assert ((out == 0) | ((out - want).abs() <= want * 2**-7)).all()
        else:
            assert ((out == 0) | (out == want)).all()
        assert torch.equal(out != 0, kept(seed(3), (8 * 512,), p).view(8, 512))
    assert not FUSION_RULES["dropout_add"].kernel_fn(x, torch.zeros_like(x), 1.0, seed(3)).any()


@runs_kernels
def test_nan_and_infinity_are_dropped_as_in_torch():
    """What is dropped is multiplied by 0, in eager and in Inductor too."""
    x, zero = torch.full((4, 64), float("inf"), device=DEVICE), torch.zeros(4, 64, device=DEVICE)
    out = FUSION_RULES["dropout_add"].kernel_fn(x, zero, 0.5, seed(3))
    keep = kept(seed(3), (256,), 0.5).view(4, 64)
    assert (out[keep] == float("inf")).all() and out[~keep].isnan().all()
    assert FUSION_RULES["dropout_add"].kernel_fn(x * 0, zero, 0.5, seed(3)).isnan().all()


# Compiled graphs (on CPU with the seeded reference, on a GPU with the kernels)


def inputs(rows=16, n=100):
    return [
        randn(rows, n).requires_grad_(),
        torch.zeros(rows, n, device=DEVICE, requires_grad=True),
    ]


def site(x, r, p=0.3):
    return F.dropout(x, p, True) + r


def compiled(fn, **options):
    return torch.compile(
        fn, backend="fusion", options=ALWAYS | options, dynamic=False, fullgraph=True
    )


def agree(out, x) -> bool:
    """The gradient passes exactly where the value did (the residual is zero).

    Without retain_graph, which torch refuses of a backward in its cache that another process has
    run without.
    """
    (grad,) = torch.autograd.grad(out.sum(), x)
    return torch.equal(out != 0, grad != 0) and 0.5 < (out != 0).double().mean() < 0.9


@pytest.mark.parametrize("name", NAMES)
def test_compiled_value_and_gradients(name):
    """Against the reference in fp64, given the mask that the result shows."""
    args = [*inputs(7, 100), *(randn(100).requires_grad_() for _ in range(2))]
    numbers = (0.3,) if name == "dropout_add" else (0.3, 1e-5)
    args = args[: len(FUSION_RULES[name].params) - len(numbers)]
    reference = lambda *tensors: FUSION_RULES[name].reference(*tensors, *numbers)  # noqa: E731
    got = value_and_gradients(compiled(reference), args)
    assert [s.pattern for s in fusion_backend.report().fused] == [name]
    mask = got[FUSION_RULES[name].outputs - 1] != 0
    assert 0.6 < mask.double().mean() < 0.8
    with mock.patch.object(F, "dropout", lambda x, p, train: x * mask / (1 - p)):
        want = value_and_gradients(reference, in_fp64(args))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("eager_kernels")
def test_sites_differ_and_seeds_repeat():
    x, r = inputs()
    fn = compiled(lambda x, r: (site(x, r), site(x, r)))

    def run(number=None):
        if number is not None:
            torch.manual_seed(number)
        a, b = fn(x, r)
        assert agree(b if number == 1 else a, x) and not torch.equal(a, b)
        return a.detach()

    first, again, other = run(1), run(1), run(2)
    assert (
        torch.equal(first, again)
        and not torch.equal(first, other)
        and not torch.equal(other, run())
    )
    assert len(fusion_backend.report().fused) == 2
    torch.compiler.reset()  # from Inductor's caches, if it keeps them, no seed comes back
    third = compiled(lambda x, r: (site(x, r), site(x, r)))(x, r)[0]
    assert not any(torch.equal(third, seen) for seen in (first, other))


@pytest.mark.parametrize("around", ["inside", "outside"])
@pytest.mark.parametrize("draws", [1, 2])
def test_checkpoint_draws_the_same_again(around, draws):
    x, r = inputs()

    def body(x, r):
        for _ in range(draws):
            x = site(x.sin().asin(), r)
        return x.tanh().atanh()

    def recomputed(x, r):
        return checkpoint(body, x, r, use_reentrant=False)

    if around == "inside":
        fn = compiled(recomputed)
    else:
        block = compiled(body)
        fn = lambda x, r: checkpoint(block, x, r, use_reentrant=False)  # noqa: E731
    with torch.no_grad():
        x.mul_(0.1)
    out = fn(x, r)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert len(fusion_backend.report().fused) == draws
    assert torch.equal(out != 0, grad != 0) and 0.3 < (out != 0).double().mean() < 0.9


@pytest.mark.usefixtures("eager_kernels")
def test_evaluation_and_no_dropout_are_left_alone():
    x, r = inputs()
    for fn in (lambda x, r: F.dropout(x, 0.3, False) + r, lambda x, r: F.dropout(x, 0.0, True) + r):
        assert not collect(fn, x, r).report.fused
        assert torch.equal(compiled(fn)(x, r), x + r)


@pytest.mark.parametrize("how", ["option", "configuration"])
def test_fallback_random_wants_the_numbers_of_eager(how):
    x, r = inputs()
    with torch._inductor.config.patch(fallback_random=how == "configuration"):
        fn = compiled(site, **{"fallback_random": True} if how == "option" else {})
        torch.manual_seed(5)
        got = fn(x, r)
    assert "fallback_random" in fusion_backend.report().sites[0].reason
    torch.manual_seed(5)
    torch.testing.assert_close(got, site(x, r))


def test_the_graph_shows_the_draw():
    (gm,) = collect(lambda x, r: (site(x, r), site(x, r)), *inputs()).graphs
    seeds = [n for n in gm.graph.nodes if n.target is torch.ops.aten.randint.low]
    assert [n.args[2] for n in fused_nodes(gm)] != [] and len(seeds) == 2
    assert [s in n.args for s, n in zip(seeds, fused_nodes(gm), strict=True)] == [True, True]


@pytest.mark.usefixtures("eager_kernels")
def test_a_seeded_reference_takes_a_seed(scratch):
    @fusion_backend.Pattern
    def dropped_twice(x: torch.Tensor, p: float) -> torch.Tensor:
        return F.dropout(x, p, True) * 2

    with pytest.raises(
        PatternError, match=r"the seeded reference at line \d+ takes \(x, p\), not \(x, p, seed\)"
    ):
        dropped_twice.seeded(lambda x, p: x)

    @dropped_twice.seeded
    def _(x, p, seed):
        return dropped(x, seed, p) * 2

    with pytest.raises(
        PatternError, match=r"the kernel at line \d+ takes \(x, p\), not \(x, p, seed\)"
    ):
        dropped_twice.kernel(lambda x, p: x)
    x = randn(4, 8)
    out = compiled(lambda x: F.dropout(x, 0.5, True) * 2)(x)
    assert fusion_backend.report().fused[0].pattern == "dropped_twice"
    assert ((out == 0) | ((out - 4 * x).abs() < 1e-5)).all()


# What backward keeps, with the kernels, without a GPU

KEPT = """
import json, torch, triton, torch.nn.functional as F
import fusion_backend.decide.gate, fusion_backend.ops.operator
from functorch.compile import min_cut_rematerialization_partition
from fusion_backend.frontends.explain import Collector
from benchmarks.launches.driver import Driver
from torch._dynamo.backends.common import aot_autograd

fusion_backend.decide.gate.on_gpu = fusion_backend.ops.operator.on_gpu = lambda t: True
triton.runtime.driver.set_active(Driver())

def dropout_add(x, r, w, b):
    return F.dropout(x, 0.3, True) + r

def dropout_add_layer_norm(x, r, w, b):
    h = F.dropout(x, 0.3, True) + r
    return F.layer_norm(h, h.shape[-1:], w, b), h

def attention(x, r, w, b):
    q, k, keep = x[None, None], r[None, None], (w > 0).repeat(2)[None, None, None]
    return F.scaled_dot_product_attention(q, k, k, keep, 0.3)

def recorded(name):
    def compile(gm, examples):
        (out,) = [n for n in gm.graph.nodes if n.op == "output"]
        targets = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
        given = [n.meta["val"] for n in gm.graph.nodes
                 if n.op == "placeholder" and "tangents" not in n.name]
        found[name] = dict(kernels=sum("triton_kernel_wrapper" in t for t in targets),
                           draws=sum("rand" in t for t in targets),
                           given=sorted(tuple(v.shape) for v in given))
        values = [n.meta["val"] if n is not None else None for n in out.args[0]]
        return lambda *args: [
            None if v is None else torch.zeros(v.shape, dtype=v.dtype) for v in values
        ]
    return compile

found, partition = {}, min_cut_rematerialization_partition
inner = aot_autograd(
    fw_compiler=recorded("forward"), bw_compiler=recorded("backward"), partition_fn=partition
)

def backend(gm, examples):
    collector = Collector({"fusion.gate": "always"})
    collector(gm, examples)
    return inner(collector.graphs[0], examples)

for fn in (dropout_add, dropout_add_layer_norm, attention):
    args = [torch.randn(*shape, requires_grad=True) for shape in ((64, 32), (64, 32), (32,), (32,))]
    out = torch.compile(fn, backend=backend)(*args)
    sum(o.sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
    print(json.dumps([fn.__name__, found]))
"""


def test_backward_reads_a_seed_and_no_mask():
    """Of dropout_add nothing else, of the norm h, weight, mean and rstd, of attention q, k, the
    result, its mask and its rows' sums; and it draws nothing.
    """
    lines = output_of("-c", KEPT).splitlines()
    found = dict(json.loads(line) for line in lines if line.startswith("["))
    assert [(f["forward"]["kernels"], f["forward"]["draws"]) for f in found.values()] == [
        (1, 1)
    ] * 3
    assert found["dropout_add"]["backward"] == dict(kernels=1, draws=0, given=[[1]])
    given = [[1], [32], [64], [64], [64, 32]]
    assert found["dropout_add_layer_norm"]["backward"] == dict(kernels=1, draws=0, given=given)
    given = [[1], [1, 1, 1, 64], [1, 1, 64], *[[1, 1, 64, 32]] * 3]
    assert found["attention"]["backward"] == dict(kernels=2, draws=0, given=given)
