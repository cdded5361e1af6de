"""Norms over channels, and rows of unit length, found in other words than those of their patterns;
and what comes close and is left alone.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_backend import Pattern, explain
from fusion_backend.ops.registry import unregister
from fusion_backend.testing import assert_fuses, fused_nodes, rewritten
from tests.kernel_checks import FLOATS, randn, runs_kernels
from tests.spelled import check_spelling, leaves

pytestmark = pytest.mark.usefixtures("poisoned_empties")
ALWAYS = {"fusion.gate": "always"}


# Instance normalisation is group normalisation with each channel for a group.


INSTANCE = {
    "F.instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b, True, 0.1, 1e-3),
    "torch.instance_norm": lambda x, w, b: torch.instance_norm(
        x, w, b, None, None, True, 0.1, 1e-3, False
    ),
    "its weight by hand": lambda x, w, b: (
        F.instance_norm(x, eps=1e-3) * w[:, None, None] + b.view(1, -1, 1, 1)
    ),
    "with silu": lambda x, w, b: F.silu(F.instance_norm(x, weight=w, bias=b, eps=1e-3)),
}


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("words", INSTANCE)
def test_instance_norm(words, needs, dtype):
    inputs = leaves((2, 5, 3, 7), (5,), (5,), dtype=dtype, needs=needs)
    node = check_spelling("group_norm", INSTANCE[words], *inputs)
    assert node.args[1] == 5 and node.kwargs["save"] == needs


@runs_kernels
@pytest.mark.parametrize("shape", [(3, 1, 2), (1, 7, 33), (2, 3, 5, 1, 3), (2, 3, 1, 2)])
def test_instance_norm_of_other_sizes(shape):
    node = check_spelling("group_norm", lambda x: F.instance_norm(x, eps=0.1), *leaves(shape))
    assert node.args[1] == shape[1]


@pytest.mark.parametrize("module", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_modules(module, training, affine):
    x = torch.randn(2, 6, *[5, 3, 4][: int(module.__name__[-2])], requires_grad=True)
    assert_fuses(module(6, affine=affine).train(training), x, pattern="group_norm")


@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_with_running_statistics_is_left_alone(training):
    """It updates them, or reads them."""
    norms = [nn.InstanceNorm2d(6, track_running_stats=True).train(training) for _ in range(2)]
    x = torch.randn(2, 6, 5, 3)
    assert_fuses(norms[0], x, pattern="group_norm", count=0)
    torch.compiler.reset()
    norms[0](x)
    norms[1](x)
    torch.compile(norms[1], backend="fusion", options=ALWAYS)(x)
    norms[0](x)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norms[1], name), getattr(norms[0], name))


@pytest.mark.parametrize("training", [True, False])
def test_the_tables_leave_a_group_for_each_channel_to_inductor(training):
    """Found, and for the gate to measure; groups of several channels are taken."""
    x = torch.empty(32, 64, 64, 64, dtype=torch.bfloat16, device="meta", requires_grad=training)
    for fn, taken in ((F.instance_norm, 0), (lambda x: F.group_norm(x, 8), 1)):
        report = explain(fn, x, target="H200", options={"fusion.gate": "table"})
        assert [s.pattern for s in report.fused] == ["group_norm"] * taken, report
        (site,) = [s for s in report.sites if s.pattern == "group_norm"]
        assert taken or "each channel is a group" in site.reason


def test_one_channel_is_one_group():
    (node,) = fused_nodes(
        rewritten(lambda x: F.instance_norm(x.flatten(1)[:, None]), *leaves((2, 6, 5)))
    )
    assert node.args[1] == 1


def test_an_instance_norm_that_is_read_twice_keeps_its_act_outside():
    fn = lambda x: (lambda y: F.silu(y) + y)(F.instance_norm(x))  # noqa: E731
    (node,) = fused_nodes(rewritten(fn, *leaves((2, 6, 5, 3))))
    assert "identity" in node.args


def test_instance_norm_of_other_batches_needs_no_other_graph(eager_kernels):
    fn = lambda x, w: F.instance_norm(x, weight=w)  # noqa: E731
    x, w = torch.randn(3, 6, 5), torch.randn(6)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(fn, backend="fusion", options=ALWAYS)
    assert_fuses(fn, x, w, pattern="group_norm")
    for b in 3, 7, 2:
        y = torch.randn(b, 6, 5)
        torch._dynamo.mark_dynamic(y, 0)
        with torch._dynamo.config.patch(error_on_recompile=b != 3):
            torch.testing.assert_close(compiled(y, w), fn(y, w))


# Batch normalisation in inference, by hand


def plane(v):
    return v[None, :, None, None]


BATCH = {
    "a quotient": lambda x, m, v, w, b: (
        (x - plane(m)) / torch.sqrt(plane(v * v) + 1e-3) * plane(w) + plane(b)
    ),
    "rsqrt": lambda x, m, v, w, b: (
        plane(b) + plane(w) * ((x - plane(m)) * (plane(v * v) + 1e-3).rsqrt())
    ),
    "the root broadcast": lambda x, m, v, w, b: (
        (x - m.view(-1, 1, 1)) / plane((v * v + 1e-3).sqrt()) * w.view(1, -1, 1, 1) + plane(b)
    ),
    "the scale broadcast": lambda x, m, v, w, b: (
        (x - plane(m)) * plane(w / torch.sqrt(v * v + 1e-3)) + plane(b)
    ),
    "a product of scales": lambda x, m, v, w, b: (
        (x - plane(m)) * (plane(torch.rsqrt(v * v + 1e-3)) * plane(w)) + plane(b)
    ),
    "with relu": lambda x, m, v, w, b: F.relu(
        (-plane(m) + x) / (plane(v * v) + 1e-3) ** 0.5 * plane(w) + plane(b)
    ),
}


def channels(dtype=torch.float32, needs=False, b=2, c=5):
    """x, mean, the root of the variance, weight and bias."""
    given = leaves((b, c, 3, 7), (c,), (c,), (c,), (c,), dtype=dtype, needs=needs)
    return [t.requires_grad_(needs and i not in (1, 2)) for i, t in enumerate(given)]


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("words", BATCH)
def test_batch_norm(words, needs, dtype):
    node = check_spelling("batch_norm", BATCH[words], *channels(dtype, needs), factor=2)
    assert 1e-3 in node.args


@runs_kernels
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 33, 1, 5), (7, 2, 9, 1)])
def test_batch_norm_of_other_sizes(shape):
    x, c = randn(*shape), shape[1]
    check_spelling("batch_norm", BATCH["a quotient"], x, *leaves(*[(c,)] * 4, needs=False))


def test_batch_norm_of_rows_and_sequences():
    m, v, w = torch.randn(6), torch.rand(6), torch.randn(6)
    rows = lambda x, m, v, w: (x - m) / torch.sqrt(v + 1e-3) * w  # noqa: E731
    assert_fuses(rows, torch.randn(9, 6), m, v, w, pattern="batch_norm")
    sequences = lambda x, m, v: (x - m[:, None]) * torch.rsqrt(v[:, None] + 1e-3)  # noqa: E731
    assert_fuses(sequences, torch.randn(9, 6, 4), m, v, pattern="batch_norm")


BATCH_OTHERS = {
    "eps outside the root": lambda x, m, v, w, b: (x - plane(m)) / (plane(v).abs().sqrt() + 1e-3),
    "mean added": lambda x, m, v, w, b: (x + plane(m)) * torch.rsqrt(plane(v * v) + 1e-3),
    "not a root": lambda x, m, v, w, b: (x - plane(m)) / (plane(v * v) + 1e-3),
    "half of the mean": lambda x, m, v, w, b: (x - 0.5 * plane(m)) * (plane(v * v) + 1e-3).rsqrt(),
    "of rows": lambda x, m, v, w, b: (x[..., :5] - m) / torch.sqrt(v * v + 1e-3),
    "without a mean": lambda x, m, v, w, b: x / torch.sqrt(plane(v * v) + 1e-3),
    "of one sample": lambda x, m, v, w, b: (
        (x[:1, 0] - m[:, None, None]) / (plane(v * v) + 1).sqrt()
    ),
    "the mean of all": lambda x, m, v, w, b: (x - m.mean()) / torch.sqrt(plane(v * v) + 1e-3),
    "of its own statistics, in training": lambda x, m, v, w, b: (
        (x - plane(x.mean((0, 2, 3)))) / torch.sqrt(plane(x.var((0, 2, 3))) + 1e-3)
    ),
}


@pytest.mark.parametrize("words", BATCH_OTHERS)
def test_other_values_than_batch_norm_are_left_alone(words):
    assert_fuses(BATCH_OTHERS[words], *channels(needs=True), pattern="batch_norm", count=0)


@pytest.mark.parametrize("learned", [1, 2])
def test_statistics_that_need_a_gradient_are_left_alone(learned):
    """They have none in F.batch_norm."""
    inputs = channels(needs=True)
    inputs[learned].requires_grad_()
    assert_fuses(BATCH["a quotient"], *inputs, pattern="batch_norm", count=0)


def test_batch_norm_that_is_read_twice_is_left_alone():
    fn = lambda x, m, v: (lambda y: (y * (plane(v * v) + 1).rsqrt(), y))(x - plane(m))  # noqa: E731
    assert_fuses(fn, *channels()[:3], pattern="batch_norm", count=0)


def test_batch_norm_of_other_batches_needs_no_other_graph(eager_kernels):
    fn, options = BATCH["a quotient"], {**ALWAYS, "fusion.only": ["batch_norm"]}
    compiled = torch.compile(fn, backend="fusion", options=options)
    for b in 3, 7, 2:
        inputs = channels(b=b)
        torch._dynamo.mark_dynamic(inputs[0], 0)
        if b == 3:
            assert_fuses(fn, *inputs, pattern="batch_norm")
            torch.compiler.reset()
        with torch._dynamo.config.patch(error_on_recompile=b != 3):
            torch.testing.assert_close(compiled(*inputs), fn(*inputs))


# Rows of unit length by the sum of their squares, where it has a lower bound: of x · rsqrt(max(s,
# e)) the bound of the length is √e.


LENGTHS = {
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True).clamp_min(4.0)),
    "rsqrt first": lambda x: (x * x).sum(-1, True).clamp(min=4).rsqrt() * x,
    "power": lambda x: x * torch.clamp(x.square().sum(-1, keepdim=True), 4.0) ** -0.5,
    "root": lambda x: x / x.pow(2).sum(-1, keepdim=True).clamp_min(4.0).sqrt(),
    "in fp32": lambda x: (
        (lambda y: y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True).clamp_min(4.0)))(x.float())
    ).to(x.dtype),
}


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("words", LENGTHS)
def test_lengths(words, needs, dtype):
    x = torch.linspace(0.1, 4, 14).view(7, 2, 1) * F.normalize(randn(7, 2, 33), dim=-1)
    node = check_spelling("l2_norm", LENGTHS[words], x.to(dtype).requires_grad_(needs))
    assert node.args[1] == 2.0


LENGTH_OTHERS = {
    "eps added": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 4.0),
    "eps added and a bound": lambda x: x * (x.pow(2).sum(-1, True).clamp_min(4.0) + 1).rsqrt(),
    "a mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(4.0)),
    "an upper bound": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True).clamp_max(4.0)),
    "a sum that may be negative": lambda x: x * torch.rsqrt(x.sum(-1, True).clamp_min(4.0)),
    "the square of the length": lambda x: x / x.pow(2).sum(-1, keepdim=True).clamp_min(4.0),
    "of another tensor": lambda x: x * x.exp().pow(2).sum(-1, keepdim=True).clamp_min(4.0).rsqrt(),
    "of columns": lambda x: x * torch.rsqrt(x.pow(2).sum(0, keepdim=True).clamp_min(4.0)),
    "read twice": lambda x: (lambda r: (x * r, r))(x.pow(2).sum(-1, True).clamp_min(4.0).rsqrt()),
}


@pytest.mark.parametrize("words", LENGTH_OTHERS)
def test_other_lengths_are_left_alone(words):
    x = torch.randn(7, 9, requires_grad=True)
    assert_fuses(LENGTH_OTHERS[words], x, pattern="l2_norm", count=0)


def test_lengths_in_a_pattern_of_the_user():
    """Its number reaches the graph as a root, and comes back as it was."""

    @Pattern
    def unit_rows_less_one(x: Tensor, low: float) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True).clamp_min(low)) - 1

    try:
        x = torch.randn(7, 9)
        fn = lambda x: x / x.pow(2).sum(-1, keepdim=True).clamp_min(3.0).sqrt() - 1  # noqa: E731
        (node,) = fused_nodes(rewritten(fn, x))
        assert str(node.target) == "fusion.unit_rows_less_one.default"
        assert node.args[1] == pytest.approx(3.0, rel=1e-12)
    finally:
        unregister("unit_rows_less_one")


def test_lengths_of_other_batches_need_no_other_graph(eager_kernels):
    compiled = torch.compile(LENGTHS["rsqrt"], backend="fusion", options=ALWAYS, dynamic=True)
    for rows in 5, 9, 3:
        x = torch.randn(rows, 4, 33)
        torch._dynamo.mark_static(x, 2)
        with torch._dynamo.config.patch(error_on_recompile=rows != 5):
            torch.testing.assert_close(compiled(x), LENGTHS["rsqrt"](x))


# An RMS norm without an eps has that of the dtype in which torch computes: of fp32 for half
# precision, whose own would be as large as the squares of small rows.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_rms_norm_without_eps_is_exact_for_small_rows(dtype):
    x, w = (1e-2 * torch.randn(6, 40)).to(dtype), torch.randn(40).to(dtype)
    fn = lambda x, w: F.rms_norm(x, (40,), w)  # noqa: E731
    gm = rewritten(fn, x, w)
    (node,) = fused_nodes(gm)
    assert node.args[3] == torch.finfo(torch.float32).eps
    torch.testing.assert_close(gm(x, w)[0], fn(x, w))


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_a_bias_after_the_norm_was_rounded(cast):
    """Of a norm in fp32 that is rounded to bf16; a norm that is cast to fp64 is another value."""

    def fn(x, w, b):
        n = F.group_norm(x.float(), 2, eps=1e-3).to(cast)
        return n * w[:, None, None] + b.view(-1, 1, 1)

    inputs = leaves((2, 6, 4, 5), (6,), (6,), dtype=torch.bfloat16)
    if cast == torch.bfloat16:
        node = check_spelling("group_norm", fn, *inputs)
        assert not {"l_w_", "l_b_"} - {a.name for a in node.all_input_nodes}
    else:
        whole = [n for n in fused_nodes(rewritten(fn, *inputs)) if len(n.all_input_nodes) > 1]
        assert not whole


# The factor of each row is computed without the last dimension, and spread over the row at the end.

DROPPED = {
    "rms_norm": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-3).unsqueeze(-1)),
    "layer_norm": lambda x, w: (
        (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0) + 1e-3).rsqrt()[..., None] * w
    ),
    "l2_norm": lambda x: x / x.square().sum(-1).sqrt().clamp_min(1e-12)[..., None],
}


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("pattern", DROPPED)
def test_a_factor_without_the_last_dimension(pattern, needs, dtype):
    fn = DROPPED[pattern]
    shapes = [(3, 5, 40), (40,)][: len(inspect.signature(fn).parameters)]
    check_spelling(pattern, fn, *leaves(*shapes, dtype=dtype, needs=needs), factor=2)


@pytest.mark.parametrize("spread", [lambda r: r, lambda r: r[None], lambda r: r[:, None] + r])
def test_a_factor_that_is_not_of_its_row_is_left_alone(spread):
    fn = lambda x: x * spread(torch.rsqrt(x.pow(2).mean(-1) + 1e-3))  # noqa: E731
    found = fused_nodes(rewritten(fn, torch.randn(6, 6)))
    assert not [n for n in found if "norm" in str(n.target)]


def test_a_factor_without_a_gradient_is_left_alone():
    def fn(x):
        mean = x.pow(2).mean(-1)
        with torch.no_grad():
            factor = torch.rsqrt(mean + 1e-3)
        return x * factor.unsqueeze(-1)

    assert not fused_nodes(rewritten(fn, torch.randn(3, 40, requires_grad=True)))
