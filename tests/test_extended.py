"""Matches of row kernels are extended by the elementwise code around them."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.extend.extended import extends
from fusion_backend.extend.translate import step
from fusion_backend.frontends.explain import Collector
from fusion_backend.frontends.loading import names
from fusion_backend.ir.expr import Expr
from fusion_backend.kernels.generated import rows
from fusion_backend.options import parse
from fusion_backend.testing import with_kernels
from tests.kernel_checks import CLOSE, DEVICE, distance, runs_kernels
from tests.measured_cases import Answers, as_on_a_gpu, decided, rms, told

pytestmark = pytest.mark.usefixtures("eager_kernels")

ALWAYS = {"fusion.gate": "always", "fusion.only": ["generated_rows"]}
N = 24


class Kernels(Collector):
    """Runs the rewritten graph operator by operator, with kernels at its sites."""

    def __call__(self, gm, example_inputs):
        super().__call__(gm, example_inputs)
        return with_kernels(self.graphs[-1]).forward


def found(fn, *inputs, dynamic=None):
    """The calls of generated kernels in a function's graphs, and what fn returns with them. Each
    call launches its kernel, and does not fall back to the reference.
    """
    torch._dynamo.reset()
    collector = Kernels(ALWAYS)
    with mock.patch.object(rows, "launch", wraps=rows.launch) as launched:
        got = torch.compile(fn, backend=collector, dynamic=dynamic)(*inputs)
    assert not any(r.error or r.faults for r in collector.report.graphs)
    calls = [
        n
        for gm in collector.graphs
        for n in gm.graph.nodes
        if str(n.target) == "fusion.generated_rows.default"
    ]
    traced = DEVICE == "cuda"  # and more than once
    assert launched.call_count == len(calls) or (traced and launched.call_count > len(calls) > 0)
    return calls, got


def tensors(*shapes, dtype=torch.float32, needs=True):
    made = [torch.randn(s, device=DEVICE).to(dtype) for s in shapes]
    return [t.requires_grad_(needs) for t in made]


def norm(x, w=None, b=None):
    return F.layer_norm(x, x.shape[-1:], w, b)


def layer_scale(x, residual, w, b, gamma):
    return residual + gamma * norm(x, w, b)


def rms_by_hand(x, residual, w, b, gamma):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.gelu((gamma * h.to(x.dtype)) * residual, approximate="tanh")


def squashed_norm(x, residual, w, b, gamma):
    return torch.tanh(norm(F.silu(x * 2) + b, w)) * residual


def gates_by_hand(x, residual, w, b, gamma):
    y = norm(x, w, b)
    return y * torch.sigmoid(1.702 * y) + F.relu6(y) / 3


def masked_softmax(x, residual, w, b, gamma):
    return torch.softmax((x * 0.5 + b).masked_fill(residual > 1, -1e9), -1) * residual


def unit_length(x, residual, w, b, gamma):
    return F.normalize(x.abs() + 0.1, dim=-1) * w - residual


def norm_between(x, residual, w, b, gamma):
    return (F.relu(norm(F.hardtanh(x), w, b) + 0.5) - residual).abs() * gamma


SPELLED = [
    layer_scale, rms_by_hand, squashed_norm, gates_by_hand, masked_softmax, unit_length,
    norm_between,
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", SPELLED)
def test_the_code_around_is_part_of_the_kernel(fn, dtype):
    inputs = tensors((2, 5, N), (2, 5, N), N, N, N, dtype=dtype)
    (call,), got = found(fn, *inputs)
    rest = [n for n in call.graph.nodes if n.op not in ("placeholder", "output")]
    assert [n for n in rest if n.name != "gt"] == [call]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = fn(*exact)
    assert distance(got, want) <= 4 * CLOSE[dtype]
    d = torch.randn_like(got)
    given = torch.autograd.grad(got, inputs, d, allow_unused=True)
    wanted = torch.autograd.grad(want, exact, d.double(), allow_unused=True)
    for mine, its in zip(given, wanted, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            # eager rounds each operator's result; a value near an edge may fall on its other side
            assert distance(mine, its) <= 10 * CLOSE[dtype]


def read_again(x, y):
    h = norm(x)
    return h * y, h.sum()


def test_other_dimensions_are_no_operations_of_rows():
    for op, last, other in (("softmax", -1, -2), ("mean", (-1,), (-2,)), ("sum", (-1,), (-2, -1))):
        assert step(Expr(op, (), last, None, 0)) == op
        assert not step(Expr(op, (), other, None, 0))


def other_dimension(x, y):
    return torch.softmax(x, 1) * y


def dropped(x, y):
    return F.dropout(norm(x), 0.5) * y


def nothing_around(x, y):
    return norm(x) @ y.transpose(1, 2)


def detached(x, y):
    h = norm(x)
    return h * torch.sigmoid(h.detach())


def whole_numbers(x, y):
    return norm(x) * torch.arange(N, device=x.device)


def power(x, y):
    return norm(x) ** 2.7


def larger(x, y):
    return norm(x) * y[None].expand(3, *y.shape)


def a_pattern_of_its_own(x, y):
    return torch.softmax(x * 0.5 + y, -1)


LEFT = [
    a_pattern_of_its_own,
    read_again,
    other_dimension,
    dropped,
    nothing_around,
    detached,
    whole_numbers,
    power,
    larger,
]


@runs_kernels
@pytest.mark.parametrize("fn", LEFT)
def test_what_is_not_elementwise_code_of_one_result_stays(fn):
    assert not found(fn, *tensors((2, 5, N), (2, 5, N)))[0]


@runs_kernels
def test_in_fp16_a_value_between_may_be_infinite():
    x, y = tensors((2, 5, N), (2, 5, N), dtype=torch.float16)
    assert not found(lambda x, y: F.silu(norm(x)) * y, x, y)[0]
    calls, got = found(lambda x, y: torch.tanh((norm(x.float()) * 1e6).half() * 1e-6) * y, x, y)
    assert not any("tanh" in call.args[0] for call in calls)


# Code that a kernel would compute with other values or gradients than torch: of the operation that
# is named, nothing is in a program.
STAYS = {
    "sqrt": lambda x, y: norm(x) * (y + 0.5).sqrt(),  # NaN below 0, infinite gradients at 0
    "maximum": lambda x, y: norm(x) * y.sqrt().clamp_min(0.1),
    "minimum": lambda x, y: norm(x) * (y.round() / 2).clamp_max(0.5),  # passes a gradient at 0.5
    "where": lambda x, y: norm(x) * F.gelu(torch.where(y > 0, 1e-40, 1.0)),  # no number of Triton
}


@runs_kernels
@pytest.mark.parametrize("op", STAYS)
def test_code_with_other_values_or_gradients_stays(op):
    x, y = tensors((4, N), (4, N))
    calls, got = found(STAYS[op], x, y)
    assert not any(f" = {op} " in call.args[0] for call in calls)
    want = STAYS[op](x, y)
    torch.testing.assert_close(got, want, equal_nan=True)
    d = torch.randn_like(got)
    for mine, its in zip(
        torch.autograd.grad(got, (x, y), d, allow_unused=True),
        torch.autograd.grad(want, (x, y), d, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, equal_nan=True, rtol=1e-4, atol=1e-5)


# A constant tensor makes one number of a row a row of it; in a program it is a number.
NARROW = [
    lambda x, y: F.normalize(y + torch.zeros_like(x), dim=-1) * x,
    lambda x, y: torch.softmax(y * torch.ones_like(x) * 2, -1) * x,
    lambda x, y: rms(torch.where(y > 0, torch.zeros_like(x), torch.ones_like(x)) + y, x),
]


@pytest.mark.parametrize("fn", NARROW)
@pytest.mark.parametrize("kernels", [pytest.param(True, marks=runs_kernels), False])
def test_sums_over_what_is_one_number_for_a_row(fn, kernels):
    x, y = tensors((4, N), (4, 1))
    if kernels:
        _, got = found(fn, x, y)
    else:
        got = torch.compile(fn, backend="fusion", options=ALWAYS)(x, y)
    want = fn(x, y)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for mine, its in zip(
        torch.autograd.grad(got.square().sum(), (x, y)),
        torch.autograd.grad(want.square().sum(), (x, y)),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)


@runs_kernels
def test_relu_and_its_like_at_their_edges():
    x, y = tensors((4, N), (4, N))
    with torch.no_grad():
        x.copy_(x.mul(2).round())
    for fn in (F.relu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid):
        (call,), got = found(lambda x, y, fn=fn: norm(fn(x)) * y, x, y)
        assert "maximum" in call.args[0]
        d = torch.randn_like(got)
        want = torch.autograd.grad(norm(fn(x)) * y, (x, y), d)
        for mine, its in zip(torch.autograd.grad(got, (x, y), d), want, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@runs_kernels
def test_code_in_place():
    """The second tensor is written to after the site has read it, the first one before."""

    def fn(x, y, early):
        x.add_(1)
        h = norm(x)
        h.mul_(y)
        if early:
            y.add_(1)
        h = F.silu(h)
        y.add_(1)
        return h

    inputs = tensors((2, 5, N), (2, 5, N), needs=False)
    copies = [t.clone() for t in inputs]
    (call,), got = found(lambda x, y: fn(x, y, 0), *inputs)
    assert "sigmoid" in call.args[0] and "mul t" in call.args[0]
    torch.testing.assert_close(got, fn(*copies, 0))
    for mine, its in zip(inputs, copies, strict=True):
        torch.testing.assert_close(mine, its)
    assert not found(lambda x, y: fn(x, y, 1), *inputs)[0]


@runs_kernels
def test_a_row_of_zeros_has_no_gradient_of_its_length():
    """As in torch, where √0 by hand would give NaN."""

    x, y = tensors((3, N), (3, N))
    with torch.no_grad():
        x[1] = 0
    for f in (lambda x, y: F.normalize(x * 2, dim=-1) + y, lambda x, y: F.normalize(x - y) * y):
        _, got = found(f, x, y)
        for mine, its in zip(
            torch.autograd.grad(got.sum(), (x, y)),
            torch.autograd.grad(f(x, y).sum(), (x, y)),
            strict=True,
        ):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@runs_kernels
def test_code_is_added_as_far_as_one_value_is_read():
    """The sum is read twice, and is the result; its readers stay."""

    def fn(x, y):
        h = F.silu(norm(x)) + y
        return torch.tanh(h), torch.exp(h)

    inputs = tensors((2, 5, N), (2, 5, N))
    (call,), got = found(fn, *inputs)
    assert "tanh" not in call.args[0] and "sigmoid" in call.args[0]
    for mine, its in zip(got, fn(*inputs), strict=True):
        torch.testing.assert_close(mine, its)


@runs_kernels
def test_code_in_another_grad_mode_stays():
    def fn(x, y):
        h = F.silu(norm(x)) + 1
        with torch.no_grad():
            return h * y

    (call,), _ = found(fn, *tensors((2, 5, N), (2, 5, N)))
    assert call.args[0].count("sigmoid") == 1 and len(call.all_input_nodes) == 1


@runs_kernels
def test_an_argument_that_others_read_stays():
    def fn(x, y):
        h = x * y
        return F.relu(norm(h + 1)), h

    inputs = tensors((2, 5, N), (2, 5, N))
    (call,), got = found(fn, *inputs)
    assert "mul t0 t1" not in call.args[0]
    torch.testing.assert_close(got[0], fn(*inputs)[0])


@runs_kernels
def test_more_tensors_than_a_kernel_takes_are_left_alone():
    def fn(x, *others):
        h = norm(x)
        for other in others:
            h = torch.sigmoid(h) * other
        return h

    inputs = tensors(*[(3, N)] * 9)
    assert not found(fn, *inputs)[0]
    assert len(found(fn, *inputs[:8])[0]) == 1


def long_chain(x):
    h = norm(x)
    for i in range(50):
        h = torch.sigmoid(h) * (i + 2)
    return h


def test_a_long_chain_is_refused_with_the_number_of_its_operations(monkeypatch, tmp_path):
    ratios = Answers(layer_norm=0.9, norm_act=0.9)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios), torch.no_grad():
        record = decided(long_chain, large()[0])
    (site,) = [s for s in record.sites if s.pattern == "generated_rows"]
    assert not site.fused and "operations are more than 48 for one kernel" in site.reason


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        (True, {}),
        (True, {"fusion.gate": "measure"}),
        (False, {"fusion.gate": "never"}),
        (False, {"fusion.gate": "always"}),
        (True, {"fusion.gate": "always", "fusion.only": "generated_rows"}),
        (False, {"fusion.only": "layer_norm"}),
        (False, {"fusion.skip": "generated_rows"}),
    ],
)
def test_options_that_want_it(wanted, options):
    assert extends(parse(options, names())[0]) == wanted


@runs_kernels
@pytest.mark.parametrize("needs", [(0,), (1,), (4,), (0, 4)])
def test_only_some_arguments_require_a_gradient(needs):
    inputs = tensors((2, 5, N), (2, 5, N), N, N, N, needs=False)
    for i in needs:
        inputs[i].requires_grad_()
    _, got = found(layer_scale, *inputs)
    want = layer_scale(*inputs)
    leaves = [inputs[i] for i in needs]
    for mine, its in zip(
        torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@runs_kernels
def test_a_batch_of_any_size():
    inputs = tensors((4, 5, N), (4, 5, N), N, N, N)
    torch._dynamo.mark_dynamic(inputs[0], 0)
    torch._dynamo.mark_dynamic(inputs[1], 0)
    _, got = found(layer_scale, *inputs)
    torch.testing.assert_close(got, layer_scale(*inputs), rtol=1e-4, atol=1e-5)


@runs_kernels
def test_tensors_that_are_not_contiguous():
    x = torch.randn(2, N, 5, device=DEVICE).transpose(1, 2)
    y = torch.randn(2, 1, N, device=DEVICE).expand(2, 5, N)
    _, got = found(lambda x, y: F.silu(norm(x)) * y, x, y)
    torch.testing.assert_close(got, F.silu(norm(x)) * y, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.gamma = nn.Linear(N, N), nn.Parameter(torch.rand(N))

    def forward(self, x):
        h = self.linear(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + self.gamma * F.silu(h)


@pytest.mark.parametrize("how", ["plain", "autocast", "checkpoint"])
def test_compiled_blocks_train_as_eager_ones(how):
    torch.manual_seed(0)
    block, x = Block().to(DEVICE), torch.randn(3, 5, N, device=DEVICE, requires_grad=True)

    def fn(x):
        if how == "checkpoint":
            return checkpoint(block, x, use_reentrant=False)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
            return block(x)

    leaves = [x, *block.parameters()]
    want = fn(x)
    wanted = torch.autograd.grad(want.float().square().sum(), leaves)
    got = torch.compile(fn, backend="fusion", options=ALWAYS)(x)
    given = torch.autograd.grad(got.float().square().sum(), leaves)
    report = fusion_backend.report()
    assert [s.pattern for s in report.sites if s.fused] == ["generated_rows"]
    assert not any(g.error or g.faults for g in report.graphs)
    close = dict(rtol=2e-2, atol=5e-2) if how == "autocast" else dict(rtol=1e-4, atol=1e-4)
    for mine, its in zip((got, *given), (want, *wanted), strict=True):
        torch.testing.assert_close(mine, its, **close)


def with_code(x, y):
    return F.silu(norm(x * 2)) * y


def large():
    return [torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2)]


def test_it_is_proposed_where_the_match_itself_is_left_to_inductor(monkeypatch, tmp_path):
    ratios = Answers(layer_norm=0.9, norm_act=0.95, generated_rows=1.3)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub, torch.no_grad():
        record = decided(with_code, *large())
    ((_, fused, reason),) = told(record, "generated_rows")
    assert fused and "1.30" in reason
    assert ["generated_rows"] in stub.asked and stub.asked[0] != ["generated_rows"]


def test_it_is_not_asked_about_where_another_pattern_is_faster(monkeypatch, tmp_path):
    ratios = Answers(layer_norm=1.2, norm_act=1.2)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios), torch.no_grad():
        record = decided(with_code, *large())
    assert not [s for s in record.sites if s.pattern == "generated_rows"]


def test_next_to_more_code_that_inductor_would_fuse_it_is_not_proposed(monkeypatch, tmp_path):
    ratios = Answers(layer_norm=0.9, norm_act=0.95)
    beside = [
        lambda x, y: with_code(x.sin(), y),
        lambda x, y: with_code(x, y).sum(-1),
        lambda x, y: with_code(x, y).view(2, -1).cos(),
    ]
    for fn in beside:
        with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub, torch.no_grad():
            record = decided(fn, *large())
        assert ["layer_norm"] in stub.asked and ["generated_rows"] not in stub.asked
        assert not [s for s in record.sites if s.pattern == "generated_rows"]


def test_inside_attention_it_is_left_to_inductor(monkeypatch, tmp_path):
    """Which has one call for all of it; a region without the products would not show that."""
    q, k, v = (torch.empty(8, 16, 512, 64, dtype=torch.bfloat16) for _ in "qkv")
    mask, ratios = (
        torch.empty(8, 1, 1, 512, dtype=q.dtype),
        Answers(attention=0.9, softmax=0.9, generated_rows=0.9),
    )

    def weights(q, k, v, mask):
        return torch.softmax((q @ k.mT) * 0.125 + (1 - mask) * -1e9, -1)

    for fn, alone in ((lambda *given: weights(*given) @ v, False), (weights, True)):
        with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub, torch.no_grad():
            decided(fn, q, k, v, mask)
        assert stub.asked[0] == (["softmax"] if alone else ["attention"])
        assert (["generated_rows"] in stub.asked) == alone


PARTS = {
    "chunk": lambda x: x.chunk(2, -1)[0],
    "slice": lambda x: x[:, :2048],
    "view of a slice": lambda x: x[:, :2048].unsqueeze(0)[0],
}


@pytest.mark.parametrize("part", PARTS)
def test_in_training_a_part_of_a_value_is_left_to_inductor(part, monkeypatch, tmp_path):
    """Whose gradient Inductor writes with those of the other parts."""
    ratios = Answers(layer_norm=0.9, generated_rows=1.3)
    x, y = large()
    y = y[:, :2048].contiguous()
    for trains in (False, True):
        x.requires_grad_(trains)
        with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub:
            decided(lambda x, y: norm(PARTS[part](x) * 2) * y, x, y)
        assert (["generated_rows"] in stub.asked) == (not trains)


def test_if_it_loses_the_code_is_left_to_inductor(monkeypatch, tmp_path):
    ratios = Answers(layer_norm=0.9, norm_act=0.95, generated_rows=0.97)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios), torch.no_grad():
        record = decided(with_code, *large())
    assert not any(s.fused for s in record.sites)
