"""What the judge makes of measurements: proposed, measured, kept, told, and decided again."""

import contextlib
import dataclasses
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.compat.torch import inductor_config
from fusion_backend.decide import gate as gating
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.measure import agree, key, measuring
from fusion_backend.measure import judge as judging
from fusion_backend.measure import store as stored
from fusion_backend.measure.contest import Lost
from fusion_backend.measure.timing import Race, race
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import UNPROFITABLE, GraphRecord
from tests.measured_cases import Block, as_on_a_gpu


def decided(fn, *inputs, compiles=True, dynamic=None, **options) -> GraphRecord:
    record = GraphRecord(0)

    def backend(gm, example_inputs):
        fuse_graph(gm, Options(**options), record, usable(patterns()), compiles)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    assert record.error is None
    return record


def pattern(name):
    return next(p for p in patterns() if p.name == name)


def told(record, *names):
    return [
        (s.pattern, s.fused, s.reason) for s in record.sites if s.pattern in names and s.counted
    ]


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def long_norm():
    return torch.randn(64, 65536, dtype=torch.bfloat16)


def two_norms(x, y):
    return F.layer_norm(x, (4096,)) * torch.softmax(y, -1)


class Answers:
    """ratio_of for a stub: by the names of the sites that are replaced."""

    def __init__(self, **ratios):
        self.ratios = ratios

    def __call__(self, chosen):
        return self.ratios["_".join(sorted(d.match.pattern.name for d in chosen))]


def test_a_site_that_wins_in_context_is_fused_and_says_so(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0):
        (site,) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
    assert site == ("layer_norm", True, "1.000 ms, Inductor 2.000 ms here, measured today")


def test_a_site_that_is_fast_alone_and_loses_in_context_is_declined(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.94):
        record = decided(norm, long_norm(), measure_s=20)
    (site,) = [s for s in record.sites if s.counted]
    assert not site.fused and site.cause == UNPROFITABLE
    assert site.reason == "left to Inductor: 0.94 in context, measured today"
    assert record.measured == 1


def test_kernels_that_were_measured_are_not_compiled_besides(monkeypatch, tmp_path):
    compiled, tried_out = [], gating.Gate.tried_out

    def recorded(self, op, *args):
        compiled.append((op.name, args[-1]))
        return tried_out(self, op, *args)

    monkeypatch.setattr(gating.Gate, "tried_out", recorded)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0):
        for measured in (1, 0):  # then, from the store
            record = decided(norm, long_norm())
            assert told(record, "layer_norm")[0][1] and record.measured == measured
        assert compiled and not any(compiles for _, compiles in compiled)
        # whose class has no answer: as the tables say, with kernels that nobody has compiled
        longer = torch.randn(32, 65536, dtype=torch.bfloat16)
        record = decided(norm, longer, measure_s=0)
        assert told(record, "layer_norm")[0][1] and compiled[-1] == ("layer_norm", True)


def test_a_cpu_graph_is_decided_once(monkeypatch):
    """Its attention becomes a call of the library: no kernel waits for an answer."""
    rounds, decide_all = [], gating.Gate.decide_all
    monkeypatch.setattr(gating.Gate, "decide_all", lambda *a: rounds.append(1) or decide_all(*a))
    record = decided(Block(), torch.randn(2, 8, 16))
    assert [s.pattern for s in record.sites if s.fused] == ["attention"] and len(rounds) == 1


def test_what_is_as_fast_is_left_to_inductor(monkeypatch, tmp_path):
    for ratio in (1.004, 1.017):  # less than what tuning the rest anew can cost
        with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen, ratio=ratio: ratio):
            ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
            assert not fused and f"{ratio:.2f} in context" in reason
            assert stored.store().clear()


def test_noise_is_no_win(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: (0.4, 1.05)) as stub:
        ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
        assert not fused and "vary too much, 0.63 to 1.47" in reason
        assert stored.store().empty  # another process tries again
        assert stub.asked


