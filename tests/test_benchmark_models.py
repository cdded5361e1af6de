"""benchmarks.models on a CPU: every model runs; contenders that fail, lie or dawdle are told; so
are user errors.
"""

import dataclasses
import gc
import sys

import pytest
import torch
from torch import nn

import fusion_backend
from benchmarks import models
from benchmarks.measure import wall_time
from benchmarks.measure.distance import floats
from benchmarks.measure.failures import said
from benchmarks.model_runs import compiling, errors, measuring, steps
from benchmarks.model_runs import row as model_row
from benchmarks.model_runs.compiling import shortened
from benchmarks.model_runs.measuring import measure
from benchmarks.model_runs.steps import Plan, Step, contenders
from benchmarks.pages.model_text import measured, text
from benchmarks.records.rows import FAILED, OK, WRONG, ModelContender, ModelRow
from benchmarks.subjects.model_zoo import ENTRIES, build
from benchmarks.subjects.subject import DECODE, INFER, TRAIN, Problem, Subject
from fusion_backend.measure import store

CPU = torch.device("cpu")
PLAIN = [name for name in ENTRIES if name.startswith("plain_")]
OTHERS = [name for name in ENTRIES if name not in PLAIN]
QUICK = Plan(rounds=3, least_ms=0.5, warm=False)


def tiny(name, mode, attention="sdpa", dtype=torch.float32) -> Subject:
    return build(name, mode, ENTRIES[name].tiny, attention, CPU, dtype)


def runs_again(subject, mode):
    """The same result twice, and in fp64 nearly the same."""
    step = Step(subject, lambda fn: fn, Plan(train=mode == TRAIN))
    first, again, wide = step(), step(), Step(subject.cast(torch.float64), lambda fn: fn, Plan())()
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert torch.isfinite(first).all()
    torch.testing.assert_close(first.double(), wide.double(), rtol=1e-3, atol=1e-4)


# The models.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_model(name, attention):
    for mode in ENTRIES[name].modes:
        runs_again(tiny(name, mode, attention), mode)


