"""Which sites are measured, in which order, and which are not."""

import contextlib
import math
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.measure import agree, likeness, measuring
from fusion_backend.measure import judge as judging
from fusion_backend.measure import store as stored
from fusion_backend.measure.allowance import Allowance, seconds_for
from fusion_backend.options import Options
from tests.measured_cases import (
    Answers,
    Block,
    as_on_a_gpu,
    decided,
    long_norm,
    norm,
    refused_by_the_tables,
    told,
)


def test_when_the_time_is_used_up_only_a_bound_decides(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        measuring.ALLOWANCE.spend(20)
        ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
    assert not fused and "the 20 s of fusion.measure_s are used up" in reason


@pytest.mark.parametrize(
    "scale, cap, taken", [(1.0, None, True), (0.125, None, False), (0.125, 50.0, True)]
)
def test_a_bound_is_not_enough_where_inductor_replaces_the_site(
    scale, cap, taken, monkeypatch, tmp_path
):
    """Attention by hand with a mask of which nothing is known: of scaled scores Inductor makes one
    call, too, but not of T5's, which are not scaled, and not of Gemma 2's, which are capped.
    """

    def attention(q, mask):
        scores = q @ q.mT
        scores = scores if scale == 1.0 else scores * scale
        scores = (torch.tanh(scores / cap) * cap if cap else scores) + mask
        return torch.softmax(scores, -1) @ q

    q, mask = torch.randn(8, 16, 512, 128).bfloat16(), torch.randn(8, 1, 1, 512).bfloat16()
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        measuring.ALLOWANCE.spend(20)
        ((_, fused, reason),) = told(decided(attention, q, mask, measure_s=20), "attention")
    assert fused == taken and reason.endswith("are used up"), reason


def test_what_is_left_must_do_for_a_class_like_those_before(monkeypatch, tmp_path):
    allowance = Allowance()
    options = Options(measure_s=20)
    assert allowance.left(options) == 20
    allowance.spend(12)
    assert allowance.left(options) == 0.0
    assert allowance.left(Options(gate="measure")) == math.inf


@pytest.mark.parametrize(
    "trains, each, classes", [(False, 4, 3), (False, 6, 2), (True, 8, 3), (True, 11, 2)]
)
def test_a_graph_may_take_a_part_of_the_time(trains, each, classes, monkeypatch, tmp_path):
    """Of 40 seconds 10, or 20 in training, and the rest of the class with which it exceeds them.
    The next graph has its own. In inference parameters have a gradient that nobody asks for.
    """
    now = [0.0]

    def takes_long(chosen):
        now[0] += each
        return 2.0

    def norms(*lengths):
        xs = [torch.randn(n, 65536, requires_grad=True) for n in lengths]
        with torch.set_grad_enabled(trains):
            return decided(lambda *xs: [norm(x) for x in xs], *xs, measure_s=40)

    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    with as_on_a_gpu(monkeypatch, tmp_path, takes_long):
        first, second = norms(64, 56, 48), norms(40)
    assert first.measured == classes and second.measured == 1
    left = [why for _, fused, why in told(first, "layer_norm") if not fused]
    part = f"the {20 if trains else 10} s of fusion.measure_s for a graph of this size are used up"
    assert len(left) == 3 - classes and all(part in why for why in left)


@pytest.mark.parametrize(
    "nodes, trains, seconds",
    [(10, False, 5), (10, True, 10), (1360, True, 16), (5600, False, 16), (9000, True, 20)],
)
def test_a_larger_graph_may_take_more_of_the_time(nodes, trains, seconds):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for _ in range(nodes):
        x = graph.call_function(torch.sin, (x,))
    view = types.SimpleNamespace(graph=graph)
    facts = types.SimpleNamespace(view=view, training=lambda match: trains)
    gate = types.SimpleNamespace(facts=facts, found=[types.SimpleNamespace(match=None)])
    assert seconds_for([gate], Options(measure_s=20)) == pytest.approx(seconds)
    assert seconds_for([gate], Options(measure_s=5)) == pytest.approx(seconds / 4)


def test_layers_that_are_alike_are_measured_once(monkeypatch, tmp_path):
    blocks = nn.Sequential(*(Block(512) for _ in range(4)))
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        record = decided(blocks, torch.randn(16, 256, 512), gate="measure", skip=("norm_linear",))
    fused = [s for s in record.sites if s.fused]
    assert len(fused) >= 12 and record.measured <= 6


def test_after_a_refusal_the_smaller_pattern_has_its_turn(monkeypatch, tmp_path):
    def fn(x, y):
        h = x + y
        return F.layer_norm(h, (4096,)), h

    with as_on_a_gpu(monkeypatch, tmp_path, Answers(add_layer_norm=0.9, layer_norm=1.4)):
        record = decided(fn, torch.randn(64, 4096), torch.randn(64, 4096), gate="measure")
    assert [s.pattern for s in record.sites if s.fused] == ["layer_norm"]


def test_what_the_tables_refuse_is_measured_after_what_they_accept(monkeypatch, tmp_path):
    def fn(x, y):
        return refused_by_the_tables(x), norm(y) if y.shape[-1] > 4096 else y

    x = torch.randn(65536, 1024)  # more bytes than the other
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5) as stub:
        record = decided(fn, x, long_norm(), measure_s=20)
        assert [fused for _, fused, _ in told(record, "layer_norm")] == [True, True]
        (first, *_) = stub.replaced
        assert first[0].match.roots[0].meta["val"].shape == (64, 65536)
        measuring.ALLOWANCE.spend(20)
        stored.store().clear()
        record = decided(refused_by_the_tables, x, measure_s=20)
        table = decided(refused_by_the_tables, x, gate="table")
    ((_, fused, reason),) = told(record, "layer_norm")
    assert not fused and reason.startswith(told(table, "layer_norm")[0][2])
    assert reason.endswith("used up")