def test_a_second_compilation_measures_nothing(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0) as stub:
        first = decided(norm, long_norm(), measure_s=20)
        stored.store_in.cache_clear()  # as in another process
        asked = len(stub.asked)
        for options in ({"measure_s": 20}, {}, {"gate": "measure"}):
            again = decided(norm, long_norm(), **options)
            assert told(again, "layer_norm") == told(first, "layer_norm")
            assert again.measured == 0 and len(stub.asked) == asked


def test_nothing_is_measured_where_nothing_is_compiled_or_asked(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        plain = told(decided(norm, long_norm(), measure_s=0), "layer_norm")
        assert told(decided(norm, long_norm(), gate="table"), "layer_norm") == plain
        decided(norm, long_norm(), gate="always")
        decided(norm, long_norm(), gate="never", measure_s=20)
        ((_, fused, reason),) = told(
            decided(norm, long_norm(), compiles=False, measure_s=20), "layer_norm"
        )
    assert fused and plain[0][1]


def test_what_the_tables_refuse_is_not_fused_where_nobody_judges_it(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        monkeypatch.setattr(judging, "on_gpu", lambda d: False)
        record = decided(refused_by_the_tables, torch.randn(16384, 1024))
        table = decided(refused_by_the_tables, torch.randn(16384, 1024), gate="table")
    assert told(record, "layer_norm") == told(table, "layer_norm")
    assert not told(record, "layer_norm")[0][1]


def test_answers_that_ship_come_after_those_of_this_user_and_alone_under_the_table(
    monkeypatch, tmp_path
):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.5):
        decided(norm, long_norm(), measure_s=20)
        (mine,) = stored.store().all()
        shipped = dataclasses.replace(
            mine, take=("kernel/None",), ratio=2.0, verdict="faster", seed=True
        )
        monkeypatch.setattr(stored, "seed", lambda: {mine.key: shipped})
        assert not told(decided(norm, long_norm()), "layer_norm")[0][1]
        ((_, fused, reason),) = told(decided(norm, long_norm(), gate="table"), "layer_norm")
        assert fused and reason.endswith("measured on an NVIDIA H200")
        stored.store().clear()
        assert told(decided(norm, long_norm()), "layer_norm")[0][1]


def test_explain_says_what_a_compilation_would_measure(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        record = decided(norm, long_norm(), compiles=False, measure_s=20)
        ((_, fused, reason),) = told(record, "layer_norm")
    assert fused and reason.endswith("it will be measured when it is compiled")


def test_what_cannot_be_kept_is_told_once(monkeypatch, tmp_path):
    (tmp_path / "fusion").write_text("")  # where the folder would be
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0):
        with pytest.warns(RuntimeWarning, match="forgotten when this process ends"):
            record = decided(norm, long_norm(), measure_s=20)
        assert told(record, "layer_norm")[0][1]
        assert decided(norm, long_norm(), measure_s=20).measured == 0


def test_the_table_ignores_what_this_user_has_measured(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.5):
        decided(norm, long_norm(), measure_s=20)
        assert told(decided(norm, long_norm(), gate="table"), "layer_norm")[0][1]
        assert not told(decided(norm, long_norm()), "layer_norm")[0][1]


def test_without_a_gpu_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(stored, "store", lambda: pytest.fail("asked"))
    record = decided(norm, torch.randn(4, 16), gate="table")
    assert record.measured == 0


def test_when_the_time_is_used_up_only_a_bound_decides(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        measuring.ALLOWANCE.spend(20)
        ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
    assert not fused and "the 20 s of fusion.measure_s are used up" in reason


def test_what_is_left_must_do_for_a_class_like_those_before(monkeypatch, tmp_path):
    allowance = measuring.Allowance()
    options = Options(measure_s=20)
    assert allowance.left(options) == 20
    allowance.spend(12)
    assert allowance.left(options) == 0.0
    assert allowance.left(Options(gate="measure")) == math.inf


def test_sites_of_one_region_are_decided_together(monkeypatch, tmp_path):
    inputs = torch.randn(64, 4096), torch.randn(64, 4096)
    ratios = Answers(layer_norm_softmax=0.9, layer_norm=0.8, softmax=1.2)
    with as_on_a_gpu(monkeypatch, tmp_path, ratios) as stub:
        record = decided(two_norms, *inputs, gate="measure")
    found = {s.pattern: s.fused for s in record.sites if s.counted}
    assert found == {"layer_norm": False, "softmax": True}
    assert [*map(sorted, stub.asked)] == [["layer_norm", "softmax"], ["layer_norm"], ["softmax"]]
    (reason,) = [s.reason for s in record.sites if s.fused]
    assert "here with its neighbours, measured today" in reason


def test_all_of_a_region_are_taken_where_all_win(monkeypatch, tmp_path):
    inputs = torch.randn(64, 4096), torch.randn(64, 4096)
    with as_on_a_gpu(monkeypatch, tmp_path, Answers(layer_norm_softmax=1.3)) as stub:
        record = decided(two_norms, *inputs, gate="measure")
    assert all(s.fused for s in record.sites if s.counted) and len(stub.asked) == 1


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


def refused_by_the_tables(x):
    return F.relu(x.sin()).square() * F.layer_norm(x * 2, (1024,))


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

    x, y = torch.randn(64, 4096), torch.randn(16384, 4096)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5) as stub:
        record = decided(fn, x, y, torch.randn(4096, 4096), measure_s=20)
        large, small = told(record, "layer_norm")  # what is fused comes first
        assert not small[1] and "less than a hundredth of the graph" in small[2] and large[1]
        assert len(stub.asked) == 1
        record = decided(fn, x, y, torch.randn(4096, 4096), gate="measure")
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
    last = torch.randn(512, 2 * n) if others else x
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: ratio) as stub:
        record = decided(fn, x, last, w, measure_s=20, only=("layer_norm",))
        assert len(stub.asked) == 1
    found = [(s.fused, s.reason) for s in record.sites]
    taken = ratio > 1 and not others
    assert [fused for fused, _ in found].count(True) == (4 if taken else 3 if ratio > 1 else 0)
    assert any("as another one in this graph: " in why for _, why in found) == taken