@pytest.mark.parametrize("name", PLAIN)
def test_both_attentions_of_a_plain_model_agree(name):
    torch.testing.assert_close(
        tiny(name, INFER)(), tiny(name, INFER, "eager")(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", OTHERS)
def test_transformers_model(name):
    pytest.importorskip("transformers")
    for mode in ENTRIES[name].modes:
        if name == "mixtral" and mode != INFER:
            continue
        if name in ("mixtral", "gpt_oss", "deepseek"):  # their experts have no fp64
            assert torch.isfinite(tiny(name, mode)()).all()
        else:
            runs_again(tiny(name, mode), mode)


@pytest.mark.parametrize(
    "name, each, once",
    [
        (
            "plain_llama",
            dict(add_rms_norm=2, rotary=2, attention=1, gated_mlp=1),
            dict(linear_cross_entropy=1),
        ),
        ("plain_gpt2", dict(attention=1, mlp=1), dict(linear_cross_entropy=1)),
        (
            "plain_bert",
            dict(add_layer_norm=2, attention=1, mlp=1),
            dict(add_layer_norm=1, linear_cross_entropy=1),
        ),
        ("plain_vit", dict(attention=1, mlp=1), dict(linear_cross_entropy=1)),
    ],
)
def test_plain_models_hold_what_library_models_hold(name, each, once):
    subject, layers = tiny(name, TRAIN), ENTRIES[name].tiny.layers
    report = fusion_backend.explain(
        subject.model,
        *subject.args,
        options={"fusion.gate": "always", "fusion.skip": "norm_linear"},
        **subject.kwargs,
    )
    fused = [site.pattern for site in report.fused]
    for pattern in each.keys() | once.keys():
        assert fused.count(pattern) == each.get(pattern, 0) * layers + once.get(pattern, 0), report


def test_the_loss_of_gpt2_is_in_the_graph_of_its_layers():
    pytest.importorskip("transformers")
    subject = tiny("gpt2", TRAIN)
    report = fusion_backend.explain(subject.model, *subject.args, **subject.kwargs)
    assert len(report.graphs) == 1, report


def test_decoding_attends_to_the_cache():
    subject = tiny("plain_llama", DECODE)
    before = subject()
    subject.kwargs["past"][0][1].add_(1.0)
    assert not torch.allclose(before, subject())


def test_a_mode_that_a_model_lacks():
    with pytest.raises(Problem, match="plain_bert has no mode decode"):
        tiny("plain_bert", DECODE)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Problem, match="needs transformers .* or take one of plain_"):
        tiny("llama", INFER)


# Contenders.


def subject_of(train=False) -> tuple[Subject, ModelRow]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(256, 64)
    result = (lambda y: y.square().mean()) if train else (lambda y: y)
    return Subject("mine", model, (x,), result=result), ModelRow(
        "mine", "train" if train else "infer", "f32", {}, None, []
    )


def backend(name):
    return lambda step: torch.compile(step, backend=name)


def changed(how):
    """A contender that runs the model and then `how` on its output."""
    return lambda step: lambda *args, **kwargs: how(step(*args, **kwargs))


@pytest.fixture
def dawdle(monkeypatch):
    """What takes 25 ms. Every other step takes one, whatever else the machine does."""
    waited = []

    def milliseconds(step, calls, device):
        before = len(waited)
        for _ in range(calls):
            step()
        return 1.0 + 25.0 * (len(waited) - before) / calls

    monkeypatch.setattr(wall_time, "milliseconds", milliseconds)
    return lambda y: waited.append(y) or y


def refuse(y):
    raise ValueError("no such kernel\nand a second line")


def exhaust(y):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")


def test_wrong_slow_and_failing_contenders_are_told_apart(dawdle):
    subject, row = subject_of()
    makes = {
        "eager": lambda step: step,
        "inductor": backend("aot_eager"),
        "wrong": changed(lambda y: y * 1.01),
        "nan": changed(lambda y: y * float("nan")),
        "slow": changed(dawdle),
        "failing": changed(refuse),
        "memory": changed(exhaust),
    }
    said = []
    row = measure(subject, makes, QUICK, row, CPU, said.append)
    status = {one.name: one.status for one in row.contenders}
    assert status == dict(
        eager=OK, inductor=OK, wrong=WRONG, nan=WRONG, slow=OK, failing=FAILED, memory=FAILED
    )
    assert row.of("wrong").output_error == pytest.approx(0.01, rel=1e-2)
    assert row.of("failing").note == "ValueError: no such kernel"
    assert row.of("memory").note.startswith("out of memory (OutOfMemoryError: CUDA out of memory")
    assert row.of("slow").verdict == "slower" and row.of("inductor").verdict == ""
    assert row.ratio("slow") < 0.5 and row.of("slow").step.median > 20
    assert row.of("failing").step is None and row.ratio("failing") is None
    assert row.noise >= 0 and row.twin == "inductor"
    assert row.of("inductor").cold_s >= 0 and row.of("eager").cold_s is None
    shown = text(row)
    assert "FAILED: ValueError: no such kernel" in shown and "WRONG: output error" in shown
    assert any("timing eager, inductor, wrong, nan, slow in turns" in line for line in said)


def test_wrong_gradients():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    subject, row = subject_of(train=True)
    makes = {
        "eager": lambda step: step,
        "doubled": changed(Doubled.apply),
        "detached": changed(detached(subject)),
    }
    row = measure(
        subject,
        makes,
        dataclasses.replace(QUICK, train=True, optimizer="adamw"),
        row,
        CPU,
        lambda _: None,
    )
    assert row.of("eager").status == OK and row.of("eager").gradient_error < 1e-5
    assert row.of("doubled").status == WRONG and row.of("doubled").gradient_error == pytest.approx(
        1, rel=1e-3
    )
    assert (
        row.of("detached").status == WRONG
        and "gradients of other parameters" in row.of("detached").note
    )


def detached(subject):
    """The same loss, of the last bias only."""
    bias = subject.model[2].bias
    return lambda loss: loss.detach() + (bias - bias.detach()).sum()


def test_all_contenders_see_the_same_weights_whatever_the_optimizer_does():
    subject, _ = subject_of(train=True)
    before = [p.detach().clone() for p in subject.model.parameters()]
    for kind in ("sgd", "adamw"):
        step = Step(subject, lambda fn: fn, Plan(train=True, optimizer=kind))
        step(), step()
        assert step.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters(), strict=True))


def test_an_exact_run_that_fails_is_a_note(monkeypatch):
    subject, row = subject_of()

    def fail(subject, plan):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(errors, "exact_results", fail)
    row = measure(subject, {"eager": lambda step: step}, QUICK, row, CPU, lambda _: None)
    said = "out of memory (OutOfMemoryError: out of memory)"
    assert row.notes == [f"no errors: the run in torch.float64 failed, {said}"]
    assert row.of("eager").step and row.of("eager").output_error is None


def test_random_models_are_noted():
    subject, row = subject_of()
    subject.model = nn.Sequential(subject.model, nn.Dropout(0.5))
    row = measure(subject, {"eager": lambda step: step}, QUICK, row, CPU, lambda _: None)
    assert any("two eager runs differ" in note for note in row.notes)


def test_a_run_that_only_fails_in_turns_is_not_timed(monkeypatch):
    subject, row = subject_of()
    monkeypatch.setattr(measuring, "whole_calls", lambda *args: exhaust(None))
    row = measure(
        subject,
        {"eager": lambda step: step},
        dataclasses.replace(QUICK, exact=None, profile=False),
        row,
        CPU,
        lambda _: None,
    )
    assert (
        row.notes[0].startswith("not timed: out of memory")
        and row.of("eager").step is None
        and row.noise is None
    )
    assert row.of("eager").kernels == []


