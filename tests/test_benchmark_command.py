"""The command benchmarks.models: the user's own model and what can be wrong with it, timm, files,
exit codes.
"""

import dataclasses
import gzip
import json
import sys
import textwrap
import types

import pytest
import torch
from torch import nn

from benchmarks import models
from benchmarks.model_runs import compiling, row, running
from benchmarks.processes.pool import CRASHED, Lost
from benchmarks.records.rows import OK, ModelContender, ModelRow, Spread
from benchmarks.records.runs import Run
from benchmarks.subjects import own_model
from benchmarks.subjects.subject import INFER, TRAIN, Problem

CPU = torch.device("cpu")
OWN = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    return model, torch.randn(4, 8), lambda y: y.square().mean()

def untrained(): return nn.Linear(8, 8), torch.randn(4, 8)
def named(): return nn.Linear(8, 8), {"input": torch.randn(4, 8)}
def raises(): return 1 / 0
def nothing(): return None
def function(): return torch.sin, torch.ones(3)
def wrong_loss(): return nn.Linear(8, 8), torch.ones(3, 8), 7
def wrong_inputs(): return nn.Linear(8, 8), "words"
def wrong_shape(): return nn.Linear(8, 8), torch.ones(3, 9)
def frozen(): return nn.Linear(8, 8).requires_grad_(False), torch.ones(3, 8), lambda y: y.sum()
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(OWN))
    (tmp_path / "broken.py").write_text("import nonexistent_library\n")
    (tmp_path / "syntax.py").write_text("def build(:\n")
    return path


@pytest.mark.parametrize(
    "spec, mode, message",
    [
        ("{0}", INFER, "is not package.module:function or file.py:function"),
        ("{0}.nothere.py:build", INFER, "there is no file"),
        (
            "no_such_module:build",
            INFER,
            "there is no module no_such_module .* a file works too: path/to/file.py:build",
        ),
        (
            "{1}/broken.py:build",
            INFER,
            "importing .*broken.py raised ModuleNotFoundError.*broken.py:1",
        ),
        ("{1}/syntax.py:build", INFER, "importing .*syntax.py raised SyntaxError"),
        ("{0}:missing", INFER, "has no function missing"),
        ("{0}:raises", INFER, r"raised ZeroDivisionError: division by zero \(.*mine.py:\d+\)"),
        (
            "{0}:nothing",
            INFER,
            r"returned NoneType \(.*mine.py:\d+\); it must return \(model, inputs\) or",
        ),
        ("{0}:function", INFER, "a model of type .*, not an nn.Module"),
        ("{0}:wrong_loss", INFER, "a loss of type int"),
        ("{0}:wrong_inputs", INFER, "inputs of type str"),
        ("{0}:wrong_shape", INFER, "run eagerly on its inputs, raised RuntimeError"),
        ("{0}:untrained", TRAIN, r"training needs a scalar loss, got a tensor of shape \(4, 8\)"),
        ("{0}:frozen", TRAIN, "nothing to train"),
    ],
)
def test_what_is_wrong_with_the_users_model_is_said(own, spec, mode, message):
    with pytest.raises(Problem, match=message):
        own_model.own(spec.format(own, own.parent), mode, CPU, None)


def test_the_users_model_in_its_forms(own, monkeypatch):
    assert own_model.own(f"{own}:named", INFER, CPU, torch.bfloat16)().dtype == torch.bfloat16
    subject = own_model.own(f"{own}:build", TRAIN, CPU, None)
    assert subject().ndim == 0 and subject.name == "mine:build"
    monkeypatch.chdir(own.parent)
    assert own_model.own("mine:build", INFER, CPU, None)().shape == (4, 16)


