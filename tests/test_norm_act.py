"""norm_act: its kernels against fp64, what it is found in, and what stands around it."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend import explain
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import norm_act as kernels
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
NAME = "norm_act"
PATTERN = FUSION_RULES[NAME]
ACTS = ["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]


# The kernels


@runs_kernels
@product(shape=SHAPES, norm=["layer", "rms"], dtype=FLOATS)
def test_shapes_and_dtypes(shape, norm, dtype):
    eps = 1.0 if shape[-1] == 1 else 1e-3  # the gradient of a row of one is what eps makes of it
    check(NAME, randn(*shape, dtype=dtype), None, None, eps, norm, "gelu")


@runs_kernels
@product(act=ACTS, affine=[(0, 0), (1, 0), (0, 1), (1, 1)], dtype=FLOATS)
def test_activations_with_and_without_weight_and_bias(act, affine, dtype):
    x = randn(7, 20, dtype=dtype)
    vectors = [randn(20, dtype=dtype) if there else None for there in affine]
    check(NAME, x, *vectors, 1e-5, "layer", act)
    if vectors[1] is None:
        check(NAME, x, *vectors, 1e-5, "rms", act)


@runs_kernels
@pytest.mark.parametrize("act", ACTS)
def test_far_tails(act):
    """Weights that take the activation to where it is flat, and to where it is the identity."""
    x, weight = randn(5, 64), torch.linspace(-30, 30, 64, device=randn(1).device)
    check(NAME, x, weight, None, 1e-5, "layer", act)


@runs_kernels
@pytest.mark.parametrize("needs", ["x", "weight", "bias", "x weight", "weight bias"])
def test_only_wanted_gradients_are_computed(needs):
    args = randn(7, 20), randn(20), randn(20), 1e-5, "layer", "silu"
    check_gradient(NAME, *args, needs=needs.split())


@runs_kernels
@product(dtype=FLOATS, norm=["layer", "rms"])
def test_the_forward_may_be_inductors(dtype, norm):
    """The backward reads what plain torch code saves, too, in every dtype."""
    vectors = [randn(20, dtype=dtype) for _ in "wb"]
    vectors[1] = vectors[1] if norm == "layer" else None
    check_gradient(NAME, randn(7, 20, dtype=dtype), *vectors, 1e-5, norm, "gelu")


@runs_kernels
def test_a_frozen_norm_has_no_sums(monkeypatch):
    launched, own = [], kernels.launch
    monkeypatch.setattr(
        kernels,
        "launch",
        lambda kernel, *a, **k: (launched.append((kernel, k)), own(kernel, *a, **k)),
    )
    check(NAME, randn(7, 20), randn(20), randn(20), 1e-5, "layer", "gelu", needs=["x"])
    ((forward, _), (backward, options)) = launched
    assert forward is kernels.norm_act_kernel and backward is kernels.norm_act_backward_kernel
    assert not options["WEIGHT"] and not options["BIAS"]


@runs_kernels
def test_layouts():
    weight, bias = randn(33), randn(33)
    padded = randn(3, 5, 40)[..., :33]
    swapped = randn(5, 3, 33).transpose(0, 1)
    for x in (padded, swapped, randn(1, 5, 33).expand(3, 5, 33)):
        check_value(NAME, x, weight, bias, 1e-5, "layer", "gelu")
        check_gradient(NAME, x, weight, bias, 1e-5, "layer", "gelu")
    x = randn(3, 5, 33)
    for dy in (randn(1, 1, 33).expand(3, 5, 33), randn(33, 5, 3).permute(2, 1, 0)):
        check_gradient(NAME, x, weight, bias, 1e-5, "layer", "gelu", dy=dy)


@runs_kernels
@product(rows=[1, 6, 21], norm=["layer", "rms"])
def test_programs_that_walk_through_rows(rows, norm, monkeypatch):
    config = Config(128, 2, 4, 1, 2)
    for name in ("forward_config", "backward_config"):
        monkeypatch.setattr(kernels, name, lambda n: config)
    bias = randn(100) if norm == "layer" else None
    check(NAME, randn(rows, 100), randn(100), bias, 1e-5, norm, "silu")


@runs_kernels
def test_far_from_zero():
    x = randn(6, 1000) + 1000
    args = None, None, 1e-5, "layer", "silu"
    got = PATTERN.kernel_fn(x, *args, False)[0]
    assert distance(got, PATTERN.reference(x.double(), *args)) < 1e-4


@runs_kernels
def test_no_rows():
    x, weight, bias = randn(0, 33), randn(33), randn(33)
    y, mean, rstd = PATTERN.kernel_fn(x, weight, bias, 1e-5, "layer", "gelu", True)
    assert y.shape == x.shape and len(mean) == len(rstd) == 0
    norm = Norm(weight, bias, None, 1e-5, True)
    dx, *sums = kernels.backward(y, x, mean, rstd, norm, "gelu", (True, True, True))
    assert dx.shape == x.shape and not any(t.any() for t in sums)


@runs_kernels
def test_nan_and_infinity_stay_in_their_rows():
    x = randn(4, 32)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    y = PATTERN.kernel_fn(x, None, None, 1e-5, "layer", "relu", False)[0]
    assert y[1:3].isnan().all() and not y[[0, 3]].isnan().any()


@runs_kernels
def test_gradients_repeat():
    x, dy, weight, bias = randn(50, 64), randn(50, 64), randn(64), randn(64)
    _, mean, rstd = PATTERN.kernel_fn(x, weight, bias, 1e-5, "layer", "gelu", True)
    how = mean, rstd, Norm(weight, bias, None, 1e-5, True), "gelu", (True, True, True)
    first, second = (kernels.backward(dy, x, *how) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The guard


def test_refusals():
    x, vector, refused = randn(5, 6), randn(6), PATTERN.guard_fn
    for args, sentence in [
        ((x.half(), vector, None), "x is torch.float16 and weight is torch.float32"),
        ((x.double(), None, None), "x is torch.float64"),
        ((x.mT.contiguous().mT, None, None), "the elements of a row are 5 apart"),
        ((x, vector, randn(12)[::2]), "is not a plain vector"),
        ((randn(1, 8200), None, None), "8200 is longer than 8192"),
    ]:
        answer = refused(*args, 1e-5, "layer", "gelu")
        assert answer is not None and sentence in answer.reason, answer
    assert refused(x, None, None, 1e-5, "layer", "gelu") is None
    answer = PATTERN.worthwhile_fn(x, None, None, 1e-5, "layer", "gelu", False)
    assert isinstance(answer, Unmeasured)


def test_symbolic_sizes():
    env, (x,) = symbolic(torch.randn(3, 5))
    rows, guards = x.new_empty(*x.shape, 8), len(env.guards)
    assert PATTERN.guard_fn(rows, None, None, 1e-5, "layer", "gelu") is None
    eps = x.shape[0] * 1.0
    assert "dynamic" in PATTERN.guard_fn(rows, None, None, eps, "layer", "gelu").reason
    assert len(env.guards) == guards


def norm_gelu(x, w, b):
    return F.gelu(F.layer_norm(x, x.shape[-1:], w, b))


@runs_kernels
def test_a_dynamic_number_of_rows():
    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    compiled = torch.compile(norm_gelu, backend=collector, dynamic=None)
    for rows in (3, 7):
        inputs = [torch.randn(rows, 16), torch.randn(16), torch.randn(16)]
        torch._dynamo.mark_dynamic(inputs[0], 0)
        [t.requires_grad_() for t in inputs]
        got, want = (value_and_gradients(fn, inputs) for fn in (compiled, norm_gelu))
        torch.testing.assert_close(got, want)
    (graph,) = collector.report.graphs  # compiled once
    assert len(collector.report.fused) == 1, collector.report


# What is found


def by_hand(x, w, b):
    y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return F.gelu(y * w + b)


def gelu_by_hand(x, w, b):
    y = F.layer_norm(x, x.shape[-1:], w, b)
    return 0.5 * y * (1 + torch.erf(y / 2**0.5))


def transposed(x, w, b):
    """As the feature encoder of wav2vec 2.0, between its convolutions."""
    x = x.transpose(-2, -1).contiguous()
    return F.gelu(F.layer_norm(x.transpose(-2, -1).contiguous(), x.shape[-2:-1], w, b))


def in_fp32(x, w, b):
    y = F.layer_norm(x.float(), x.shape[-1:], w.float(), b.float())
    return F.silu(y).to(x.dtype)


def rms_by_hand(x, w, b):
    return F.silu(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)


def rms_with_offset(x, w, b):
    return F.relu(F.rms_norm(x, x.shape[-1:], None, 1e-6) * (1 + w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fn",
    [norm_gelu, by_hand, gelu_by_hand, transposed, in_fp32, rms_by_hand, rms_with_offset],
)
def test_spellings(fn, dtype):
    inputs = (torch.randn(s, dtype=dtype) for s in ((3, 5, 16), 16, 16))
    report = assert_fuses(fn, *inputs, pattern=NAME)
    assert [s.pattern for s in report.fused] == [NAME]


def norm(x):
    return F.layer_norm(x, (16,))


NEAR_MISSES = {
    "another activation": lambda x: torch.tanh(norm(x)),
    "a sum between them": lambda x: F.gelu(norm(x) + x),
    "over another dimension": lambda x: F.relu(
        (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    ),
    "over two dimensions": lambda x: F.gelu(F.layer_norm(x, (5, 16))),
    "a steeper gelu": lambda x: (lambda y: y * torch.sigmoid(1.8 * y))(norm(x)),
    "the norm is used elsewhere": lambda x: (lambda y: (F.gelu(y), y.cos()))(norm(x)),
    "the norm of the activation": lambda x: norm(F.gelu(x)),
    "rounded to integers between them": lambda x: F.relu(norm(x).to(torch.int32)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert_fuses(NEAR_MISSES[name], torch.randn(3, 5, 16), pattern=NAME, count=0)


def test_in_place_code_and_a_checkpoint():
    def in_place(x):
        return F.relu_(norm(x))

    def in_a_checkpoint(x):
        y = torch.utils.checkpoint.checkpoint(lambda x: F.gelu(norm(x)), x, use_reentrant=False)
        return y.sin()

    for fn in (in_place, in_a_checkpoint):
        assert_fuses(fn, torch.randn(3, 5, 16, requires_grad=True), pattern=NAME)


def test_a_smaller_norm_where_it_is_switched_off():
    inputs = torch.randn(3, 5, 16), torch.randn(16), torch.randn(16)
    report = collect(norm_gelu, *inputs, dynamic=False, options={"fusion.skip": NAME}).report
    assert "layer_norm" in {s.pattern for s in report.fused}
    assert NAME not in {s.pattern for s in report.fused}


@pytest.mark.parametrize("training", [False, True])
def test_the_tables_do_not_take_it(training):
    """It is the gate's measurement that takes it."""
    x = torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=training)
    w, b = torch.randn(2, 1024).bfloat16()
    tables, always = (
        explain(norm_gelu, x, w, b, target="H200", options={"fusion.gate": gate})
        for gate in ("table", "always")
    )
    assert [s.pattern for s in always.fused] == [NAME]
    assert NAME not in [s.pattern for s in tables.fused]
    reasons = [s.reason for s in tables.sites if s.pattern == NAME]
    assert any("has not been timed" in reason for reason in reasons), reasons


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_statistics_are_those_of_the_forward(norm):
    """Decomposed as for Inductor, both reduce the same values: one reduction is left of the two."""
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)

    def both(x):
        args = x, None, None, 1e-6, norm, "gelu"
        return PATTERN.reference(*args), PATTERN.saved_fn(*args)

    graph = make_fx(both, decomposition_table=select_decomp_table(), tracing_mode="fake")(x).graph
    found = [expression(n) for n in graph.nodes if n.target in REDUCTIONS]
    assert len(found) == 2 and len(set(found)) == 1, graph


@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_trains_as_in_fp64(autocast):
    """Linear, norm, gelu, linear, in the precision of eager."""
    torch.manual_seed(3)
    layers = torch.nn.Sequential(
        torch.nn.Linear(24, 48), torch.nn.LayerNorm(48), torch.nn.GELU(), torch.nn.Linear(48, 8)
    )
    check_training(NAME, layers, torch.randn(9, 24), autocast)