def test_a_contender_that_fails_in_its_turn_leaves_the_others_alone():
    subject, row = subject_of()
    calls = []

    def exhausted_later(y):
        calls.append(1)
        return y if len(calls) < 6 else exhaust(y)

    makes = {
        "eager": lambda step: step,
        "inductor": backend("aot_eager"),
        "late": changed(exhausted_later),
    }
    row = measure(subject, makes, QUICK, row, CPU, lambda _: None)
    assert [one.status for one in row.contenders] == [OK, OK, FAILED], row
    assert (
        row.of("late").note.startswith("in its turn: out of memory") and row.of("late").step is None
    )
    assert (
        row.of("eager").step and row.of("eager").kernels and row.noise is not None and not row.notes
    )


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def test_outputs_are_found_in_a_dataclass():
    y = torch.ones(3)
    assert [x is y for x in floats((Output(y), dict(more=Output(y, y)), 7)).values()] == [True] * 3
    with pytest.raises(ValueError, match="no floating tensor to compare: Output"):
        floats(Output(torch.ones(3, dtype=torch.long)))


@pytest.mark.parametrize(
    "dtype, error, status", [("f32", 1e-6, OK), ("f32", 5e-6, WRONG), ("bf16", 5e-3, OK)]
)
def test_a_loss_is_a_sum_in_another_order(dtype, error, status):
    """A scalar's error is a sample: eager's own may be 0 by chance."""
    subject, row = subject_of()
    one, exact = ModelContender("mine"), subject().sum().detach()
    step = Step(subject, changed(lambda y: y.sum() * (1 + error)), Plan())
    errors.compare(
        step,
        one,
        ({0: exact.double()}, {}),
        ModelContender("eager", output_error=0.0),
        steps.DTYPES[dtype],
    )
    assert one.status == status, one


def test_the_contenders():
    assert list(contenders()) == ["eager", "inductor", "fusion"]
    assert list(contenders(max_autotune=True)) == ["eager", "inductor", "max-autotune", "fusion"]


@pytest.mark.parametrize("verify, measure_s", [(False, 0.0), (True, 0.0), (False, 20.0)])
def test_options_reach_the_backend(verify, measure_s, monkeypatch):
    options = {}
    monkeypatch.setattr(torch, "compile", lambda step, **how: options.update(how["options"]))
    contenders(verify=verify, measure_s=measure_s)["fusion"](abs)
    expected = {"fusion.gate": "auto", "fusion.verify": verify, "fusion.measure_s": measure_s}
    assert options == expected


def test_no_contender_pays_for_the_garbage_of_another(tmp_path, monkeypatch):
    happened = []
    monkeypatch.setattr(gc, "collect", lambda: happened.append("collected"))
    monkeypatch.setattr(
        compiling, "seconds_to_compile", lambda *_: happened.append("compiled") or 1.0
    )
    names = ("eager", "inductor", "fusion")
    found = {name: ModelContender(name) for name in names}
    compiling.compile_all(
        dict.fromkeys(names), found, Plan(), CPU, str(tmp_path), lambda what: None
    )
    assert happened == ["collected", "compiled"] * len(names) * (1 + compiling.WARM)


@pytest.mark.parametrize("keep", [False, True])
def test_what_the_gate_measured_is_kept_if_asked(keep, tmp_path, monkeypatch):
    """In the user's store; the contender has one of its own, which is removed."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "user"))
    store.store_in.cache_clear()

    def seconds_to_compile(step, device):
        store.store().put(store.Answer("some key", ("gelu",), ("kernel/None",), verdict="faster"))
        return 1.0

    monkeypatch.setattr(compiling, "seconds_to_compile", seconds_to_compile)
    plan, found = Plan(warm=False, keep_answers=keep), {"fusion": ModelContender("fusion")}
    own = str(tmp_path / "own")
    compiling.compile_all({"fusion": None}, found, plan, CPU, own, lambda what: None)
    store.store_in.cache_clear()
    assert [a.key for a in store.store().all()] == ["some key"] * keep
    assert found["fusion"].cold_s == 1.0


def test_what_the_gate_measured_is_told_where_it_measured():
    one = ModelContender("fusion", measured={"cold": [0, 0.0], "warm": [0, 0.0]})
    assert measured(one) == measured(None) == []
    one.measured["cold"] = [5, 12.34]
    assert measured(one) == ["  classes of regions measured: cold 5 in 12.3 s, warm 0 in 0.0 s"]


def test_reasons_are_one_line_and_counted_together():
    assert said(ValueError("")) == "ValueError: "
    assert (
        shortened("the result of mul inside it is used elsewhere too, at /x/y.py:7")
        == "the result of mul inside it is used elsewhere too"
    )
    assert (
        shortened("the result of mul inside it, at /x/y.py:7, is read by gelu")
        == "the result of mul inside it is read by gelu"
    )


def test_the_answers_of_the_package_can_be_left_out(monkeypatch):
    def refused(*given):
        raise Problem("planted")

    with monkeypatch.context() as m:
        m.setattr(store, "SEED", store.SEED)  # as it was, afterwards
        m.setattr(model_row, "subject_of", refused)
        store.seed.cache_clear()
        assert store.seed()
        args = models.arguments(["--model", "gpt2", "--without-seed"])
        model_row.measured(args.jobs[0], args, torch.device("cpu"), print)
        assert not store.seed()
    store.seed.cache_clear()
    assert store.seed()
