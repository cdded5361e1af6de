"""The command `fusion`: what names a model, what is printed, exit statuses."""

import argparse
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fusion_backend import Pattern
from fusion_backend.frontends import command_line
from fusion_backend.frontends.command_line import main
from fusion_backend.frontends.commands import bench, checks, one_kernel
from fusion_backend.frontends.commands import explain as command
from fusion_backend.frontends.commands.gate_answers import DEPENDS, answer
from fusion_backend.frontends.loading import patterns
from fusion_backend.frontends.own_model import built, where
from fusion_backend.kernels.common.launch import interpreting
from fusion_backend.reporting.report import Report

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
MINE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

class Reshapes(nn.Module):
    def forward(self, x):
        return x.view(7, 7)

class Two(nn.Module):
    def forward(self, x, *, scale):
        return torch.softmax(x * scale, -1)

x = torch.ones(3, 8)
def build(): return model(), x, lambda y: (y * 2).softmax(-1).sum()
def a_tensor(): return model(), x
def a_list(): return model(), [x]
def a_dict(): return Two(), {"x": x, "scale": 2.0}
def raises(): return 1 / 0
def nothing(): pass
def four(): return 1, 2, 3, 4
def words(): return model(), "words"
def function(): return torch.sin, x
def frozen(): return model().requires_grad_(False), x
def wrong_shape(): return model(), torch.ones(3, 9)
def wrong_view(): return Reshapes(), x
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    (tmp_path / "syntax.py").write_text("x = 1\ndef build(:\n")
    (tmp_path / "library.py").write_text("\nimport nonexistent_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("mine", "syntax", "library"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("mine", "syntax", "library"):
        sys.modules.pop(name, None)


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(MINE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("mine.py", "'mine.py' is not package.module:function or file.py:function, such as mine"),
        ("no_file.py:build", "there is no file no_file.py"),
        ("no_module:build", "there is no module no_module"),
        ("mine.py:biuld", "mine.py has no function biuld; it has model, build, a_tensor, "),
        ("syntax.py:build", "raised SyntaxError: invalid syntax ({folder}/syntax.py:2)"),
        ("library.py:build", "ModuleNotFoundError: No module named 'nonexistent_library'"),
        ("library.py:build", "library.py:2)"),
        ("mine.py:raises", f"division by zero ({{folder}}/mine.py:{line_of('1 / 0')})"),
        ("mine.py:nothing", f"returned NoneType ({{folder}}/mine.py:{line_of('def nothing')}); it"),
        ("mine.py:four", "returned a tuple of 4 ("),
        ("mine.py:words", "returned inputs of type str, not a tensor, a tuple, a list or a dict ("),
        ("mine.py:function", "not an nn.Module ("),
        ("--train mine.py:frozen", "mine:frozen: no parameter requires a gradient: there is noth"),
    ],
)
def test_a_wrong_spec_is_a_line_and_status_2(mine, capsys, spec, said):
    assert main(["explain", *spec.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fusion explain: ") and err.count("\n") == 1
    assert said.format(folder=mine) in err


@pytest.mark.parametrize(
    "name, line", [("wrong_shape", "def wrong_shape"), ("wrong_view", "(7, 7)")]
)
def test_a_model_that_raises_is_told_with_the_users_line_and_status_1(mine, capsys, name, line):
    """Of an nn.Sequential no line is the user's but that of the function that built it."""
    assert main(["explain", f"mine.py:{name}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"fusion explain: mine:{name} run on its inputs raised RuntimeError: ")
    assert err.count("\n") == 1 and f"({mine}/mine.py:{line_of(line)})" in err


def test_the_whole_error_is_shown_when_asked_for(mine, capsys):
    assert main(["explain", "mine.py:raises", "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "in raises" in err


def report_of(capsys, *argv: str) -> Report:
    assert main(["explain", *argv, "--json", "--gate", "always"]) == 0
    known = json.loads(capsys.readouterr().out)
    return {s["pattern"]: s for g in known["graphs"] for s in g["sites"] if s["fused"]}


@pytest.mark.parametrize(
    "spec, pattern",
    [
        ("mine.py:a_tensor", "norm_linear"),
        ("mine.py:a_list", "norm_linear"),
        ("mine:a_dict", "softmax"),
    ],
)
def test_inputs_in_each_form(mine, capsys, spec, pattern):
    made = built(spec, CPU)
    assert isinstance(made.step(False)(*made.args, **made.kwargs), torch.Tensor)
    assert set(report_of(capsys, spec)) <= {pattern, "layer_norm", "linear_act", "bias_act"}


def test_training_is_explained_with_the_loss_and_gradients(mine, capsys):
    plain = report_of(capsys, "mine.py:build")
    train = report_of(capsys, "mine.py:build", "--train")
    assert "softmax" not in plain and {s["backward"] for s in plain.values()} == {None}
    assert "softmax" in train and None not in {s["backward"] for s in train.values()}
    # operators of an nn.Sequential have the place of their module
    assert {s["where"] for s in plain.values()} <= {"module 0", "module 1", "module 2"}


def test_a_loss_that_is_left_out_is_mentioned(mine, capsys):
    main(["explain", "mine.py:build", "--json"])
    assert "--train explains the training step" in capsys.readouterr().err


def test_options_reach_explain_and_the_report(mine, capsys, monkeypatch):
    given = {}

    def explain(step, *inputs, **how):
        given.update(how, grad=torch.is_grad_enabled(), dtype=inputs[0].dtype)
        return Report()

    monkeypatch.setattr(command, "explain", explain)
    options = "--target H200 --dynamic --dtype bf16 --gate never --verbose --html page.html"
    assert main(["explain", "mine.py:a_tensor", *options.split()]) == 0
    assert "No graph was compiled" in capsys.readouterr().out
    assert (mine / "page.html").read_text().startswith("<!doctype html>")
    assert given == dict(
        kwargs={},
        options={"fusion.gate": "never"},
        dynamic=True,
        target="H200",
        grad=False,
        dtype=torch.bfloat16,
    )
    assert main(["explain", "mine.py:a_tensor", "--html", "no_folder/page.html"]) == 2
    assert "--html: there is no folder no_folder" in capsys.readouterr().err


def test_what_a_user_can_do_is_told_in_the_words_of_the_shell(mine, capsys):
    assert main(["explain", "mine.py:build"]) == 0
    out = capsys.readouterr().out
    assert "--target H200 shows" in out and "explain(" not in out and "text(" not in out


def test_a_tensor_that_is_not_on_the_meta_device(mine, capsys):
    (mine / "cached.py").write_text(
        textwrap.dedent("""
            import torch

            class Cached(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.kept = [torch.ones(2, device="cpu")]

                def forward(self, x):
                    return x * self.kept[0]

            def build():
                return Cached(), torch.ones(2)
        """)
    )
    assert main(["explain", "cached.py:build", "--target", "H200", "--meta"]) == 1
    err = capsys.readouterr().err
    assert "cached.py:10" in err and "use_cache=False" in err and err.count("\n") == 1
    assert main(["explain", "cached.py:build", "--target", "H200"]) == 0


def test_a_build_takes_no_arguments(mine, capsys):
    (mine / "more.py").write_text("def build(n):\n    return n\n")
    assert main(["explain", "more.py:build"]) == 2
    said = f"more.py:build takes arguments ({mine}/more.py:1); it must take none"
    assert said in capsys.readouterr().err


def test_a_target_and_the_meta_device(mine, capsys):
    for more in ("", "--train", "--meta", "--meta --train"):
        assert main(["explain", "mine.py:build", "--target", "H200", "--json", *more.split()]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["target"] == "NVIDIA H200" and report["modules"]["0"] == "Linear"
    assert main(["explain", "mine.py:build", "--meta"]) == 2
    assert "--meta needs --target" in capsys.readouterr().err


def test_a_place_is_the_users(mine):
    """Not torch's, where the error was raised."""
    try:
        torch.nn.Linear(8, 8)(torch.ones(3, 9))
    except RuntimeError as error:
        assert Path(__file__).name in where(error)


@pytest.mark.parametrize("whole", [False, True])
def test_a_failure_of_ours_is_a_line(capsys, monkeypatch, whole):
    def fails(arguments):
        raise IndexError("a list ended\nand more")

    monkeypatch.setattr("fusion_backend.frontends.commands.catalogue.run", fails)
    assert main(["catalogue", *["--traceback"] * whole]) == 1
    err = capsys.readouterr().err
    assert "fusion catalogue: IndexError: a list ended" in err
    assert ("Traceback" in err) == whole
    assert whole or err.count("\n") == 1


def test_ctrl_c(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fusion_backend.frontends.commands.catalogue.run", interrupted)
    assert main(["catalogue"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_each_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0 and f"usage: fusion {name}" in capsys.readouterr().out


def test_the_doctor_finds_nothing_wrong_here(capsys):
    assert main(["doctor", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    found = {c["name"]: c["found"] for c in known["checks"]}
    assert known["ready"] and all(c["ok"] for c in known["checks"])
    assert {"torch", "driver", "backend", "Triton's cache", "C++ compiler"} <= set(found)
    assert {f"pattern {p.name}" for p in patterns()} <= set(found)
    done = "compiled for" if torch.cuda.is_available() else "run in Triton's interpreter"
    assert done in found["kernel"]


def broken_kernel():
    raise RuntimeError("ptxas is missing\nat length")


@pytest.mark.parametrize(
    "name, fault, said",
    [
        ("list_backends", lambda: [], "backend: install the package"),
        ("which", lambda name: None, "C++ compiler: install a C++ compiler"),
        ("get_path", lambda name: "/nowhere", "Python headers: install Python's C headers"),
        ("access", lambda path, mode: False, "or set TRITON_CACHE_DIR"),
        ("run", broken_kernel, "kernel: the kernels cannot be used here"),
    ],
)
def test_the_doctor_says_what_to_do(capsys, monkeypatch, name, fault, said):
    owner = {
        "list_backends": torch.compiler,
        "which": checks.shutil,
        "get_path": checks.sysconfig,
        "access": checks.os,
        "run": one_kernel,
    }[name]
    monkeypatch.setattr(owner, name, fault)
    monkeypatch.setattr(checks, "patterns", lambda: [])  # which take time, and are well
    assert main(["doctor"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("not ready: ") and said in last
    assert any(line.startswith("BROKEN  ") for line in lines)


def test_a_wrong_result_of_a_kernel_is_found(monkeypatch):
    monkeypatch.setattr(one_kernel, "call", lambda op, args: args[0])
    with pytest.raises(AssertionError):
        one_kernel.compare("cpu")


def test_the_gate_has_a_line_for_each_pattern(capsys):
    assert main(["gate"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert {p.name for p in patterns()} <= set(rows)
    assert rows["add_mul"][1:5] == ["Inductor"] * 4 and rows["rms_norm"][1:5] == ["fused"] * 4
    assert rows["layer_norm"][1:5] == ["fused", "fused", "Inductor", "fused"]
    assert rows["attention"][1] == "depends" and rows["quantize_int8"][2] == "-"


def test_the_gate_shows_reasons_and_timings(capsys):
    assert main(["gate", "show", "layer_norm"]) == 0
    out = capsys.readouterr().out
    assert (
        "fp32 inference rows=16384 n=4096: left to Inductor: Inductor's forward is as fast" in out
    )
    assert "bf16 training rows=16384 n=4096: forward and backward fused" in out
    assert "worthwhile at patterns/layer_norm.py:" in out
    assert "  1.51  layer_norm bf16 rows=16384 n=4096 train\n" in out
    assert main(["gate", "show", "attention"]) == 0
    assert "depends on what mask, bias, keep is made of" in capsys.readouterr().out
    assert main(["gate", "show", "layernorm"]) == 2
    assert "there is no pattern layernorm; there is add_layer_norm, " in capsys.readouterr().err


def test_the_gate_says_what_the_committed_runs_recorded():
    """Of the rows whose sizes the example inputs take, on the GPU that they were timed on."""
    rules = {p.name: p for p in patterns()}
    dtypes = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())["rows"]
    compared = 0
    for row in rows:
        ours = next((c for c in row["contenders"] if c["name"] == "fusion"), None)
        sites = [s for s in (ours or {}).get("sites", ()) if s["pattern"] == row["pattern"]]
        if not sites or "mask" in row["name"]:
            continue
        if interpreting() and row["case"].get("n", 0) > 32768:
            continue  # rows that several programs share, which must run at the same time
        said, why = answer(rules[row["pattern"]], row["case"], dtypes[row["dtype"]], row["train"])
        if said != DEPENDS:
            assert bool(said) == sites[0]["fused"], f"{row['name']}: {why}"
            compared += 1
    assert compared > 150


def test_bench_takes_the_arguments_of_the_benchmarks(capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "--optimizer", "sgd", "--model", "plain_vit"])
    assert left.value.code == 2
    assert "fusion bench: error: --optimizer is part of a training step" in capsys.readouterr().err


def test_bench_needs_the_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert main(["bench", "--model", "plain_vit"]) == 2
    err = capsys.readouterr().err
    assert "clone the repository, run pip install -e '.[bench]' there" in err
    assert err.count("\n") == 1


def test_the_commands_are_described_where_they_are_listed():
    """Their names are in COMMANDS, so that `fusion --help` imports none of their modules."""
    folder = Path(bench.__file__).parent
    commands = {p.stem for p in folder.glob("*.py") if "\ndef run(" in p.read_text()}
    assert commands - {"one_kernel"} == set(command_line.COMMANDS)
    assert isinstance(command_line.parser_for([]), argparse.ArgumentParser)


def test_the_gate_leaves_elementwise_training_to_inductor(scratch):
    @Pattern(inductor="pointwise")
    def halved(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 0.5

    halved.kernel(lambda x: x)
    told = "in training Inductor fuses its gradient too, and chooses what to save"
    assert answer(halved, {}, torch.float32, True) == ("", told)
    assert answer(halved, {}, torch.float32, False)[0] == "forward"