@pytest.mark.full
def test_own_model_end_to_end(own, tmp_path, capsys, monkeypatch):
    """Inductor and fusion for real: compiled cold and warm, timed, traced, kept."""
    # saves a compilation of each
    monkeypatch.setattr(compiling, "STARTED", {("inductor", True), ("fusion", True)})
    out, traces = tmp_path / "results.json", tmp_path / "traces"
    argv = [
        "--module",
        f"{own}:build",
        f"{own}:raises",
        "--mode",
        "train",
        "--optimizer",
        "sgd",
        "--rounds",
        "2",
    ]
    # of :raises
    assert models.main([*argv, "--least-ms", "1", "--out", str(out), "--trace", str(traces)]) == 1
    run = Run.load(out)
    good, bad = run.rows
    assert [one.name for one in good.contenders] == ["eager", "inductor", "fusion"]
    assert all(
        one.status == OK and one.step.median > 0 and one.gradient_error < 1e-5
        for one in good.contenders
    )
    assert good.of("fusion").fused, good
    for name in ("inductor", "fusion"):
        assert good.of(name).cold_s > good.of(name).warm_s >= 0
        assert json.loads(gzip.open(traces / f"mine_build-train-{name}.json.gz").read())[
            "traceEvents"
        ]
    assert sum(good.of("eager").shares.values()) == pytest.approx(1, abs=1e-4)
    assert bad.contenders == [] and "ZeroDivisionError" in bad.notes[0]
    assert run.about["command"].startswith("python -m benchmarks.models --module")
    shown = capsys.readouterr().out
    assert "longest kernels of fusion" in shown and "mine:build train f32 (optimizer sgd)" in shown
    assert str(tmp_path) not in json.dumps([dataclasses.asdict(one) for one in good.contenders])


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch):
    seen = []

    def stub(job, args, device, say):
        seen.append(job.name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return ModelRow(job.name, job.mode, "f32", {}, None, [ModelContender("eager")])

    monkeypatch.setattr(running, "measured", stub)
    out = tmp_path / "results.json"
    assert (
        models.main(["--model", "plain_llama", "plain_bert", "plain_vit", "--out", str(out)]) == 130
    )
    run = Run.load(out)
    assert [row.name for row in run.rows] == ["plain_llama"] and "plain_bert infer" in run.about[
        "stopped"
    ]


def measured_as(monkeypatch, clock=lambda: None, ratio=2.0):
    """benchmarks.models with rows that take no time but what `clock` adds."""

    def stub(job, args, device, say):
        clock()
        ones = [
            ModelContender(who, step=Spread.of([ms]))
            for who, ms in (("inductor", ratio), ("fusion", 1.0))
        ]
        return ModelRow(job.name, job.mode, "f32", dict(layers=args.layers or 2), None, ones)

    monkeypatch.setattr(running, "measured", stub)


def test_no_model_is_begun_that_the_time_does_not_suffice_for(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(models.time, "monotonic", lambda: now[0])
    measured_as(monkeypatch, clock=lambda: now.__setitem__(0, now[0] + 40))
    out = tmp_path / "results.json"
    argv = [
        "--model",
        "plain_llama",
        "plain_bert",
        "plain_vit",
        "--minutes",
        "1.5",
        "--out",
        str(out),
    ]
    assert models.main(argv) == 0
    run = Run.load(out)
    assert [row.name for row in run.rows] == ["plain_llama", "plain_bert"] and run.about[
        "seconds"
    ] == 80
    assert (
        run.about["stopped"] == "time is up after 2 of 3 models"
        and "2 of 3" in capsys.readouterr().err
    )


def test_a_run_in_parts(tmp_path, monkeypatch, capsys):
    measured_as(monkeypatch)
    out, add = tmp_path / "results.json", ["--add", "--out", str(tmp_path / "results.json")]
    assert models.main(["--model", "plain_llama", "plain_bert", *add]) == 0  # no file yet
    measured_as(monkeypatch, ratio=3.0)
    assert models.main(["--model", "plain_llama", "plain_vit", *add]) == 0
    # another size is another row
    assert models.main(["--model", "plain_llama", "--layers", "3", *add]) == 0
    run = Run.load(out)
    found = {(row.name, row.about["layers"]): row.ratio("fusion") for row in run.rows}
    assert found == {
        ("plain_bert", 2): 2,
        ("plain_llama", 2): 3,
        ("plain_vit", 2): 3,
        ("plain_llama", 3): 3,
    }
    assert run.about["command"].count("python -m benchmarks.models --model") == 3
    run.about["torch"] = "1.0"
    run.save(out)
    assert models.main(["--model", "plain_vit", *add]) == 2
    assert "was measured with another torch: its rows cannot be kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "nothing to measure"),
        (["--model", "plain_vit", "--add"], "give --out"),
        (["--model", "plain_vit", "--minutes", "0"], "--minutes: 0 is not more than 0"),
        (["--quoted", "nothere.md"], "nothere.md: no figures of kind models"),
        (["--model", "resnet"], "no model resnet; there is plain_llama"),
        (["--model", "plain_vit", "--batch", "0"], "0 is not 1 or more"),
        (["--model", "plain_vit", "--optimizer", "sgd"], "give --mode train"),
        (["--model", "plain_vit", "--dropout"], "--dropout is for --mode train"),
        (
            ["--module", "mine:build", "--mode", "train", "--dropout"],
            "one of --module has its own mode",
        ),
        (
            ["--model", "plain_vit", "--mode", "train", "--dropout", "--exact", "fp32"],
            "there are no errors to show",
        ),
        (["--model", "plain_vit", "--trace", "x", "--no-profile"], "--no-profile leaves out"),
    ],
)
def test_arguments_that_make_no_sense(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        models.main(argv)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("dropout", [False, True])
def test_training_with_the_models_own_dropout(dropout, monkeypatch):
    """It is left out, for the sake of the errors, or kept, and then no errors are asked for."""
    seen = []

    def measure(subject, makes, plan, row, device, say, alone):
        seen.append((subject.model.training, plan.exact, row.title.endswith("dropout on)")))
        return row

    monkeypatch.setattr(row, "measure", measure)
    args = models.arguments(["--model", "bert", "--mode", "train", *["--dropout"] * dropout])
    row.measured(row.Job("model", "bert", TRAIN), args, CPU, print)
    assert seen == [(True, None, True) if dropout else (False, torch.float64, False)]


def test_a_model_that_cannot_be_built_is_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert models.main(["--timm", "resnet50", "--mode", "train", "decode"]) == 1
    shown = capsys.readouterr().out
    assert (
        "not measured: --timm needs timm" in shown and "there is no mode decode for --timm" in shown
    )


def test_models_at_once(own, monkeypatch, capsys):
    """Compile times are left out, a lost process is a row, and the GPU is one's own while timed."""
    argv = ["--module", f"{own}:build", f"{own}:raises", "--processes", "2", "--minutes", "1"]
    with pytest.raises(SystemExit):
        models.main(argv)
    assert "give --once" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        models.main([*argv, "--once", "--cold", "3"])
    assert "--cold more often" in capsys.readouterr().err
    found = ModelRow("mine", INFER, "f32", {}, None, [ModelContender("fusion", cold_s=3.0)])
    found.contenders[0].colds_s = [3.0]
    seen = []

    def outcomes(jobs, work, processes, limit, deadline, context):
        seen.append((processes, context.get_start_method()))
        first, second = jobs
        yield second, Lost(CRASHED, "exit status 3 while timing")
        yield first, found

    monkeypatch.setattr(running, "outcomes", outcomes)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    assert models.main([*argv, "--once"]) == 1
    assert seen == [(2, "spawn")] and found.contenders[0].cold_s is None
    assert not found.contenders[0].colds_s
    assert "not measured: crashed: exit status 3 while timing" in capsys.readouterr().out


def test_a_process_times_alone(tmp_path, monkeypatch):
    sent, held = [], []
    monkeypatch.setattr(running, "lock_file", lambda device: tmp_path / "gpu.lock")
    monkeypatch.setattr(running, "measure_alone", lambda turns: held.append(turns))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)

    def measured(job, args, device, say, alone):
        say("compiling")
        with alone:
            assert held[0].depth == 1
        assert held[0].depth == 0
        return "the row"

    monkeypatch.setattr(running, "measured", measured)
    running.work(running.Work("job", None, CPU, 1), types.SimpleNamespace(send=sent.append))
    assert sent[0] == ("stage", "compiling") and sent[-1] == ("done", "the row")


