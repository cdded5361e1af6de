"""What a larger site covers is measured beside it, where the larger one has a matrix product that
Inductor leaves to the library.
"""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.measure import measuring
from tests.measured_cases import as_on_a_gpu, decided

# what each site gains where it stands, by its pattern
GAINS = dict(mlp=1.1, linear_act=1.1, gelu=1.05, layer_norm=1.05, add_layer_norm=1.1)


def layer(x, w, b):
    return F.gelu(F.linear(x, w, b))


def feed_forward(x, w, b, v):
    return F.linear(F.gelu(F.linear(x, w, b)), v)


def tensors(*shapes, grad=False):
    return [torch.randn(s, dtype=torch.bfloat16).requires_grad_(grad) for s in shapes]


@pytest.fixture
def one():
    return tensors((4096, 64), (4096, 64), (4096,))


@pytest.fixture
def two():
    return tensors((4096, 64), (4096, 64), (4096,), (64, 4096), grad=True)


def fused(record):
    return [s.pattern for s in record.sites if s.fused]


def gains(**changed):
    return lambda chosen: (GAINS | changed)[chosen[0].match.pattern.name]


def test_the_larger_one_is_taken_where_it_gains_more(monkeypatch, tmp_path, one):
    with as_on_a_gpu(monkeypatch, tmp_path, gains()) as stub:
        record = decided(layer, *one)
    assert fused(record) == ["linear_act"] and stub.asked == [["linear_act"], ["gelu"]]


def test_what_is_inside_of_it_is_taken_where_that_gains_more(monkeypatch, tmp_path, one):
    with as_on_a_gpu(monkeypatch, tmp_path, gains(gelu=1.2)) as stub:
        record = decided(layer, *one)
        assert fused(record) == ["gelu"]
        assert stub.asked == [["linear_act"], ["gelu"], ["gelu"]]  # the last where it stands alone
        (site,) = [s for s in record.sites if s.pattern == "linear_act"]
        assert "gelu inside of it gains more, 1.20 over 1.10" in site.reason
        stub.replaced.clear()
        assert fused(decided(layer, *one)) == ["gelu"] and not stub.asked


@pytest.mark.parametrize(
    "gate, spent, compile_s, refines",
    [("auto", 5, 0, False), ("measure", 5, 0, True), ("auto", 1, 0, True), ("auto", 1, 3, False)],
)
def test_after_a_fifth_of_the_time_nothing_better_is_looked_for(
    gate, spent, compile_s, refines, monkeypatch, tmp_path, one
):
    with as_on_a_gpu(monkeypatch, tmp_path, gains(gelu=1.2)) as stub:
        stub.compile_s = compile_s
        for seconds in (spent - 0.5, 0.5):
            measuring.ALLOWANCE.spend(seconds)
        record = decided(layer, *one, gate=gate, measure_s=20)
    assert fused(record) == (["gelu"] if refines else ["linear_act"])
    assert stub.asked[:2] == [["linear_act"], ["gelu"]][: 1 + refines]


def test_after_a_loss_what_is_inside_has_its_turn(monkeypatch, tmp_path, one):
    with as_on_a_gpu(monkeypatch, tmp_path, gains(linear_act=0.9)) as stub:
        assert fused(decided(layer, *one)) == ["gelu"]
    assert stub.asked == [["linear_act"], ["gelu"]]


def test_of_three_the_best_is_taken(monkeypatch, tmp_path, two):
    for better in ("mlp", "linear_act", "gelu"):
        with as_on_a_gpu(monkeypatch, tmp_path / better, gains(**{better: 1.3})) as stub:
            assert fused(decided(feed_forward, *two)) == [better]
            assert stub.asked[:3] == [["mlp"], ["linear_act"], ["gelu"]]


def test_between_products_that_lost_an_activation_may_still_win(monkeypatch, tmp_path, two):
    """Only a softmax between products is part of what Inductor may replace as a whole."""
    with as_on_a_gpu(monkeypatch, tmp_path, gains(mlp=0.9, linear_act=0.9)):
        assert fused(decided(feed_forward, *two)) == ["gelu"]


def test_without_a_product_nothing_else_is_tried(monkeypatch, tmp_path):
    def norm_of_sum(x, r, w, b):
        h = x + r
        return F.layer_norm(h, (4096,), w, b), h

    with as_on_a_gpu(monkeypatch, tmp_path, gains(layer_norm=1.5)) as stub:
        record = decided(norm_of_sum, *tensors((2048, 4096), (2048, 4096), (4096,), (4096,)))
    assert fused(record) == ["add_layer_norm"] and stub.asked == [["add_layer_norm"]]


def test_what_the_user_has_switched_off_is_no_rival(monkeypatch, tmp_path, one):
    with as_on_a_gpu(monkeypatch, tmp_path, gains(gelu=1.2)) as stub:
        assert fused(decided(layer, *one, skip=("gelu",))) == ["linear_act"]
    assert stub.asked == [["linear_act"]]


