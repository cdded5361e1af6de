"""The last linear layer and its loss where the number of classes is no multiple of 8: the logits
and their gradient in padded rows.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns import linear_cross_entropy as room

from fusion_backend.decide import gate as gating
from fusion_backend.kernels.loss.padded_logits import padded_logits, padding, uneven
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject, Unmeasured
from fusion_backend.testing import fused_nodes, rewritten
from tests.kernel_checks import CLOSE, check, distance, randn, runs_kernels
from tests.measured_cases import scopes
from tests.test_linear_cross_entropy import inputs as inputs_of_the_chunks

pytestmark = pytest.mark.usefixtures("poisoned_empties")
NAME = "padded_linear_cross_entropy"
HALF = [torch.bfloat16, torch.float16]
inputs = functools.partial(inputs_of_the_chunks, dtype=torch.bfloat16, linear=True)


@pytest.fixture
def more_than_a_chunk(monkeypatch):
    """Few rows count as many."""
    monkeypatch.setattr(room, "TILE", 2)


@pytest.fixture
def rule(monkeypatch):
    """Where the helpers of the kernels' tests look for a rule."""
    monkeypatch.setitem(FUSION_RULES, NAME, room.padded_linear_cross_entropy)
    return room.padded_linear_cross_entropy


def call(rule, *arguments):
    op = operator_of(rule)
    names = [p.name for p in rule.params]
    return op.overload(*op.flatten(dict(zip(names, arguments, strict=True))))[0]


@runs_kernels
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows, v", [(1, 101), (7, 2049), (21, 9)])
def test_values_and_gradients(rows, v, reduction, dtype, rule):
    for linear, shape in ((True, (rows,)), (False, (1, rows))):
        x, w, b, target = inputs(rows, v=v, dtype=dtype, linear=linear)
        given = (x.reshape(*shape, -1), w, b if linear else None, target, -100)
        check(NAME, *given, reduction, "same", needs=["x", "w"] + ["b"] * linear)


@runs_kernels
@pytest.mark.parametrize("wanted", ["x", "w", "b"])
def test_only_wanted_gradients(wanted, rule):
    check(NAME, *inputs(9), -100, "mean", "same", needs=[wanted])


@runs_kernels
def test_a_loss_in_fp32_is_not_rounded(rule):
    x, w, b, target = inputs(9)
    out, *_ = rule.launched((x, w, b, target, -100, "mean", "float32"), save=True)
    logits = torch.addmm(b, x, w).float()
    torch.testing.assert_close(out, F.cross_entropy(logits, target), rtol=1e-5, atol=1e-5)


@runs_kernels
def test_every_target_ignored(rule):
    x, w, b, _ = inputs(9)
    none = torch.full((9,), -100, device=x.device)
    for reduction, want in (("mean", math.nan), ("sum", 0.0), ("none", 0.0)):
        leaves = [t.requires_grad_() for t in (x, w, b)]
        out = call(rule, *leaves, none, -100, reduction, "same")
        torch.testing.assert_close(out, torch.full_like(out, want), equal_nan=True)
        for d in torch.autograd.grad(out.sum(), leaves):
            assert torch.equal(d, torch.zeros_like(d))


@runs_kernels
def test_a_target_out_of_range_is_an_error_as_in_torch(rule):
    x, w, b, target = inputs(9)
    target[4] = 101
    with pytest.raises(RuntimeError, match="out of bounds"):
        rule.launched((x, w, b, target, -100, "mean", "same"), save=True)


@pytest.mark.parametrize(
    "dtype, v, is_uneven, more",
    [
        (torch.bfloat16, 30522, True, 6),
        (torch.bfloat16, 50257, True, 47),
        (torch.float16, 32008, False, 56),
        (torch.bfloat16, 32000, False, 0),
        (torch.float32, 30522, True, 6),
    ],
)
def test_rows_end_with_a_line_of_memory(dtype, v, is_uneven, more):
    assert uneven(dtype, v) == is_uneven and padding(dtype, v) == more


def test_padded_logits_are_the_logits():
    x, w, b, _ = inputs(5, dtype=torch.float32)
    for linear in (w, w.contiguous()):
        wide = padded_logits(x, linear, b)
        assert wide.shape == (5, 128) and wide.is_contiguous()
        torch.testing.assert_close(wide[:, :101], torch.addmm(b, x, w))
        assert torch.equal(wide[:, 101:], torch.full((5, 27), -math.inf, device=x.device))
        without = padded_logits(x, linear, None)
        torch.testing.assert_close(without[:, :101], x @ w)
        assert torch.equal(without[:, 101:], wide[:, 101:])