def test_a_small_part_of_a_graph_is_not_measured(monkeypatch, tmp_path):
    """Nor counted as slow: the bound decides."""

    def fn(x, y, w):
        return norm(x), F.layer_norm(y @ w, (4096,))

    with torch.device("meta"):
        x, y, w = torch.randn(64, 4096), torch.randn(16384, 4096), torch.randn(4096, 4096)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5) as stub:
        record = decided(fn, x, y, w, measure_s=20)
        large, small = told(record, "layer_norm")  # what is fused comes first
        assert not small[1] and "less than a hundredth of the graph" in small[2] and large[1]
        assert len(stub.asked) == 1
        record = decided(fn, x, y, w, gate="measure")
        assert all(fused for _, fused, _ in told(record, "layer_norm"))


@pytest.mark.parametrize("ratio, others", [(1.5, False), (0.9, False), (1.5, True)])
def test_a_small_part_is_decided_as_what_is_equal_but_for_its_neighbours(
    ratio, others, monkeypatch, tmp_path
):
    """A last layer, where another operator reads the result. others: another length of rows."""
    n = 4096

    def fn(x, last, w):
        for _ in range(3):
            x = F.layer_norm(x, (n,)) @ w
        return x, F.layer_norm(last, (last.shape[-1],)).sin()

    x, w = torch.randn(1024, n), torch.randn(n, n)
    monkeypatch.setattr(judging, "SMALL", 0.1)  # the last one's share lies below, theirs above
    monkeypatch.setattr(judging, "ALIKE", 0.1)
    last = torch.randn(512, 2 * n) if others else x
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: ratio) as stub:
        record = decided(fn, x, last, w, measure_s=20, only=("layer_norm",))
        assert len(stub.asked) == 1
    found = [(s.fused, s.reason) for s in record.sites]
    taken = ratio > 1 and not others
    assert [fused for fused, _ in found].count(True) == (4 if taken else 3 if ratio > 1 else 0)
    assert any("like another site of this graph: " in why for _, why in found) == taken


