"""What the judge makes of measurements: proposed, measured, kept, told, and decided again."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.compat.torch import inductor_config
from fusion_backend.decide import gate as gating
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.measure import judge as judging
from fusion_backend.measure import key, measuring
from fusion_backend.measure import store as stored
from fusion_backend.measure.contest import NotMeasurable, ResultsDiffer
from fusion_backend.measure.timing import Race
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import UNPROFITABLE, GraphRecord
from tests.measured_cases import (
    Answers,
    Block,
    Stub,
    as_on_a_gpu,
    decided,
    long_norm,
    norm,
    pattern,
    refused_by_the_tables,
    told,
    two_norms,
)


def test_a_site_that_wins_in_context_is_fused_and_says_so(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0):
        (site,) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
    assert site == ("layer_norm", True, "1.000 ms, Inductor 2.000 ms here, measured today")


def test_a_site_that_is_fast_alone_and_loses_in_context_is_declined(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 0.94):
        record = decided(norm, long_norm(), measure_s=20)
    (site,) = [s for s in record.sites if s.counted]
    assert not site.fused and site.cause == UNPROFITABLE
    assert site.reason == "left to Inductor: 0.94 times as fast in its region, measured today"
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
            assert not fused and f"{ratio:.2f} times as fast in its region" in reason
            assert stored.store().clear()


def test_noise_is_no_win(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: (0.4, 1.05)) as stub:
        ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
        assert not fused and "vary too much, 0.63 to 1.47" in reason
        assert stored.store().empty  # another process tries again
        assert stub.asked


def test_a_race_that_had_no_time_is_not_called_noisy(monkeypatch, tmp_path):
    class OneRound(Stub):
        def against(self, chosen, seconds):
            race = Race()
            race.add(2.0, 1.0)
            return race, 0

    with as_on_a_gpu(monkeypatch, tmp_path):
        held = contextlib.nullcontext(OneRound(None))
        monkeypatch.setattr(measuring, "contest", lambda *how: held)
        ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
    assert not fused and "the time to measure it was up after 1 of at least 8 rounds" in reason


def test_a_gain_too_close_to_call_is_none_and_measured_once(monkeypatch, tmp_path):
    """From 1.005 to 1.035: whether it is more than the 2 % that count stays open, in every race."""
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: (0.0147, 1.02)) as stub:
        ((_, fused, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
        assert not fused and "left to Inductor: 1.02 times as fast in its region" in reason
        asked = len(stub.asked)
        assert decided(norm, long_norm(), measure_s=20).measured == 0 and len(stub.asked) == asked


def test_no_region_is_compiled_that_would_take_longer_than_the_time_left(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 2.0) as stub:
        stub.compile_s = 21.0
        ((_, _, reason),) = told(decided(norm, long_norm(), measure_s=20), "layer_norm")
        assert "the time to measure it was up" in reason and not stub.asked
        assert stored.store().empty  # another process has its own time
        stub.compile_s = 19.0
        measuring.ALLOWANCE.took.clear()
        decided(norm, long_norm(), measure_s=20)
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
        with (
            monkeypatch.context() as m
        ):  # one inside of that of as_on_a_gpu, which restores its own
            m.setattr(stored, "seed", lambda: {mine.key: shipped})
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
        (NotMeasurable("it had not finished after 10 seconds"), "not finished after 10 seconds"),
        (ResultsDiffer("its results are not those of Inductor here"), "results are not those"),
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
        # it may succeed another time, but for what is certain
        assert stored.store().empty != isinstance(error, ResultsDiffer)


@pytest.mark.parametrize(
    "error", [ResultsDiffer("its results are others"), RuntimeError("registers")]
)
def test_what_is_wrong_or_fails_in_context_is_not_taken_for_what_bytes_promise(
    monkeypatch, tmp_path, error
):
    """Attention by hand, whose scores Inductor would write to memory."""

    def block(q):
        return torch.softmax(q @ q.mT, -1) @ q

    x = torch.randn(8, 8, 256, 32)
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: NotMeasurable("the GPU is busy")):
        ((_, fused, reason),) = told(decided(block, x, measure_s=20), "attention")
        assert fused and "fused on an estimate from bytes and launches" in reason
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: error), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ((_, fused, reason),) = told(decided(block, x, measure_s=20), "attention")
        assert not fused and str(error) in reason


def test_a_short_launch_is_measured_where_the_tables_accept_it(monkeypatch, tmp_path):
    with as_on_a_gpu(monkeypatch, tmp_path, lambda chosen: 1.2) as stub:
        short = torch.randn(192, 5120, dtype=torch.bfloat16)
        ((_, fused, _),) = told(decided(norm, short, measure_s=20), "layer_norm")
        assert fused and stub.asked == [["layer_norm"]]
        ((_, fused, reason),) = told(
            decided(norm, torch.randn(16, 64), measure_s=20), "layer_norm"
        )  # which they refuse
        assert not fused and "one short launch" in reason and len(stub.asked) == 1


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
