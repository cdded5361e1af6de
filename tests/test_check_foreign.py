"""benchmarks.check_foreign: a foreign graph is right with our kernels, wrong, or failed."""

import collections
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import check_foreign
from benchmarks.foreign_code.listed import graphs
from benchmarks.foreign_code.problems import Called, Graph, Problem, features
from benchmarks.foreign_runs import interpreting
from benchmarks.foreign_runs.interpreting import (
    FAILED,
    RIGHT,
    SKIPPED,
    VARIATIONS,
    WRONG,
    checked,
    differences,
    different,
    varied,
)
from fusion_backend.kernels import dynamic


def made(forward, *shape, dtype="f32", mode="train", random=False, **parts):
    """A graph of a function of the module and one activation."""

    def make():
        parameters = {name: torch.nn.Parameter(torch.rand(n)) for name, n in parts.items()}
        return Called(forward, **parameters), (features(*shape),)

    problem = Problem("made", "made", "", make, {}, {}, (), random)
    return Graph(problem, mode, dtype)


def normed(m, x):
    return F.layer_norm(x * m.scale, (16,), m.weight, m.bias)


def norm(dtype="f32"):
    return made(normed, 4, 16, dtype=dtype, scale=16, weight=16, bias=16)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_right(dtype, variation):
    status, sites, words = checked(norm(dtype), variation)
    assert status == RIGHT and not words
    assert sites["layer_norm"] == (variation != "strides")  # its rows are copied there


def planted(monkeypatch, fault):
    """What the rewritten graph returns goes through `fault` first."""
    fuse = interpreting.fuse_graph

    def faulty(*args):
        gm, hidden = fuse(*args)
        return SimpleNamespace(forward=lambda *inputs: (fault(*gm.forward(*inputs)),)), hidden

    monkeypatch.setattr(interpreting, "fuse_graph", faulty)


FAULTS = {
    "a value": lambda y: y * 1.001,
    "a gradient": lambda y: y + (y - y.detach()) * 0.001,
    "no gradient": lambda y: y.detach().requires_grad_() * 1,
    "a dtype": lambda y: y.double(),
    "a shape": lambda y: y[None],
    "a NaN": lambda y: torch.where(y == y.max(), float("nan"), y),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    planted(monkeypatch, FAULTS[name])
    status, _, words = checked(norm(), "as-listed")
    assert status == (FAILED if name == "a shape" else WRONG)
    assert words.startswith("1:" if name == "a gradient" else "")


def test_an_exception_is_found(monkeypatch):
    def fails(y):
        raise ValueError("planted")

    planted(monkeypatch, fails)
    assert checked(norm(), "as-listed")[::2] == (FAILED, "ValueError: planted")


def test_a_graph_that_falls_back_has_failed(monkeypatch):
    def falls_back(gm, options, record, found):
        record.error = "planted"
        return gm, False

    monkeypatch.setattr(interpreting, "fuse_graph", falls_back)
    assert checked(norm(), "as-listed")[::2] == (FAILED, "planted")


def test_what_says_nothing_is_skipped():
    dropped = made(lambda m, x: F.dropout(x), 4, 16, random=True)
    assert checked(dropped, "as-listed")[::2] == (SKIPPED, "it draws random numbers")
    _, _, words = found = checked(made(lambda m, x: x.view(3), 4, 16), "as-listed")
    assert found.status == SKIPPED and words.startswith("eager code fails: RuntimeError")


def test_a_rounding_that_turns_a_relu_over_is_no_fault():
    """Eager code is as far off with inputs that differ by a rounding."""
    exact, near = torch.tensor([1.0, 1.0]).double(), torch.tensor([1.0, 1.0])
    flipped = torch.tensor([1.0, 0.95])
    assert different(flipped, [near, near], exact, 4e-6) == "0.035 from fp64, where eager code is 0"
    assert not different(flipped, [near, flipped], exact, 4e-6)
    assert not different(flipped, [near * 2], exact, 4e-6)  # eager code is not right itself
    assert different(near.long(), [near.long() + 1], exact, 4e-6) == "other numbers"
    assert differences([None], [[near]], [exact], 4e-6) == "0: no gradient"


def test_variations():
    step, usual = varied(norm(), "strides"), varied(norm(), "as-listed")
    assert step.inputs[0].stride() == (1, 4) and torch.equal(step.inputs[0], usual.inputs[0])
    assert step.inputs[0].requires_grad and len(step.wanted(step.inputs)) == 4
    some = varied(norm(), "some-gradients")
    assert len(some.wanted(some.inputs)) == 2 and len(some.dys) == 1


@pytest.mark.parametrize(("variation", "symbolic"), [("as-listed", False), ("dynamic", True)])
def test_sizes(variation, symbolic, monkeypatch):
    fuse, found = interpreting.fuse_graph, []

    def seen(gm, *args):
        values = [n.meta.get("example_value") for n in gm.graph.nodes]
        found.append(any(dynamic(n) for v in values if torch.is_tensor(v) for n in v.shape))
        return fuse(gm, *args)

    monkeypatch.setattr(interpreting, "fuse_graph", seen)
    assert checked(norm(), variation).status == RIGHT and found == [symbolic]


def test_the_command(capsys, monkeypatch):
    found = collections.Counter(layer_norm=2)
    told = {"wrong": interpreting.Outcome(WRONG, found, "0: planted")}
    names = [name for name, g in graphs().items() if g.problem.name == "relational_distillation"]
    arguments = ["--only", "^relational_distillation", "--vary", "as-listed", "dynamic"]
    monkeypatch.setattr(
        check_foreign,
        "checked",
        lambda graph, how: told.get(how, interpreting.Outcome(RIGHT, found)),
    )
    assert check_foreign.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{names[0]}, as-listed: right: 2 layer_norm"
    assert lines[-1] == f"{2 * len(names)} right"
    told["dynamic"] = told["wrong"]
    assert check_foreign.main(arguments) == 1
    assert f"{names[0]}, dynamic: WRONG: 2 layer_norm; 0: planted" in capsys.readouterr().out
    for wrong in (["--only", "^nothing$"], ["--shard", "2/1"]):
        with pytest.raises(SystemExit, match="2"):
            check_foreign.main(wrong)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit, match="2"):
        check_foreign.main(arguments)
    assert "set TRITON_INTERPRET=1" in capsys.readouterr().err