def chosen(
    monkeypatch, dtype=torch.bfloat16, v=101, rows=9, grad=True, dynamic=False, smoothing=0.0
):
    """The operator that the end of a model becomes where every site is taken."""
    x, w, b, target = (t.cpu() for t in inputs(rows, v=v, dtype=dtype))
    weight = w.t().contiguous().requires_grad_(grad)

    def step(x, weight, b, target):
        logits = F.linear(x, weight, b)
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    if dynamic:
        for t in (x, target):
            torch._dynamo.mark_dynamic(t, 0)
    monkeypatch.setattr(gating, "on_gpu", lambda t: True)
    (top,) = scopes(step, x, weight, b, target, dynamic=None if dynamic else False)
    (found,) = [d for d in top.decisions if d.fused]
    return found.op.name


@pytest.mark.parametrize(
    "case, padded",
    [
        (dict(), True),
        (dict(v=99, dtype=torch.float16), True),
        (dict(v=104), False),
        (dict(dtype=torch.float32), False),
        (dict(rows=2), False),
        (dict(grad=False), False),
        (dict(smoothing=0.1), False),
    ],
)
def test_which_steps_keep_padded_logits(case, padded, more_than_a_chunk, monkeypatch):
    assert chosen(monkeypatch, **case) == (NAME if padded else "linear_cross_entropy")


def test_the_number_of_rows_may_change(more_than_a_chunk, monkeypatch):
    assert chosen(monkeypatch, dynamic=True) == NAME


@runs_kernels
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tied_weights_and_any_number_of_rows(reduction, more_than_a_chunk, monkeypatch):
    """The graph of 9 rows also takes 21; the table's gradient has two parts."""

    def model(table, tokens, target):
        logits = F.embedding(tokens, table) @ table.t()
        return F.cross_entropy(logits.float(), target, reduction=reduction)

    def given(rows):
        tokens, target = (torch.arange(rows, device=table.device) * n % 101 for n in (5, 7))
        target[1::3] = -100
        return tokens, target

    table = (randn(101, 24) * 0.2).bfloat16().requires_grad_()
    example = given(9)
    for t in example:
        torch._dynamo.mark_dynamic(t, 0)
    monkeypatch.setattr(gating, "on_gpu", lambda t: True)
    gm = rewritten(model, table, *example)
    assert [str(n.target) for n in fused_nodes(gm)] == [f"fusion.{NAME}.default"]
    for rows in (9, 21):
        tokens, target = given(rows)
        named = {"l_table_": table, "l_tokens_": tokens, "l_target_": target}
        places = [n for n in gm.graph.nodes if n.op == "placeholder"]
        (out,) = gm(*(named.get(n.name, rows) for n in places))
        exact = table.detach().double().requires_grad_()
        wide = F.embedding(tokens, exact) @ exact.t()
        want = F.cross_entropy(wide, target, reduction=reduction)
        dy = torch.rand_like(out)
        (got,) = torch.autograd.grad(out, table, dy)
        (right,) = torch.autograd.grad(want, exact, dy.double())
        (eager,) = torch.autograd.grad(model(table, tokens, target), table, dy)
        assert out.dtype == torch.float32 and distance(out, want) < CLOSE[torch.bfloat16]
        assert distance(got, right) <= 1.5 * distance(eager, right) + 1e-4


@pytest.mark.parametrize(
    "dtype, rows, k, v, taken",
    [
        (torch.bfloat16, 16384, 1024, 30522, True),
        (torch.bfloat16, 8192, 1024, 30522, False),
        (torch.bfloat16, 16384, 768, 50257, False),
        (torch.float16, 16384, 1024, 30522, False),
    ],
)
def test_the_tables_take_what_was_timed(dtype, rows, k, v, taken, rule):
    x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, k), (k, v)))
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    answer = rule.worthwhile_fn(x, w, None, target, -100, "mean", "same", True)
    assert answer is None if taken else isinstance(answer, Unmeasured)


@runs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "w", "b"])
def test_what_is_not_finite_stays_so(where, bad, rule):
    """As in eager, in the loss and in every gradient."""
    x, w, b, target = inputs(6)
    target[:] = torch.arange(6, device=x.device)
    changed = dict(x=x, w=w, b=b)[where]
    changed[(0,) * changed.dim()] = bad
    leaves = [t.detach().requires_grad_() for t in (x, w, b)]
    out = call(rule, *leaves, target, -100, "sum", "same")
    want = F.cross_entropy(leaves[0] @ leaves[1] + leaves[2], target, reduction="sum")
    assert out.isfinite() == want.isfinite()
    pairs = zip(torch.autograd.grad(out, leaves), torch.autograd.grad(want, leaves), strict=True)
    for got, right in pairs:
        assert torch.equal(got.isfinite(), right.isfinite())


def test_nothing_to_multiply_is_refused(rule):
    x, w, b, target = inputs(9)
    for k, v in ((0, 101), (24, 0)):
        answer = rule.guard_fn(x[:, :k], w[:k, :v], b[:v], target, -100, "mean", "same")
        assert isinstance(answer, Reject) and "is 0" in answer.reason