def test_beside_a_product_that_lost_other_sites_are_timed_without_it(monkeypatch, tmp_path):
    """It takes most of the time of the region, in which what a norm gains is not seen."""

    def fn(x, r, w1, w2):
        return F.layer_norm(F.silu(x @ w1) * (x @ w2) + r, (1024,)) @ w2.T

    seen = []

    def ratio(chosen):
        seen.append(sorted(d.match.pattern.name for d in chosen))
        return 1.5 if seen.count(["layer_norm"]) == 2 else 1.0  # the first time in their region

    weights = (torch.randn(256, 1024, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    x, r = torch.randn(2048, 256).bfloat16(), torch.randn(2048, 1024).bfloat16()
    with as_on_a_gpu(monkeypatch, tmp_path, ratio):
        record = decided(fn, x, r, *weights, measure_s=20, only=("layer_norm", "gated_linear"))
    assert seen[0] == ["gated_linear", "layer_norm"] and seen[-1] == ["layer_norm"]
    ((_, norm_fused, _),) = told(record, "layer_norm")
    ((_, gate_fused, reason),) = told(record, "gated_linear")
    assert norm_fused and not gate_fused and reason.startswith("left to Inductor: 1.00 in context")


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


def test_a_win_that_the_tables_did_not_expect_is_remembered(monkeypatch, tmp_path):
    fn = refused_by_the_tables
    x = torch.randn(16384, 1024)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5) as stub:
        assert told(decided(fn, x, gate="measure"), "layer_norm")[0][1]
        asked = len(stub.asked)
        ((_, fused, reason),) = told(decided(fn, x), "layer_norm")
        assert fused and "Inductor 1.500 ms here" in reason and len(stub.asked) == asked


def test_when_rounds_run_out_nothing_doubtful_is_fused(monkeypatch, tmp_path):
    fn = refused_by_the_tables
    x = torch.randn(16384, 1024)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        for rounds, fused in ((1, False), (8, True)):
            monkeypatch.setattr(judging, "MOST_ROUNDS", rounds)
            stored.store().clear()
            record = decided(fn, x, gate="measure")
            assert told(record, "layer_norm")[0][1] == fused


def test_a_fault_in_judging_leaves_everything_to_the_tables(monkeypatch, tmp_path):
    fn = refused_by_the_tables
    x = torch.randn(16384, 1024)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        table = decided(fn, x, gate="table")
        monkeypatch.setattr(judging, "regions", lambda *args: 1 / 0)
        with pytest.warns(RuntimeWarning, match="ZeroDivisionError.*please report this"):
            record = decided(fn, x, gate="measure")
    assert told(record, "layer_norm") == told(table, "layer_norm")
    assert any("ZeroDivisionError" in fault for fault in record.faults)


def test_answers_hold_for_one_gpu_one_version_and_one_code(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.5):
        assert not told(decided(norm, long_norm(), measure_s=20), "layer_norm")[0][1]
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0, gpu="NVIDIA H200 NVL"):
        assert told(decided(norm, long_norm(), measure_s=20), "layer_norm")[0][1]
    text, ops = "a region", [pattern("layer_norm")]
    first = key.digest(text, ops, "H200")
    assert first == key.digest(text, [*ops], "H200")
    assert first != key.digest(text + " ", ops, "H200")
    assert first != key.digest(text, ops, "L40S")
    assert first != key.digest(text, [pattern("rms_norm")], "H200")
    for name in ("torch_version", "triton_version"):
        with monkeypatch.context() as m:
            m.setattr(key, name, lambda: "9.9.1")
            assert first != key.digest(text, ops, "H200")
    with monkeypatch.context() as m:
        m.setattr(key, "sources_of", lambda module: "edited")
        assert first != key.digest(text, ops, "H200")
    with inductor_config.patch(max_autotune=True):
        assert first != key.digest(text, ops, "H200")
    with inductor_config.patch({"compile_threads": 3, "triton.cudagraphs": True}):
        assert first == key.digest(text, ops, "H200")
    with inductor_config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert key.digest(text, ops, "H200") is None  # whatever that does