@pytest.mark.parametrize("alone", [1.5, 0.7])
def test_beside_a_product_that_lost_other_sites_are_timed_without_it(alone, monkeypatch, tmp_path):
    """It takes most of the time of the region, in which what a norm gains is not seen. What they
    then gain, or lose, decides.
    """

    def fn(x, r, w1, w2):
        return F.layer_norm(F.silu(x @ w1) * (x @ w2) + r, (1024,)) @ w2.T

    seen = []

    def ratio(chosen):
        seen.append(sorted(d.match.pattern.name for d in chosen))
        return alone if seen[-1] == ["layer_norm"] else 1.0

    weights = (torch.randn(256, 1024, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    x, r = torch.randn(2048, 256).bfloat16(), torch.randn(2048, 1024).bfloat16()
    with as_on_a_gpu(monkeypatch, tmp_path, ratio):
        record = decided(fn, x, r, *weights, measure_s=20, only=("layer_norm", "gated_linear"))
    # by itself the norm is timed in a region without the product only
    assert seen[:3] == [["gated_linear", "layer_norm"], ["gated_linear"], ["layer_norm"]]
    assert seen[3:] == [["layer_norm"]] * (alone < 1)  # the other half of it
    ((_, fused, reason),) = told(record, "layer_norm")
    assert fused == (alone > 1) and "measured today" in reason
    ((_, fused, reason),) = told(record, "gated_linear")
    assert not fused and reason.startswith("left to Inductor: 1.00 times as fast in its region")


def test_what_was_not_measured_has_not_lost(monkeypatch, tmp_path):
    """The tables refuse the attention, and take the softmax inside of it."""

    def fn(q, mask):
        scores = (q @ q.transpose(-2, -1) * 0.125).masked_fill(mask, -1e9)
        return torch.softmax(scores, -1) @ q

    q = torch.randn(1, 1, 8192, 64, dtype=torch.bfloat16)
    inputs = q, torch.rand(1, 1, 8192, 8192) < 0.5
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0):
        table = told(decided(fn, *inputs, gate="table"), "softmax")
        assert table[0][1]
        decided(norm, long_norm())  # the store is not empty
        assert told(decided(fn, *inputs, measure_s=0), "softmax") == table
        ((_, fused, reason),) = told(decided(fn, *inputs, compiles=False), "softmax")
        assert fused and reason.endswith("it will be measured when it is compiled")


def test_what_is_small_in_one_graph_is_measured_in_another(monkeypatch, tmp_path):
    """The ranks share what was measured, and not what a graph makes of it."""

    def beside(x, y, w):
        return norm(x), F.layer_norm(y @ w, (4096,))

    with torch.device("meta"):  # the product would take a CPU half a minute
        x, y, w = torch.randn(64, 65536), torch.randn(65536, 8192), torch.randn(8192, 4096)
    shared = torch.distributed.HashStore()
    monkeypatch.setattr(agree, "default_store", lambda: (shared, 0))
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        first = told(decided(beside, x, y, w, only=("layer_norm",)), "layer_norm")
        assert any("hundredth" in reason for _, _, reason in first)
        assert told(decided(norm, x), "layer_norm")[0][1]


def test_a_smaller_form_of_what_lost_is_not_tried(monkeypatch, tmp_path):
    def fn(x, w):
        wide = x.float()
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * y.to(x.dtype)

    x, w = torch.randn(16384, 4096, dtype=torch.bfloat16), torch.randn(4096, dtype=torch.bfloat16)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.9) as stub:
        record = decided(fn, x, w, gate="measure", only=("rms_norm",))
    assert stub.asked == [["rms_norm"]]
    assert not any(s.fused for s in record.sites)


