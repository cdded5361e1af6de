"""Capture: a call that is lowered without running gives the same view as running it; what cannot be
lowered is copied; values of different grad modes and autocast states are different values.
"""

import logging
import math

import pytest
import torch
import torch.nn.functional as F

import fusion_backend
import fusion_backend.capture.tracer as capture_module
from fusion_backend.capture import autocast
from fusion_backend.capture.predicted_writes import PredictedWrites
from fusion_backend.capture.tracer import trace_view
from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import assert_fuses, collect


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(8),
            torch.nn.Linear(8, 16),
            torch.nn.Linear(16, 8),
        )

    def forward(self, x):
        h = self.norm(x)
        h = h.view(-1, 8).to(x.dtype)
        h = F.silu(self.up(h)) * self.up(h)[..., :1]
        return x + self.down(h).view(x.shape)


aten = torch.ops.aten


def source(fn, *inputs, **kwargs):
    return collect(fn, *inputs, **kwargs).sources[0]


def lines(view):
    """Of each tensor of a view: (operator, arguments with nodes by number, what is known of the
    result).
    """
    number: dict = {}
    found = []
    for n in view.graph.nodes:
        value = n.meta.get("val")
        if n.op == "output" or isinstance(value, (torch.SymInt, torch.SymFloat)):
            continue
        number[n] = len(number)
        arguments = torch.fx.node.map_arg(
            (n.args, n.kwargs), lambda a: number.get(a, str(a.meta.get("val")))
        )
        tensors = value if isinstance(value, (tuple, list)) else [value]
        known = [
            (str(t.dtype), str(t.shape), str(t.stride()))
            for t in tensors
            if isinstance(t, torch.Tensor)
        ]
        where = (str(view.owner.get(n)), str(view.region.get(n)), n in view.requires_grad)
        found.append(
            (str(n.target) if n.op == "call_function" else n.op, str(arguments), known, where)
        )
    return found