def test_the_code_of_an_op_is_its_file_and_the_kernels_that_it_imports():
    one = key.sources_of("fusion_backend.patterns.layer_norm")
    assert one == key.sources_of("fusion_backend.patterns.layer_norm")
    assert one != key.sources_of("fusion_backend.patterns.rms_norm")
    text = "from fusion_backend.kernels.norm.forward import f\nfrom torch import nn\nimport os\n"
    assert key.imported(text) == ["fusion_backend.kernels.norm.forward"]


@pytest.mark.parametrize(
    "error, said",
    [
        (Lost("it had not finished after 10 seconds"), "not finished after 10 seconds"),
        (Lost("its results are not those of Inductor here: result 0"), "results are not those"),
        (RuntimeError("out of registers"), "out of registers"),
        (torch.OutOfMemoryError("CUDA"), "could not be measured"),
    ],
    ids=["hangs", "wrong", "raises", "memory"],
)
def test_a_provider_that_fails_costs_its_site_alone(monkeypatch, tmp_path, error, said):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: error):
        fails = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        warns = pytest.warns(RuntimeWarning, match="layer_norm.*its kernel failed")
        with warns if fails else contextlib.nullcontext():
            ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
        assert not fused and said in reason
        assert stored.store().empty  # it may succeed another time


def test_of_training_the_backward_alone_is_tried_where_both_lose(monkeypatch, tmp_path):
    def by_forward(chosen):
        return 1.3 if chosen[0].forward == "reference" else 0.9

    x = torch.randn(16384, 4096, requires_grad=True)
    with as_on_a_gpu(monkeypatch, tmp_path, by_forward):
        record = decided(norm, x, measure_s=20)
        (site,) = [s for s in record.sites if s.counted]
        assert (site.fused, site.forward, site.backward) == (True, "reference", "kernel")
        again = decided(norm, x)
        (site,) = [s for s in again.sites if s.counted]
        assert (site.fused, site.forward, site.backward) == (True, "reference", "kernel")


