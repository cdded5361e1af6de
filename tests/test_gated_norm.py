"""gated_norm: its kernels against fp64, what it is found in, and what stands around it."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend import explain
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import gated_norm as kernels
from fusion_backend.kernels.norm.operands import Norm
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Unmeasured
from fusion_backend.testing import assert_fuses, collect, value_and_gradients
from tests.kernel_checks import (
    FLOATS,
    SHAPES,
    Kernels,
    check,
    check_gradient,
    check_training,
    check_value,
    distance,
    randn,
    runs_kernels,
    symbolic,
)
from tests.selection import product
from tests.test_saved import REDUCTIONS, expression

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "gated_norm"
PATTERN = FUSION_RULES[NAME]
FIRST = ["norm", "gate"]


# The kernels


@runs_kernels
@product(shape=SHAPES, norm=["layer", "rms"], dtype=FLOATS, first=FIRST)
def test_shapes_and_dtypes(shape, norm, dtype, first):
    eps = 1.0 if shape[-1] == 1 else 1e-3  # the gradient of a row of one is what eps makes of it
    x, gate = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    check(NAME, x, gate, None, None, eps, norm, "silu", first)


@runs_kernels
@product(
    act=["silu", "sigmoid"], affine=[(0, 0), (1, 0), (0, 1), (1, 1)], dtype=FLOATS, first=FIRST
)
def test_activations_with_and_without_weight_and_bias(act, affine, dtype, first):
    x, gate = randn(7, 20, dtype=dtype), randn(7, 20, dtype=dtype)
    vectors = [randn(20, dtype=dtype) if there else None for there in affine]
    check(NAME, x, gate, *vectors, 1e-5, "layer", act, first)
    if vectors[1] is None:
        check(NAME, x, gate, *vectors, 1e-5, "rms", act, first)


@runs_kernels
@product(dtypes=[(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], first=FIRST)
def test_a_gate_of_another_dtype(dtypes, first):
    x, gate = (randn(7, 20, dtype=dtype) for dtype in dtypes)
    check(NAME, x, gate, randn(20, dtype=x.dtype), None, 1e-5, "rms", "silu", first)


@runs_kernels
@product(dtype=[torch.bfloat16, torch.float16], first=FIRST)
def test_vectors_in_fp32_beside_16_bits(dtype, first):
    x, gate = randn(7, 20, dtype=dtype), randn(7, 20, dtype=dtype)
    check(NAME, x, gate, randn(20), randn(20), 1e-5, "layer", "silu", first)


@runs_kernels
@pytest.mark.parametrize("first", FIRST)
def test_far_tails(first):
    """Gates that close, and that let everything through."""
    x, gate = randn(5, 64), torch.linspace(-90, 90, 64, device=randn(1).device).repeat(5, 1)
    for act in ("silu", "sigmoid"):
        check(NAME, x, gate, randn(64), None, 1e-5, "rms", act, first)


@runs_kernels
@product(needs=["x", "gate", "weight", "bias", "x gate", "gate weight", "weight bias"], first=FIRST)
def test_only_wanted_gradients_are_computed(needs, first):
    args = randn(7, 20), randn(7, 20), randn(20), randn(20), 1e-5, "layer", "silu", first
    check_gradient(NAME, *args, needs=needs.split())


@runs_kernels
@product(dtype=FLOATS, norm=["layer", "rms"], first=FIRST)
def test_the_forward_may_be_inductors(dtype, norm, first):
    """The backward reads what plain torch code saves, too, in every dtype."""
    vectors = [randn(20, dtype=dtype) for _ in "wb"]
    vectors[1] = vectors[1] if norm == "layer" else None
    x, gate = randn(7, 20, dtype=dtype), randn(7, 20, dtype=dtype)
    check_gradient(NAME, x, gate, *vectors, 1e-5, norm, "silu", first)


@runs_kernels
def test_a_frozen_norm_has_no_sums(monkeypatch):
    launched, own = [], kernels.launch
    monkeypatch.setattr(
        kernels,
        "launch",
        lambda kernel, *a, **k: (launched.append((kernel, k)), own(kernel, *a, **k)),
    )
    args = randn(7, 20), randn(7, 20), randn(20), randn(20), 1e-5, "layer", "silu", "norm"
    check(NAME, *args, needs=["x", "gate"])
    ((forward, _), (backward, options)) = launched
    assert forward is kernels.gated_norm_kernel and backward is kernels.gated_norm_backward_kernel
    assert not options["WEIGHT"] and not options["BIAS"]


@runs_kernels
@pytest.mark.parametrize("first", FIRST)
def test_layouts(first):
    """Both operands are halves of one projection, or lie in another order."""
    weight, bias, how = randn(33), randn(33), (1e-5, "layer", "silu", first)
    both = randn(3, 5, 80)
    swapped = randn(5, 3, 33).transpose(0, 1)
    for x, gate in (
        (both[..., :33], both[..., 40:73]),
        (swapped, randn(3, 5, 33)),
        (randn(1, 5, 33).expand(3, 5, 33), randn(3, 1, 33).expand(3, 5, 33)),
    ):
        check_value(NAME, x, gate, weight, bias, *how)
        check_gradient(NAME, x, gate, weight, bias, *how)
    x, gate = randn(3, 5, 33), randn(3, 5, 33)
    for dy in (randn(1, 1, 33).expand(3, 5, 33), randn(33, 5, 3).permute(2, 1, 0)):
        check_gradient(NAME, x, gate, weight, bias, *how, dy=dy)


@runs_kernels
@product(rows=[1, 6, 21], norm=["layer", "rms"], first=FIRST)
def test_programs_that_walk_through_rows(rows, norm, first, monkeypatch):
    config = Config(128, 2, 4, 1, 2)
    monkeypatch.setattr(kernels, "forward_config", lambda n: config._replace(programs=0))
    monkeypatch.setattr(kernels, "backward_config", lambda n, itemsize: config)
    bias = randn(100) if norm == "layer" else None
    check(NAME, randn(rows, 100), randn(rows, 100), randn(100), bias, 1e-5, norm, "silu", first)


@runs_kernels
def test_far_from_zero():
    x, gate = randn(6, 1000) + 1000, randn(6, 1000)
    args = None, None, 1e-5, "layer", "sigmoid", "norm"
    got = PATTERN.kernel_fn(x, gate, *args, False, None)[0]
    assert distance(got, PATTERN.reference(x.double(), gate.double(), *args)) < 1e-4


@runs_kernels
@pytest.mark.parametrize("first", FIRST)
def test_no_rows(first):
    x, gate, weight, bias = randn(0, 33), randn(0, 33), randn(33), randn(33)
    how = 1e-5, "layer", "silu", first
    y, mean, rstd = PATTERN.kernel_fn(x, gate, weight, bias, *how, True, None)
    assert y.shape == x.shape and len(mean) == len(rstd) == 0
    norm = Norm(weight, bias, None, 1e-5, True)
    needs = (True, True, True, True)
    dx, dgate, *sums = kernels.backward(
        y, x, gate, mean, rstd, norm, "silu", first == "gate", needs
    )
    assert dx.shape == dgate.shape == x.shape and not any(t.any() for t in sums)


@runs_kernels
def test_nan_and_infinity_stay_in_their_rows():
    x, gate = randn(5, 32), randn(5, 32)
    x[1, 3], x[2, 5], gate[3, 7] = float("nan"), float("inf"), float("nan")
    y = PATTERN.kernel_fn(x, gate, None, None, 1e-5, "rms", "silu", "gate", False, None)[0]
    assert y[1:4].isnan().any(-1).all() and not y[[0, 4]].isnan().any()


@runs_kernels
def test_gradients_repeat():
    x, gate, dy, weight, bias = *(randn(50, 64) for _ in range(3)), randn(64), randn(64)
    how = weight, bias, 1e-5, "layer", "silu", "norm"
    _, mean, rstd = PATTERN.kernel_fn(x, gate, *how, True, None)
    norm = Norm(weight, bias, None, 1e-5, True)
    first, second = (
        kernels.backward(dy, x, gate, mean, rstd, norm, "silu", False, (True,) * 4)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The guard


def test_a_second_gate_is_no_weight():
    x, gate, other = (randn(6, 16).requires_grad_() for _ in range(3))
    report = collect(
        lambda x, gate, other: F.rms_norm(x, (16,), None, 1e-5) * other * F.silu(gate),
        x, gate, other, options={"fusion.gate": "always"},
    ).report  # fmt: skip
    assert [s.pattern for s in report.fused] == ["rms_norm"]


def test_refusals():
    x, vector, refused = randn(5, 6), randn(6), PATTERN.guard_fn
    long = randn(1, 8192)
    for args, sentence in [
        ((x, x, vector.half(), None), "x is torch.float32 and weight is torch.float16"),
        ((x.double(), x, None, None), "x is torch.float64"),
        ((x, x.double(), None, None), "gate is torch.float64"),
        ((x, x[:1], None, None), "the gate with shape (1, 6) may not be that of x"),
        ((x, x.mT.contiguous().mT, None, None), "the elements of a row are 5 apart"),
        ((x, x, vector, randn(12)[::2]), "is not a plain vector"),
        (
            (randn(1, 8200), randn(1, 8200), None, None),
            "8200 is longer than 8192, the most that registers hold",
        ),
    ]:
        answer = refused(*args, 1e-5, "layer", "silu", "norm")
        assert answer is not None and sentence in answer.reason, answer
    assert refused(long, long, None, None, 1e-5, "layer", "silu", "norm") is None
    assert refused(long, long, None, None, 1e-5, "rms", "silu", "gate") is None
    answer = refused(long, long, None, None, 1e-5, "layer", "silu", "gate")
    assert "8192 is longer than 4096" in answer.reason
    answer = PATTERN.worthwhile_fn(x, x, None, None, 1e-5, "layer", "silu", "norm", False)
    assert isinstance(answer, Unmeasured)


def test_symbolic_sizes():
    env, (x,) = symbolic(torch.randn(3, 5))
    rows, guards = x.new_empty(*x.shape, 8), len(env.guards)
    how = "layer", "silu", "norm"
    assert PATTERN.guard_fn(rows, rows, None, None, 1e-5, *how) is None
    eps = x.shape[0] * 1.0
    assert "dynamic" in PATTERN.guard_fn(rows, rows, None, None, eps, *how).reason
    assert len(env.guards) == guards


# What is found


def mamba(x, gate, w):
    """As MambaRMSNormGated of transformers."""
    h = x.to(torch.float32) * F.silu(gate.to(torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def qwen3_next(x, gate, w):
    """As Qwen3NextRMSNormGated of transformers."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (w * h.to(x.dtype) * F.silu(gate.to(torch.float32))).to(x.dtype)