def assert_same_as_run(fn, *inputs, **options):
    """Assert that lowering without running gives the view of running. Returns its operators."""
    gm = source(fn, *inputs, **options)
    written = trace_view(gm, PredictedWrites(gm))
    assert lines(written) == lines(trace_view(gm, None))
    return [op for op, *_ in lines(written) if op != "placeholder"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_lowering_without_running_gives_the_same_view(dynamic):
    model = torch.nn.Sequential(*[Block() for _ in range(3)])
    assert len(assert_same_as_run(model, torch.randn(2, 3, 8), dynamic=dynamic)) == 33


def test_equal_arguments_differ_from_different_ones():
    assert_same_as_run(lambda x, y: (x * x) + (x * y) + (y * y), torch.randn(3), torch.randn(3))


INDICES = {
    "whole and part": (lambda x: x[:, 0:4], 1),
    # of [4, 5] the part is no operator, but that is not the result's doing
    "row and part": (lambda x: x[0, 0:4], 2),
    "row and all": (lambda x: x[0, 0:8], 1),
    "new dimensions": (lambda x: x[:, None, :, None], 2),
    "twice": (lambda x: x[:, None, 0:2] + x[:, None, 0:2], 5),
    "mask of one": (lambda x: x[True], 4),
    "tensors": (lambda x: x[torch.arange(3), torch.arange(3)], 3),
    "ellipsis": (lambda x: x[..., 2:], 1),
    "parts": (lambda x: x.split(4, 1)[1] + x.chunk(2, 1)[0], 7),
    "number and minus zero": (lambda x: F.tanhshrink(x * 0.0) + F.tanhshrink(x * -0.0), 7),
    "constant": (lambda x: x + torch.zeros(8) + torch.full((8,), 2.0), 4),
    "argument itself": (lambda x: x.contiguous() + x.to(x.dtype).float(), 3),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_an_operator_does_not_get_the_result_of_the_next(name, dynamic):
    f, operators = INDICES[name]
    found = assert_same_as_run(f, torch.randn(3, 8), dynamic=dynamic)
    assert dynamic or len(found) == operators, found


@torch._dynamo.allow_in_graph
def looks_at_its_first_operator(x):
    """The call's result has the shape at which the function would have stopped."""
    y = x.sum(0, keepdim=True)
    return y if y.dim() == 1 else y.squeeze(0)


def test_functions_of_the_user_may_look_at_their_values():
    assert (
        len(assert_same_as_run(lambda x: looks_at_its_first_operator(x) * 2, torch.randn(3, 4)))
        == 3
    )


def in_place_root(x):
    y = x.sin()
    z = y.view(-1)
    y.mul_(2)
    return z + x.cos().view(-1)


def in_place_argument(x):
    x.add_(1)
    return x.view(-1) * 2


def in_place_part(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y += 1
    return F.relu(y, inplace=True) + x.exp()


def test_a_tensor_that_is_moved_to_other_memory_has_everything_run():
    def f(x):
        y = x.sin()
        v = y.view(-1)
        y.mul_(2)
        y.set_(x.cos())
        return v + y

    gm = source(f, torch.randn(3))
    assert PredictedWrites(gm).touched == set(gm.graph.nodes)
    assert_same_as_run(f, torch.randn(3))


@pytest.mark.parametrize("f", [in_place_root, in_place_argument, in_place_part])
def test_where_memory_is_written_calls_are_run(f, monkeypatch):
    """The graph is traced once. Calls that touch no written memory are lowered without running."""
    used = []
    real = capture_module.trace_view
    monkeypatch.setattr(
        capture_module, "trace_view", lambda gm, written: used.append(written) or real(gm, written)
    )
    gm = source(f, torch.randn(3, 4))
    assert len(used) == 1 and used[0].touched < set(gm.graph.nodes)
    view = real(gm, used[0])
    assert lines(view) == lines(real(gm, None))
    assert aliases(view, used[0].touched) == aliases(real(gm, None), used[0].touched)


def aliases(view, among):
    """Which tensors of some Dynamo nodes share memory, by number."""
    first: dict = {}
    nodes = [
        n
        for n in view.graph.nodes
        if view.owner.get(n) in among and isinstance(n.meta.get("val"), torch.Tensor)
    ]
    return [
        first.setdefault(n.meta["val"].untyped_storage()._cdata, i) for i, n in enumerate(nodes)
    ]


def test_a_write_that_is_not_predicted_has_everything_run(monkeypatch):
    used = []
    real = capture_module.trace_view
    monkeypatch.setattr(
        capture_module, "trace_view", lambda gm, written: used.append(written) or real(gm, written)
    )

    def f(x):
        y = x.sin()
        F.relu(y, True)
        return y + 1

    collect(f, torch.randn(3))
    assert len(used) == 2 and used[-1] is None


def test_what_cannot_be_lowered_is_copied_with_a_reason():
    def f(x):
        return F.layer_norm(torch.func.vmap(torch.sin)(x), (4,))

    report = assert_fuses(f, torch.randn(3, 4), pattern="layer_norm")
    assert any("vmap" in why for why in report.graphs[0].copied.values()), report.graphs[0].copied


def test_a_tensor_of_one_number_is_an_operator():
    def f(x):
        numbers = torch.tensor(True), torch.tensor(-3), torch.as_tensor(0.1), x.new_tensor(2.5)
        half, lists = (
            torch.tensor(0.1, dtype=torch.float16),
            torch.tensor([1, 2]) + torch.tensor(1e39),
        )
        return *(x * n for n in numbers), half, lists, torch.tensor(-math.inf)

    gm = source(f, torch.randn(2))
    view = trace_view(gm, PredictedWrites(gm))
    full = [n for n in view.graph.nodes if n.target is torch.ops.aten.full.default]
    assert [n.args[1] for n in full] == [True, -3, 0.1, 2.5, 0.1, -math.inf]
    made = [view.owner[n].meta["example_value"] for n in full]
    assert [n.meta["val"].dtype for n in full] == [t.dtype for t in made]
    assert len(view.copied) == 2  # the list, and what is infinity to torch.tensor alone
    assert all(why.endswith("bakes a constant in") for why in view.copied.values())


def test_the_same_code_under_no_grad_is_another_value():
    """(x + y) without a gradient must not stand in for (x + y) with one."""

    def f(x, y, z):
        with torch.no_grad():
            s = x + y
        return s * z, (x + y) * z

    x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
    report = assert_fuses(f, x, y, z, pattern="add_mul")
    assert any("change of grad mode" in s.reason for s in report.sites if not s.fused), str(report)


def test_a_module_that_is_made_on_the_way_changes_no_state():
    """PyTorch counts how many are made, by a call that Dynamo keeps."""

    def f(x, target):
        logits = x.bfloat16().float()
        return torch.nn.CrossEntropyLoss()(logits.view(-1, 8), target)

    x, target = torch.randn(2, 3, 8, requires_grad=True), torch.arange(6)
    report = assert_fuses(f, x, target, pattern="cross_entropy")
    assert len(report.sites) == 1 and [g.error for g in report.graphs] == [None], str(report)


def test_an_operator_that_autocast_changes_otherwise_is_not_fused(monkeypatch):
    """What no cast expresses: here the sum counts as such."""
    monkeypatch.setattr(
        autocast, "remembered_casts", lambda op, *_: None if op == aten.add.Tensor else {}
    )
    with torch.autocast("cpu", torch.bfloat16):
        report = collect(lambda x, y: (x + y) * 1.5, torch.ones(4), torch.ones(4)).report
    assert [g.error for g in report.graphs] == [None] and not report.fused, report


def test_operators_that_refuse_are_not_logged():
    """The casts of a product are found by running it on two dtypes."""
    records, logger = [], logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            collect(
                lambda x, y: F.layer_norm(x @ y, (4,)), torch.ones(2, 4, 4), torch.ones(2, 4, 4)
            )
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def test_autocast_writes_the_casts_on_the_inputs():
    def f(x, w1, w2):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.sigmoid(F.linear(x, w1)) * F.linear(x, w2)

    x, w1, w2 = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4)
    collector = collect(f, x, w1, w2)
    assert [s.pattern for s in collector.report.fused] == ["gated_linear"], str(collector.report)
    (node,) = [n for n in collector.graphs[0].graph.nodes if str(n.target).startswith("fusion.")]
    assert {a.meta["example_value"].dtype for a in node.all_input_nodes} == {torch.bfloat16}
    torch.testing.assert_close(collector.graphs[0](x, w1, w2)[0], f(x, w1, w2))


@pytest.mark.parametrize("mask", [None, torch.randn(6, 6)], ids=["no mask", "fp32 mask"])
def test_autocast_does_not_take_the_casts_inside_attention_for_its_own(mask):
    """With dropout attention of bf16 computes in fp32 on CPU; autocast casts the mask only."""

    def f(q, mask):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, q * 2, q + 1, mask, dropout_p=0.5)

    report = collect(f, torch.randn(2, 4, 6, 8, dtype=torch.bfloat16), mask).report
    assert [s.pattern for s in report.sites] == ["attention"], str(report)


def test_a_value_that_autocast_casts_for_two_products_is_their_argument():
    def f(x, w1, w2):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.rms_norm(x, (4,)).type_as(x)
            return F.gelu(F.linear(y, w1)) * F.linear(y, w2)

    assert_fuses(f, torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4), pattern="gated_linear")