def test_where_one_choice_fails_the_others_are_tried(monkeypatch, tmp_path):
    def by_forward(chosen):
        return 1.3 if chosen[0].forward == "reference" else RuntimeError("out of registers")

    x = torch.randn(16384, 4096, requires_grad=True)
    with as_on_a_gpu(monkeypatch, tmp_path, by_forward):
        (site,) = [s for s in decided(norm, x, gate="measure").sites if s.counted]
    assert (site.fused, site.forward, site.backward) == (True, "reference", "kernel")


def test_a_region_that_is_too_large_is_left_and_says_so(monkeypatch, tmp_path):
    def fn(x):
        for _ in range(300):
            x = x.sin()
        return torch.softmax(x, -1)

    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: pytest.fail("measured")):
        record = decided(fn, torch.randn(64, 65536), gate="measure")
    assert any("more than 256 operators" in s.reason for s in record.sites)


def test_a_measured_decision_adds_no_guard(monkeypatch, tmp_path):
    from torch._dynamo.testing import CompileCounter

    counted = CompileCounter()

    def backend(gm, example_inputs):
        fuse_graph(gm, Options(measure_s=20), GraphRecord(0), usable(patterns()), True)
        return counted(gm, example_inputs)

    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        torch._dynamo.reset()
        fn = torch.compile(norm, backend=backend, dynamic=True)
        for rows in (64, 65, 1000, 7):
            fn(torch.randn(rows, 4096))
    assert counted.frame_count == 1


def test_after_the_last_round_nothing_that_lost_is_fused(monkeypatch, tmp_path):
    for last in (1, 2):
        monkeypatch.setattr(judging, "MOST_ROUNDS", last)
        with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.9):
            ((_, fused, _),) = told(decided(norm, long_norm(), gate="measure"), "layer_norm")
        assert not fused


def test_after_the_last_round_a_doubtful_site_that_won_is_fused(monkeypatch, tmp_path):
    def fn(x):
        return F.relu(x.sin()).square() * F.layer_norm(x * 2, (1024,))

    monkeypatch.setattr(judging, "MOST_ROUNDS", 2)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.5):
        assert told(decided(fn, torch.randn(16384, 1024), gate="measure"), "layer_norm")[0][1]


# Races.


def noisy(ratio, spread, seed=0):
    numbers = random.Random(seed)
    found = Race()
    while len(found.plain) < 60 and not found.verdict:
        found.add(ratio * numbers.lognormvariate(0, spread), numbers.lognormvariate(0, spread))
    return found


def test_a_race_is_certain_or_undecided():
    assert {noisy(1.2, 0.01, s).verdict for s in range(20)} == {"faster"}
    assert {noisy(0.9, 0.01, s).verdict for s in range(20)} == {"slower"}
    assert {noisy(1.0, 0.001, s).verdict for s in range(20)} == {"same"}
    wrong = sum(noisy(1.0, 0.05, s).verdict in ("faster", "slower") for s in range(300))
    assert wrong <= 12  # of the sequence of looks; each by itself is wrong once in a hundred


def test_a_few_rounds_prove_nothing():
    found = Race()
    for _ in range(7):
        found.add(2.0, 1.0)
    assert found.verdict == "" and found.interval == (0.0, math.inf)
    found.add(2.0, 1.0)
    assert found.verdict == "faster" and found.interval == (2.0, 2.0)


def test_an_interval_holds_the_median_99_times_in_100():
    numbers, missed = random.Random(1), 0
    for _ in range(1000):
        found = Race()
        for _ in range(15):
            found.add(numbers.lognormvariate(0.1, 0.3), 1.0)
        low, high = found.interval
        missed += not low <= math.exp(0.1) <= high
    assert 0 < missed <= 20


def test_a_race_ends_when_its_time_is_up_and_alternates():
    turns = []
    times = {"plain": 3.0, "ours": 2.0}

    def clock(call):
        turns.append(call())
        return times[turns[-1]] * (1 + 0.3 * (len(turns) % 3))

    found = race(lambda: "plain", lambda: "ours", clock, seconds=0.0)
    assert len(found.plain) == 1 and found.plain[0] > found.ours[0]
    turns.clear()
    race(lambda: "plain", lambda: "ours", clock, seconds=1.0)
    assert turns[2:4] == ["ours", "plain"] and turns[4:6] == ["plain", "ours"]