def test_what_inductor_computes_with_its_neighbours_is_tried_without_the_kernels(
    monkeypatch, tmp_path
):
    """A kernel of batch_norm in front of gelu moves all of it through memory once more."""
    norm = torch.nn.BatchNorm1d(1024).eval().bfloat16()

    def fn(x):
        return F.gelu(norm(x)).relu()

    def by_number(alone):
        return lambda chosen: {1: alone, 2: 1.1}[len(chosen)]

    x = torch.randn(4096, 1024, dtype=torch.bfloat16)
    for alone, kept in ((1.3, ["gelu"]), (1.05, ["batch_norm", "gelu"])):
        place = tmp_path / str(alone)
        with as_on_a_gpu(monkeypatch, place, by_number(alone)) as stub, torch.no_grad():
            assert fused(decided(fn, x)) == kept
        assert stub.asked == [["batch_norm", "gelu"], ["gelu"]]
    with as_on_a_gpu(monkeypatch, tmp_path / "late", by_number(1.3)) as stub, torch.no_grad():
        measuring.ALLOWANCE.spend(0.2 * 20 + 1)
        assert fused(decided(fn, x)) == ["batch_norm", "gelu"]
    assert stub.asked == [["batch_norm", "gelu"]]


@pytest.mark.parametrize("gate, searches", [("auto", False), ("measure", True)])
def test_after_half_of_the_time_sites_are_not_tried_one_by_one(
    gate, searches, monkeypatch, tmp_path
):
    norm = torch.nn.BatchNorm1d(1024).eval().bfloat16()

    def fn(x):
        return F.gelu(norm(x)).relu()

    def only_alone(chosen):
        return {"batch_norm": 1.0, "gelu": 1.3}[chosen[-1].match.pattern.name] - (len(chosen) - 1)

    x = torch.randn(4096, 1024, dtype=torch.bfloat16)
    for spent, tried in ((9, True), (11, searches)):
        place = tmp_path / f"{gate}{spent}"
        with as_on_a_gpu(monkeypatch, place, only_alone) as stub, torch.no_grad():
            measuring.ALLOWANCE.spend(1)
            measuring.ALLOWANCE.spend(spent - 1)
            record = decided(fn, x, gate=gate, measure_s=20)
        assert stub.asked[0] == ["batch_norm", "gelu"]
        assert (stub.asked[1:3] == [["batch_norm"], ["gelu"]]) == tried
        assert fused(record) == (["gelu"] if tried else [])


@pytest.mark.parametrize(
    "gate, seconds, tried", [("auto", 4, 2), ("auto", 6, 0), ("measure", 6, 2)]
)
def test_after_the_time_of_a_graph_sites_are_not_tried_one_by_one(
    gate, seconds, tried, monkeypatch, tmp_path
):
    """A quarter of the 20 seconds, in inference."""
    norm, now = torch.nn.BatchNorm1d(1024).eval().bfloat16(), [0.0]

    def takes_long(chosen):
        now[0] += seconds if len(chosen) == 2 else 0.1
        return 0.9

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    x = torch.randn(4096, 1024, dtype=torch.bfloat16)
    with as_on_a_gpu(monkeypatch, tmp_path, takes_long) as stub, torch.no_grad():
        decided(lambda x: F.gelu(norm(x)).relu(), x, gate=gate, measure_s=20)
    assert stub.asked == [["batch_norm", "gelu"], ["batch_norm"], ["gelu"]][: 1 + tried]


@pytest.mark.parametrize("spent, tried", [(9, True), (11, False)])
def test_after_half_of_the_time_the_other_half_is_not_tried(spent, tried, monkeypatch, tmp_path):
    """The forward by Inductor and the backward by the kernel, or both by kernels."""

    def norm(x):
        return F.layer_norm(x, (4096,))

    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.0) as stub:
        measuring.ALLOWANCE.spend(1)
        measuring.ALLOWANCE.spend(spent - 1)
        decided(norm, *tensors((4096, 4096), grad=True), measure_s=20)
    forwards = [chosen[0].forward for chosen in stub.replaced]
    assert len(forwards) == 1 + tried and len(set(forwards)) == 1 + tried


@pytest.mark.parametrize("together, tried", [(0.3, False), (0.6, True)])
def test_norms_that_take_twice_as_long_are_not_tried_one_by_one(
    together, tried, monkeypatch, tmp_path
):
    """Of queries and of keys, which Inductor computes in one kernel."""

    def fn(q, k):
        return (F.rms_norm(q, (128,)) + F.rms_norm(k, (128,))).relu()

    q, k = (torch.randn(65536, 128, dtype=torch.bfloat16) for _ in range(2))
    for gate in ("auto", "measure"):
        with as_on_a_gpu(monkeypatch, tmp_path / gate, lambda chosen: together) as stub:
            decided(fn, q, k, gate=gate, measure_s=20)
        assert stub.asked == [["rms_norm"] * 2] + [["rms_norm"]] * 2 * tried