def test_sites_in_two_bodies_have_nodes_of_their_own():
    def block(x, w):
        return F.layer_norm(x, (4,), w) * 2

    def f(x, w):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False)
        return x

    report = assert_fuses(
        f, torch.randn(3, 4, requires_grad=True), torch.randn(4), pattern="layer_norm", count=2
    )
    assert len({s.nodes for s in report.sites if s.pattern == "layer_norm"}) == 2


def test_what_could_not_be_lowered_has_written_nothing():
    """A write to the whole, x[..., :1] = 0 on one column, is taken back and copied: later readers
    read x.
    """

    def fn(x):
        t = x.amax(-1, keepdim=True)
        y = x / t
        t[..., :1] = 0
        return y, t

    x = torch.rand(7, 10) + 1
    torch.testing.assert_close(
        torch.compile(fn, backend=Collector({"fusion.gate": "always"}))(x), fn(x)
    )


def read_of_data(x, average):
    return F.layer_norm(x.data + x, (8,), average)


def moving_average(x, average):
    average.data.mul_(0.9).add_(x.detach().mean(0))
    return F.layer_norm(x.exp(), (8,), average)


def argument_kept_for_backward(x, average):
    h = x + 1
    y = F.layer_norm(h + x, (8,), average)
    h.data.mul_(3)
    return y * h


@pytest.mark.parametrize(
    "fn, fused",
    [
        (read_of_data, "add_layer_norm"),
        (moving_average, "layer_norm"),
        (argument_kept_for_backward, "layer_norm"),
    ],
)
def test_data_is_a_name_for_the_same_memory(eager_kernels, fn, fused):
    """Autograd does not see what is written to it; the pass does."""
    found = []
    for how in ({}, {"backend": "fusion", "options": {"fusion.gate": "always"}}):
        torch.compiler.reset()
        x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
        average = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        y = torch.compile(fn, **how)(x, average)
        y.sin().sum().backward()
        found.append((y.detach(), average.detach(), x.grad))
    assert [s.pattern for s in fusion_backend.report().fused] == [fused]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_symbolic_sizes_that_a_call_reads_first_which_cannot_be_lowered():
    """The write of a number is copied, after a trial that has made nodes of the sizes."""

    def f(x, w):
        y = x @ w
        y[:, 0] = 0
        return torch.softmax(y, -1)

    report = collect(f, torch.randn(8, 16), torch.randn(16, 16), dynamic=True).report
    assert [s.pattern for s in report.fused] == ["softmax"]