def test_a_softmax_inside_of_attention_that_lost_is_not_tried(monkeypatch, tmp_path):
    """Inductor replaces such attention as a whole."""

    def fn(q, k, v, mask):
        scores = (q @ k.transpose(-2, -1) * 0.125).masked_fill(mask, -1e9)
        return torch.softmax(scores, -1) @ v

    q = torch.randn(4, 8, 1024, 64, dtype=torch.bfloat16)
    mask = torch.rand(1, 1, 1024, 1024) < 0.5
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(attention=0.7)) as stub:
        record = decided(fn, q, q, q, mask, gate="measure")
    assert stub.asked == [["attention"]]
    (softmax,) = [s for s in record.sites if s.pattern == "softmax"]
    assert not softmax.fused and softmax.reason == told(record, "attention")[0][2]

    def loss(x, w, y):
        return F.cross_entropy(F.linear(x, w), y)

    # with library calls on one side alone, a part may win
    x, w = torch.randn(4096, 512), torch.randn(32000, 512)
    ratios = Answers(linear_cross_entropy=0.9, cross_entropy=1.4)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub:
        record = decided(loss, x, w, torch.randint(0, 32000, (4096,)), gate="measure")
    assert stub.asked == [["linear_cross_entropy"], ["cross_entropy"]]
    assert told(record, "cross_entropy")[0][1]


def gated(x, w1, w2):
    return F.silu(x @ w1) * (x @ w2)


def feed_forward(x, w1, w2):
    return F.linear(F.silu(x @ w1), w2)


def with_dropout(x, w1, w2):
    return F.linear(F.dropout(F.silu(x @ w1), 0.1, False), w2)


def with_a_view(x, w1, w2):
    return F.linear(F.silu(x @ w1).reshape(-1, 1024), w2)


def products():
    weights = (torch.randn(256, 1024, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    return torch.randn(2048, 256, dtype=torch.bfloat16), *weights


LARGER = {gated: "gated_linear", feed_forward: "mlp", with_dropout: "mlp", with_a_view: "mlp"}


@pytest.mark.parametrize("fn", LARGER)
def test_half_of_a_gate_that_lost_is_not_tried(fn, monkeypatch, tmp_path):
    """Inductor multiplies the products and computes the activation in one kernel. In front of
    another linear layer it writes the activated values to memory.
    """
    ratios = Answers(gated_linear=0.9, mlp=0.9, linear_act=1.2)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub:
        decided(fn, *products(), gate="measure")
    assert stub.asked[0] == [LARGER[fn]]
    assert (["linear_act"] in stub.asked) == (fn is not gated)


@pytest.mark.parametrize("whole", [1.1, RuntimeError("out of registers")])
def test_half_of_a_gate_is_taken_where_it_is_faster_or_the_whole_fails(
    whole, monkeypatch, tmp_path
):
    ratios = Answers(gated_linear=whole, linear_act=1.3)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = decided(gated, *products(), gate="measure")
    assert [s.pattern for s in record.sites if s.fused] == ["linear_act"]


@pytest.mark.parametrize(
    "together, product", [(0.97, 1.1), ((0.45, 1.02), (0.45, 1.02)), (0.97, (0.45, 1.02))]
)
def test_unless_the_product_certainly_lost_the_others_are_tried_beside_it(
    together, product, monkeypatch, tmp_path
):
    """Otherwise the judge would not ask for them again."""

    def fn(x, r, w1, w2):
        return F.layer_norm(F.silu(x @ w1) * (x @ w2) + r, (1024,)) @ w2.T

    ratios = Answers(gated_linear_layer_norm=together, gated_linear=product, layer_norm=1.3)
    x, *weights = products()
    with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub:
        names = ("layer_norm", "gated_linear")
        record = decided(fn, x, torch.randn(2048, 1024).bfloat16(), *weights, only=names)
    assert ["layer_norm"] in stub.asked[1:3]
    ((_, fused, _),) = told(record, "layer_norm")
    assert fused


def layers(x, last, w):
    for _ in range(4):
        x = (norm(x) * torch.softmax(x @ w, -1)) @ w
    return x, last(x, x @ w)


def normed(x, y):
    return norm(x) * torch.softmax(y, -1)


BOTH = ["layer_norm", "softmax"]
# The end of a graph of `layers`, and what is measured for it after the four layers if all wins.
LASTS = {
    "the same sites": (lambda x, y: normed(x, y).sin(), []),
    "in another order": (lambda x, y: torch.softmax(y, -1).sin() * norm(x), []),
    "and a small one": (lambda x, y: norm(normed(x, y)[:32].sin()), []),
    "and one that is not small": (
        lambda x, y: norm(normed(x, y)).sin(),
        ["layer_norm", "layer_norm", "softmax"],
    ),
    "one of them": (lambda x, y: norm(x).sin() * y, ["layer_norm"]),
    "of other shapes": (
        lambda x, y: normed(x[:, :3072], y[:, :3072]).sin(),
        ["layer_norm", "softmax"],
    ),
}


@pytest.mark.parametrize("last", LASTS)
def test_a_part_below_a_twentieth_is_decided_as_equal_sites(last, monkeypatch, tmp_path):
    x, w = torch.randn(256, 4096), torch.randn(4096, 4096)
    end, measured = LASTS[last]
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5) as stub:
        record = decided(layers, x, end, w, measure_s=20, only=(*BOTH,))
    assert [*map(sorted, stub.asked)] == ([BOTH, measured] if measured else [BOTH])
    alike = [s for s in record.sites if "like another site of this graph: 1.0" in s.reason]
    assert len(alike) == (0 if measured else 2)
    assert all(s.fused and s.reason.endswith("there with its neighbours, measured today")
               for s in alike)  # fmt: skip
    assert all(s.fused != ("less than a hundredth" in s.reason) for s in record.sites)


def test_what_is_equal_to_sites_that_lost_is_measured(monkeypatch, tmp_path):
    x, w = torch.randn(256, 4096), torch.randn(4096, 4096)
    end, _ = LASTS["the same sites"]
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.9) as stub:
        record = decided(layers, x, end, w, measure_s=20, only=(*BOTH,))
    assert stub.asked.count(BOTH) == 2 and not any(s.fused for s in record.sites)