def retention(x, gate, w):
    return F.silu(gate) * F.rms_norm(x, x.shape[-1:], w, 1e-6)


def gate_by_hand(x, gate, w):
    return F.rms_norm(x, x.shape[-1:], w, 1e-6) * gate * torch.sigmoid(gate)


def of_sigmoid(x, gate, w):
    return F.layer_norm(x, x.shape[-1:], w) * torch.sigmoid(gate)


def halves(x, gate, w):
    """Both come from one projection."""
    x, gate = torch.cat([x, gate], -1).chunk(2, -1)
    return F.rms_norm(x * F.silu(gate), x.shape[-1:], w, 1e-5)


@runs_kernels
@pytest.mark.parametrize("fn", [mamba, qwen3_next, of_sigmoid])
def test_a_dynamic_number_of_rows(fn):
    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    compiled = torch.compile(fn, backend=collector, dynamic=None)
    for rows in (3, 7):
        inputs = [torch.randn(rows, 16), torch.randn(rows, 16), torch.randn(16)]
        for t in inputs[:2]:
            torch._dynamo.mark_dynamic(t, 0)
        [t.requires_grad_() for t in inputs]
        got, want = (value_and_gradients(f, inputs) for f in (compiled, fn))
        torch.testing.assert_close(got, want)
    assert len(collector.report.graphs) == 1, "compiled once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [mamba, qwen3_next, retention, gate_by_hand, of_sigmoid, halves])