def test_the_other_models_go_on(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(row, "build", fail)
        assert models.main(["--model", "plain_vit"]) == 1
    monkeypatch.setattr(row, "measure", fail)
    assert models.main(["--model", "plain_vit"]) == 1
    shown = capsys.readouterr().out
    assert "not measured: building it raised RuntimeError: no such thing" in shown
    assert "stopped: RuntimeError: no such thing (" in shown


def test_timm(monkeypatch):
    class Net(nn.Module):
        default_cfg = dict(input_size=(3, 8, 8), num_classes=5)

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(192, 5)

        def forward(self, x):
            return self.head(x.flatten(1))

    def create_model(name, pretrained):
        if name != "net":
            raise RuntimeError(f"Unknown model ({name})")
        return Net()

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    assert own_model.timm("net", INFER, CPU, torch.float32, 2)().shape == (2, 5)
    assert own_model.timm("net", TRAIN, CPU, torch.float32, 2)().ndim == 0
    with pytest.raises(Problem, match="timm cannot make nets: Unknown model"):
        own_model.timm("nets", INFER, CPU, torch.float32, 2)


def test_sizes_from_the_command_line():
    args = models.arguments(
        ["--model", "plain_llama", "--layers", "1", "--batch", "3", "--seq", "5"]
    )
    subject = row.subject_of(row.Job("model", "plain_llama", INFER), args, CPU)
    assert (
        subject().shape == (3, 5, 128)
        and subject.about["layers"] == 1
        and len(subject.model.layers) == 1
    )


def test_the_compilation_with_the_median_time_counts():
    """With what the gate measured in it; of two in the middle, the shorter one."""
    one = ModelContender("fusion")
    took = [compiling.Compilation(seconds, 3, seconds / 2) for seconds in (9.0, 5.0, 7.0)]
    compiling.note_times(one, "cold", took)
    compiling.note_times(one, "warm", took[:2])
    assert (one.cold_s, one.colds_s, one.warm_s) == (7.0, [9.0, 5.0, 7.0], 5.0)
    assert one.measured == {"cold": [3, 3.5], "warm": [3, 2.5]}
