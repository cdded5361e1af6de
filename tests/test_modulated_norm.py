"""modulated_norm: its kernels against fp64, what it is found in, and blocks of diffusion
transformers.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.foreign_code import diffusion, encoders
from fusion_backend import explain
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import modulated, modulated_backward
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Unmeasured
from fusion_backend.testing import (
    assert_fuses,
    collect,
    fused_nodes,
    value_and_gradients,
)
from tests.kernel_checks import (
    FLOATS,
    Kernels,
    check,
    check_gradient,
    check_value,
    distance,
    randn,
    runs_kernels,
    symbolic,
)
from tests.selection import product
from tests.test_saved import REDUCTIONS, expression

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "modulated_norm"
PATTERN = FUSION_RULES[NAME]
SHAPES = [(1, 1, 8), (2, 1, 7), (3, 5, 100), (2, 3, 2049), (2, 3, 4, 33), (5, 40, 16)]


def modulation(x, parts=2, samples=None):
    """Rows of one tensor, as chunk gives them."""
    rows = randn(samples or x.shape[0], parts * x.shape[-1], dtype=x.dtype).chunk(parts, dim=1)
    return [t.reshape(len(t), *[1] * (x.dim() - 2), -1) for t in rows[-2:]]


# The kernels


@runs_kernels
@product(shape=SHAPES, norm=["layer", "rms"], dtype=FLOATS)
def test_shapes_and_dtypes(shape, norm, dtype):
    x = randn(*shape, dtype=dtype)
    check(NAME, x, None, None, *modulation(x, 6), 1e-3, norm)


@runs_kernels
@pytest.mark.parametrize("have", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_weight_bias_and_shift_may_be_missing(norm, have):
    if norm == "rms" and have[1]:
        return
    x = randn(3, 7, 20)
    scale, shift = modulation(x)
    affine = (randn(20) if there else None for there in have[:2])
    check(NAME, x, *affine, scale, shift if have[2] else None, 1e-5, norm)


@runs_kernels
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    "needs", ["x", "weight", "bias", "scale", "shift", "x scale", "bias scale"]
)
def test_only_wanted_gradients_are_computed(needs, affine):
    x = randn(3, 7, 20)
    vectors = [randn(20), randn(20)] if affine else [None, None]
    wanted = [k for k in needs.split() if affine or k not in ("weight", "bias")]
    if wanted:
        check_gradient(NAME, x, *vectors, *modulation(x), 1e-5, "layer", needs=wanted)


@runs_kernels
def test_frozen_scale_and_shift_have_no_sums(monkeypatch):
    launched, own = [], modulated_backward.launch
    monkeypatch.setattr(
        modulated_backward,
        "launch",
        lambda kernel, *a, **k: (launched.append((kernel, k)), own(kernel, *a, **k)),
    )
    x = randn(3, 7, 20)
    check(NAME, x, None, None, *modulation(x), 1e-5, "layer", needs=["x"])
    ((kernel, options),) = launched
    assert kernel is modulated_backward.modulated_norm_backward_kernel
    assert not options["PRODUCTS"] and not options["PLAIN"]


@runs_kernels
def test_layouts():
    x = randn(3, 5, 33)
    scale, shift = modulation(x)
    padded = randn(3, 5, 40)[..., :33]
    of_tokens = randn(3, 9, 33)[:, 4:]  # the image's, behind the text's
    swapped = randn(5, 3, 33).transpose(0, 1)
    for other in (padded, of_tokens, swapped, randn(1, 5, 33).expand(3, 5, 33)):
        check_value(NAME, other, None, None, scale, shift, 1e-5, "layer")
        check_gradient(NAME, other, None, None, scale, shift, 1e-5, "layer")
    everywhere = randn(3, 1, 1).expand(3, 1, 33)
    apart = randn(3, 1, 66)[..., ::2]
    for one, other in ((everywhere, apart), (apart, randn(1, 1, 33).expand(3, 1, 33))):
        check(NAME, x, None, None, one, other, 1e-5, "layer")
    for dy in (randn(1, 1, 33).expand(3, 5, 33), randn(33, 5, 3).permute(2, 1, 0)):
        check_gradient(NAME, x, None, None, scale, shift, 1e-5, "layer", dy=dy)
    assert modulated.by_tokens(of_tokens).tensor is of_tokens  # read in place
    assert modulated.by_tokens(padded).tensor is padded
    assert modulated.by_samples(scale)[0] is scale


@runs_kernels
@pytest.mark.parametrize("affine", [False, True])
def test_a_row_for_all_samples(affine):
    x = randn(3, 5, 33)
    vectors = [randn(33), randn(33)] if affine else [None, None]
    check(NAME, x, *vectors, *modulation(x, samples=1), 1e-5, "layer")
    check(NAME, x, *vectors, modulation(x, samples=1)[0], modulation(x)[1], 1e-5, "layer")


@runs_kernels
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("tokens", [1, 6, 21])
def test_programs_that_walk_through_tokens(tokens, norm, monkeypatch):
    config = Config(128, 2, 4, 1, 2)
    monkeypatch.setattr(modulated, "forward_config", lambda n: config)
    monkeypatch.setattr(modulated_backward, "backward_config", lambda n: config)
    x = randn(3, tokens, 100)
    check(NAME, x, randn(100), None, *modulation(x), 1e-5, norm)


@runs_kernels
def test_scale_of_another_dtype():
    """As of autocast, and of models whose modulation stays in fp32: the result is x's."""
    for (dtype, other), affine in itertools.product(itertools.permutations(FLOATS, 2), (0, 1)):
        x = randn(3, 5, 33, dtype=dtype)
        vectors = randn(2, 33, dtype=dtype) if affine else (None, None)
        scale, shift = (t.to(other) for t in modulation(x))
        check(NAME, x, *vectors, scale, shift, 1e-5, "layer")