def test_spellings(fn, dtype):
    inputs = (torch.randn(s, dtype=dtype) for s in ((3, 5, 16), (3, 5, 16), 16))
    report = assert_fuses(fn, *inputs, pattern=NAME)
    assert [s.pattern for s in report.fused] == [NAME]


@pytest.mark.parametrize("fn", [mamba, qwen3_next])
def test_16_bits_are_read_before_their_casts(fn):
    """Nor does anything else stay in the graph."""
    inputs = [torch.randn(s).bfloat16() for s in ((3, 5, 16), (3, 5, 16), 16)]
    (graph,) = collect(fn, *inputs).graphs
    site, _ = (n for n in graph.graph.nodes if n.op.startswith("call"))
    assert str(site.target) == "fusion.gated_norm.default"
    assert [getattr(a, "name", a) for a in site.args[:3]] == ["l_x_", "l_gate_", "l_w_"]
    assert "silu" in site.args  # gate · sigmoid(gate) has no gate and a weight that is a tensor


def norm(x):
    return F.layer_norm(x, (16,))


NEAR_MISSES = {
    "another activation": lambda x, z: norm(x) * torch.tanh(z),
    "a sum": lambda x, z: norm(x) + F.silu(z),
    "no activation": lambda x, z: norm(x) * z,
    "a number for each row": lambda x, z: norm(x) * torch.sigmoid(z[..., :1]),
    "a vector": lambda x, z: norm(x) * torch.sigmoid(z[0, 0]),
    "over another dimension": lambda x, z: (
        ((x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt())
        * F.silu(z)
    ),
    "the norm is used elsewhere": lambda x, z: (lambda y: (y * F.silu(z), y.cos()))(norm(x)),
    "what is normalised is used elsewhere": lambda x, z: (lambda y: norm(y) + y)(x * F.silu(z)),
    "an activation in front": lambda x, z: norm(F.silu(x)),
    "its own gate": lambda x, z: F.silu(norm(x)),
    "its own gate, times another": lambda x, z: F.silu(norm(x)) * z,
    "rounded to integers between them": lambda x, z: norm(x).to(torch.int32) * torch.sigmoid(z),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    inputs = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    assert_fuses(NEAR_MISSES[name], *inputs, pattern=NAME, count=0)


def test_an_argument_is_not_computed_again():
    """silu(norm(x)) is a product, norm(x) · sigmoid(norm(x)), whose gate is its own norm."""
    report = collect(lambda x: F.silu(norm(x)), torch.randn(3, 16)).report
    reasons = [s.reason for s in report.sites if s.pattern == NAME]
    assert reasons and all("would be computed again" in reason for reason in reasons), report
    assert [s.pattern for s in report.fused] == ["norm_act"]


def by_hand(q, k, v):
    return torch.softmax(q @ k.mT / 4, -1) @ v


ARGUMENTS_OF_EACH_OTHER = {
    "a cast of another": (lambda h: by_hand(h, h.bfloat16().float(), h.sin()), "attention"),
    "computed from another": (lambda h: by_hand(h, h.sin(), h.sin().exp()), "attention"),
    "a gate that is a cast": (
        lambda h: F.rms_norm(h, (16,), h[0, 0, 0].sin()) * F.silu(h.bfloat16().float()),
        NAME,
    ),
    "its own gate": (lambda h: norm(h) * F.silu(h), NAME),
}


@pytest.mark.parametrize("name", ARGUMENTS_OF_EACH_OTHER)
def test_arguments_may_be_computed_from_each_other(name):
    fn, pattern = ARGUMENTS_OF_EACH_OTHER[name]
    report = collect(fn, torch.randn(2, 4, 32, 16)).report
    assert pattern in [s.pattern for s in report.sites], report
    assert not any("computed again" in s.reason for s in report.sites), report


def test_in_place_code_and_a_checkpoint():
    def in_place(x, z):
        return norm(x).mul_(F.silu(z))

    def in_a_checkpoint(x, z):
        gated = lambda x, z: norm(x) * F.silu(z)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(gated, x, z, use_reentrant=False).sin()

    for fn in (in_place, in_a_checkpoint):
        inputs = [torch.randn(3, 5, 16, requires_grad=True) for _ in range(2)]
        assert_fuses(fn, *inputs, pattern=NAME)


@pytest.mark.parametrize("training", [False, True])
def test_the_tables_do_not_take_it(training):
    """It is the gate's measurement that takes it."""
    x, gate = (torch.randn(4096, 1024).bfloat16().requires_grad_(training) for _ in range(2))
    inputs = x, gate, torch.randn(1024).bfloat16()
    tables, always = (
        explain(mamba, *inputs, target="H200", options={"fusion.gate": gate})
        for gate in ("table", "always")
    )
    assert [s.pattern for s in always.fused] == [NAME]
    assert NAME not in [s.pattern for s in tables.fused]
    reasons = [s.reason for s in tables.sites if s.pattern == NAME]
    assert any("has not been timed" in reason for reason in reasons), reasons


@product(norm=["layer", "rms"], first=FIRST)
def test_statistics_are_those_of_the_forward(norm, first):
    """Decomposed as for Inductor, both reduce the same values: one reduction is left of the two."""
    x, gate = torch.randn(2, 5, 64).bfloat16(), torch.randn(2, 5, 64).bfloat16()

    def both(x, gate):
        args = x, gate, None, None, 1e-6, norm, "silu", first
        return PATTERN.reference(*args), PATTERN.saved_fn(*args)

    table = select_decomp_table()
    graph = make_fx(both, decomposition_table=table, tracing_mode="fake")(x, gate).graph
    found = [expression(n) for n in graph.nodes if n.target in REDUCTIONS]
    assert len(found) == 2 and len(set(found)) == 1, graph


class Layer(torch.nn.Module):
    """A projection to x and gate, a gated norm, a projection back."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.weight = fn, torch.nn.Parameter(torch.randn(48))
        self.into, self.out = torch.nn.Linear(24, 96), torch.nn.Linear(48, 8)

    def forward(self, x):
        return self.out(self.fn(*self.into(x).chunk(2, -1), self.weight))


@pytest.mark.parametrize(
    "fn, autocast", [(mamba, False), (qwen3_next, False), (of_sigmoid, False), (of_sigmoid, True)]
)
def test_a_layer_trains_as_in_fp64(fn, autocast):
    """Beside the others, autocast would show that the interpreter cuts numbers of 16 bits off."""
    torch.manual_seed(0)
    check_training(NAME, Layer(fn), torch.randn(9, 24), autocast)