def test_a_site_is_left_as_its_equal_was(monkeypatch, tmp_path):
    """The region gains more without its softmax."""
    x, w = torch.randn(256, 4096), torch.randn(4096, 4096)
    end, _ = LASTS["the same sites"]
    ratios = Answers(layer_norm_softmax=1.2, layer_norm=1.5)
    monkeypatch.setattr(measuring, "has_kernels", lambda d: d.match.pattern.name == "softmax")
    with as_on_a_gpu(monkeypatch, tmp_path, ratios):
        record = decided(layers, x, end, w, measure_s=20, only=(*BOTH,))
    for s in record.sites:
        assert s.fused == (s.pattern == "layer_norm"), s
    (left,) = [s for s in record.sites if "like another" in s.reason and not s.fused]
    assert "whose region is faster with its other sites alone" in left.reason


def test_a_group_counts_as_a_whole_and_larger_ones_first(monkeypatch):
    monkeypatch.setattr(likeness, "likeness", lambda d: (d,))
    one, pair, twice = (tuple((name,) for name in names) for names in ("a", "ba", "aa"))
    assert likeness.alike("ab", [twice]) == {}
    for known in ([one, pair], [pair, one]):
        found = likeness.alike("acab", known)
        assert found == {3: (pair, 0), 0: (pair, 1), 2: (one, 0)}


@pytest.mark.parametrize("last, ahead", [("the same sites", []), ("one of them", ["layer_norm"])])
def test_no_code_is_generated_ahead_for_a_part_like_the_one_that_is_measured(
    last, ahead, monkeypatch, tmp_path
):
    begun = []

    def contest(cut, sites, until, had, meanwhile):
        meanwhile()
        return contextlib.nullcontext(stub)

    x, w = torch.randn(256, 4096), torch.randn(4096, 4096)
    with (
        as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5) as stub,
        monkeypatch.context() as m,  # undone before what as_on_a_gpu has patched
    ):
        m.setattr(measuring, "contest", contest)
        m.setattr(measuring, "Contest", lambda cut, sites, *more, **named: begun.append(sites))
        decided(layers, x, LASTS[last][0], w, measure_s=20, only=(*BOTH,))
    assert [d.match.pattern.name for sites in begun for d in sites] == ahead