@runs_kernels
def test_far_from_zero():
    x = randn(2, 3, 1000) + 1000
    args = None, None, *modulation(x), 1e-5, "layer"
    got = PATTERN.kernel_fn(x, *args, False, None)[0]
    want = PATTERN.reference(
        *(a.double() if isinstance(a, torch.Tensor) else a for a in (x, *args))
    )
    assert distance(got, want) < 1e-4


@runs_kernels
def test_no_tokens():
    x = randn(3, 0, 33)
    scale, shift = modulation(x)
    y, mean, rstd = PATTERN.kernel_fn(x, None, None, scale, shift, 1e-5, "layer", True, None)
    assert y.shape == x.shape and len(mean) == len(rstd) == 0
    needs = dict.fromkeys(("x", "weight", "bias", "scale", "shift"), True)
    how = modulated.Modulation(None, None, scale, shift, 1e-5, True)
    grads = modulated_backward.backward(y, x, mean, rstd, how, needs)
    assert grads[0].shape == x.shape and not grads[3].any() and not grads[4].any()


@runs_kernels
def test_gradients_repeat():
    x, dy = randn(3, 50, 64), randn(3, 50, 64)
    scale, shift = modulation(x)
    _, mean, rstd = PATTERN.kernel_fn(x, None, None, scale, shift, 1e-5, "layer", True, None)
    needs = dict.fromkeys(("x", "weight", "bias", "scale", "shift"), True)
    how = modulated.Modulation(None, None, scale, shift, 1e-5, True)
    first, second = (modulated_backward.backward(dy, x, mean, rstd, how, needs) for _ in range(2))
    assert all(a is b or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_distances_have_32_bits():
    """Offsets have 64, but a launch takes only 32: distances of samples are in tokens."""
    x = torch.empty(3, 1 << 20, 4096, device="meta")
    _, gap, stride = modulated.by_tokens(x[:, 5:])
    assert (gap, stride) == (1 << 20, 4096)


def test_strips():
    """As many programs as fit, four a sample at least, no more than there are pieces."""
    config, cpu = Config(4096, 1, 8, 8), torch.device("cpu")  # of four multiprocessors
    strips = lambda samples, tokens: modulated.strips_of(samples, tokens, config, cpu)  # noqa: E731
    assert [strips(*s) for s in ((4, 4096), (3, 4096), (300, 64), (4, 5), (300, 2), (1, 0))] == [
        8, 10, 4, 5, 2, 0,
    ]  # fmt: skip


# The guard


def test_refusals():
    x = randn(3, 5, 6)
    scale, shift = modulation(x)
    vector, refused = randn(6), PATTERN.guard_fn
    for args, sentence in [
        ((x.half(), vector, None, scale, shift), "x is torch.float16 and weight is torch.float32"),
        ((x, None, None, scale.double(), shift), "scale is torch.float64"),
        ((x, None, None, scale, shift.int()), "shift is torch.int32"),
        ((x, None, None, x, shift), "scale with shape (3, 5, 6) may not be one row"),
        ((x, None, None, scale, vector), "shift with shape (6,) may not be one row"),
        ((x[0], None, None, scale[0], None), "may not be one row for each sample"),
        ((x.mT.contiguous().mT, None, None, scale, shift), "the elements of a row are 5 apart"),
        ((x, vector, randn(12)[::2], scale, shift), "is not a plain vector"),
        ((randn(1, 1, 8200), None, None, randn(1, 1, 8200), None), "8200 is longer than 8192"),
    ]:
        answer = refused(*args, 1e-5, "layer")
        assert answer is not None and sentence in answer.reason, answer
    assert refused(x, None, None, scale, shift, 1e-5, "layer") is None
    answer = PATTERN.worthwhile_fn(x, None, None, scale, shift, 1e-5, "layer", False)
    assert isinstance(answer, Unmeasured)


def test_symbolic_sizes():
    """Neither samples nor tokens are fixed; rows that may be fewer or more than samples are
    refused, and so is a dynamic eps.
    """
    env, (x, other) = symbolic(torch.randn(3, 5), torch.randn(4, 7))
    rows = x.new_empty(*x.shape, 8)
    scale, wrong = (t.new_empty(t.shape[0], 1, 8) for t in (x, other))
    guards = len(env.guards)
    assert PATTERN.guard_fn(rows, None, None, scale, None, 1e-5, "layer") is None
    assert "one row" in PATTERN.guard_fn(rows, None, None, wrong, None, 1e-5, "layer").reason
    eps = x.shape[0] * 1.0
    assert "dynamic" in PATTERN.guard_fn(rows, None, None, scale, None, eps, "layer").reason
    assert len(env.guards) == guards


def block_norm(x, c):
    shift, scale = c.chunk(6, dim=1)[:2]
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


@runs_kernels
@pytest.mark.parametrize("dims", [((1,), ()), ((0,), (0,)), ((0, 1), (0,))])
def test_dynamic_samples_and_tokens(dims):
    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    compiled = torch.compile(block_norm, backend=collector, dynamic=None)
    x, c = torch.randn(3, 5, 16), torch.randn(3, 96)
    for t, of_t in ((x, dims[0]), (c, dims[1])):
        for d in of_t:
            torch._dynamo.mark_dynamic(t, d)
    for b, t in ((3, 5), (4 if 0 in dims[0] else 3, 9 if 1 in dims[0] else 5)):
        if (b, t) != (3, 5):
            x, c = torch.randn(b, t, 16), torch.randn(b, 96)
        x.requires_grad_(), c.requires_grad_()
        got, want = (value_and_gradients(fn, [x, c]) for fn in (compiled, block_norm))
        torch.testing.assert_close(got, want)
    (graph,) = collector.report.graphs  # compiled once
    assert len(collector.report.fused) == 1, collector.report


# What is found


def halves(c):
    return c.chunk(6, dim=1)[:2]


def norm(x):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def addcmul(x, c):
    shift, scale = halves(c)
    return torch.addcmul(shift[:, None], norm(x), 1 + scale[:, None])


def scale_first(x, c):
    shift, scale = (t.unsqueeze(1) for t in halves(c))
    return (scale + 1) * norm(x) + shift


def sliced_rows(x, c):
    shift, scale = halves(c)
    return norm(x) * (1 + scale[:, None, :]) + shift[:, None, :]


def norm_in_fp32(x, c):
    shift, scale = halves(c)
    return norm(x.float()).to(x.dtype) * (1 + scale[:, None]) + shift[:, None]


def all_in_fp32(x, c):
    shift, scale = halves(c.float().unflatten(1, (6, -1)))
    return (norm(x.float()) * (1 + scale) + shift).type_as(x)


def rms_by_hand(x, c):
    scale = halves(c)[0]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + scale.unsqueeze(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fn", [block_norm, addcmul, scale_first, sliced_rows, norm_in_fp32, all_in_fp32, rms_by_hand]
)
def test_spellings(fn, dtype):
    x, c = torch.randn(3, 5, 16, dtype=dtype), torch.randn(3, 96, dtype=dtype)
    report = assert_fuses(fn, x, c, pattern=NAME)
    assert [s.pattern for s in report.fused] == [NAME]


def test_what_is_left_to_other_patterns():
    """A scale for each token, Gemma's offset of a weight, a norm that is modulated twice."""
    x, c = torch.randn(3, 5, 16), torch.randn(3, 96)
    row = torch.randn(16)
    for fn, other in (
        (lambda x, c: norm(x) * (1 + x.sin()) + x.cos(), "layer_norm"),
        (lambda x, c: norm(x) * (1 + x[..., :1]) + c[:, None, :16], "layer_norm"),
        (lambda x, c: norm(x) * c[:, None, :16] + c[:, None, 16:32], "layer_norm"),
        (lambda x, c: F.rms_norm(x, (16,), eps=1e-6) * (1 + row), "rms_norm"),
        (lambda x, c: [norm(x) * (1 + t[:, None]) for t in c.chunk(6, 1)], "layer_norm"),
    ):
        report = collect(fn, x, c, dynamic=False).report
        assert {s.pattern for s in report.fused} - {"add_mul"} == {other}, report


def test_a_smaller_norm_where_it_is_switched_off():
    x, c = torch.randn(3, 5, 16), torch.randn(3, 96)
    report = collect(block_norm, x, c, dynamic=False, options={"fusion.skip": NAME}).report
    assert [s.pattern for s in report.fused] == ["layer_norm"]


@pytest.mark.parametrize("training", [False, True])
def test_where_it_is_declined_the_norm_may_be_taken(training):
    """By the tables alone: in training the backward of the norm is a kernel."""
    x, c = torch.randn(4, 1024, 1152, dtype=torch.bfloat16), torch.randn(4, 6 * 1152).bfloat16()
    x.requires_grad_(training)
    tables, always = (
        explain(block_norm, x, c, target="H200", options={"fusion.gate": gate})
        for gate in ("table", "always")
    )
    assert [s.pattern for s in always.fused] == [NAME]
    assert [s.pattern for s in tables.fused] == ["layer_norm"] * training
    reasons = [s.reason for s in tables.sites if s.pattern == NAME]
    assert any("has not been timed" in reason for reason in reasons), reasons


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_statistics_are_those_of_the_forward(norm):
    """Decomposed as for Inductor, both reduce the same values: one reduction is left of the two."""
    x = randn(2, 5, 64).bfloat16()

    def both(x, scale, shift):
        args = x, None, None, scale, shift, 1e-6, norm
        return PATTERN.reference(*args), PATTERN.saved_fn(*args)

    table = select_decomp_table()
    graph = make_fx(both, decomposition_table=table, tracing_mode="fake")(x, *modulation(x)).graph
    found = [expression(n) for n in graph.nodes if n.target in REDUCTIONS]
    assert len(found) == 2 and len(set(found)) == 1, graph


# Blocks


class DiTBlock(nn.Module):
    """adaLN-Zero: two modulated norms, and a gate before each residual sum."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)
        )
        self.attention, self.mlp = encoders.Attention(width), encoders.mlp(width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        y = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        x = x + gate1.unsqueeze(1) * self.attention(y)
        y = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(y)


@runs_kernels
@pytest.mark.parametrize("how", ["inference", "training", "frozen modulation"])
def test_dit_block(how):
    """Both norms run their kernels; results and gradients against fp64."""
    block, exact = DiTBlock(32), DiTBlock(32).double()
    exact.load_state_dict(block.state_dict())
    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    x, c = torch.randn(2, 9, 32), torch.randn(2, 32)
    found = []
    for module, dtype in ((block, torch.float32), (exact, torch.float64)):
        module.requires_grad_(how != "inference")
        module.modulation.requires_grad_(how == "training")
        inputs = [t.to(dtype, copy=True).requires_grad_(how != "inference") for t in (x, c)]
        if how == "frozen modulation":
            inputs[1].requires_grad_(False)
        run = torch.compile(module, backend=collector, dynamic=False) if module is block else module
        y = run(*inputs)
        if how != "inference":
            y.cos().sum().backward()
        leaves = [*inputs, *module.parameters()]
        found.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(fused_nodes(collector.graphs[0])) == 2
    assert len(found[0]) == len(found[1]) >= (1 if how == "inference" else 8)
    for got, want in zip(*found, strict=True):
        assert distance(got, want) < 1e-5


@pytest.mark.parametrize(
    "make, count",
    [(diffusion.dit_block, 2), (diffusion.dit_final_layer, 1), (diffusion.joint_attention, 0)],
)
def test_foreign_blocks(make, count):
    """Graphs that were not written for us."""
    module, inputs = make(2, 8, 32)
    assert_fuses(module, *inputs, pattern=NAME, count=count)
