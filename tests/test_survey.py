"""benchmarks.survey: a model class is right, wrong, failed, or says nothing about the backend."""

import pytest
import torch
from torch import nn

from benchmarks import survey
from benchmarks.compiler.survey import Skipped, stop, surveyed
from fusion_backend.frontends.explain import Collector


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return {"logits": self.out(self.norm(x))}


class Lies(Collector):
    """A backend that computes something else."""

    def __init__(self, change):
        super().__init__({"fusion.gate": "always"})
        self.change = change

    def __call__(self, gm, inputs):
        run = super().__call__(gm, inputs)
        return lambda *args: self.change(run(*args))


def raises(out):
    raise ZeroDivisionError("of the backend")


def with_other_gradients(out):
    return [o + 1e-2 * (o - o.detach()) for o in out]


@pytest.mark.parametrize(
    "change, wrong",
    [
        (lambda out: out, ""),
        (lambda out: [1.01 * o for o in out], "WRONG: the output is 1.0e-02 off"),
        (with_other_gradients, "WRONG: the gradient of norm.weight is 1.0e-02 off"),
        (raises, "FAILED: ZeroDivisionError: of the backend"),
    ],
    ids=["right", "another output", "other gradients", "a failure"],
)
def test_what_is_wrong_is_told(change, wrong):
    found, collector = surveyed(Model(), dict(x=torch.randn(4, 8)), False, Lies(change))
    assert found.startswith(wrong) and bool(found) == bool(wrong)
    assert wrong or {site.pattern for site in collector.report.fused} == {"norm_linear"}


def test_a_failure_of_the_pass_is_told():
    class Fails(Collector):
        def __call__(self, gm, inputs):
            run = super().__call__(gm, inputs)
            # as the backend notes it before it hands the graph to Inductor
            self.report.graphs[0].error = "KeyError: y"
            return run

    found, _ = surveyed(Model(), dict(x=torch.randn(4, 8)), False, Fails({"fusion.gate": "always"}))
    assert found == "FAILED: KeyError: y"


def test_what_fails_without_us_is_no_failure():
    with pytest.raises(Skipped, match="eager: "):
        surveyed(Model(), dict(x=torch.randn(4, 7)), False)


def test_what_takes_too_long_is_no_failure():
    """Whatever it interrupts, a compilation say, that is not tried again without us."""

    def slow(out):
        stop()

    with pytest.raises(Skipped, match="takes longer than"):
        surveyed(Model(), dict(x=torch.randn(4, 8)), False, Lies(slow))


def test_classes_of_transformers(capsys):
    pytest.importorskip("transformers")
    argv = [
        "--kind",
        "causal",
        "--only",
        "GPTNeoXForCausalLM",
        "DbrxForCausalLM",
        "--attention",
        "eager",
    ]
    assert survey.main(argv) == 0
    skipped, right, counts = capsys.readouterr().out.splitlines()
    assert "DbrxForCausalLM: skipped: it cannot be built" in skipped
    assert "GPTNeoXForCausalLM: ok" in right and "2 attention" in right
    assert counts.endswith("1 skipped, 1 ok")


@pytest.mark.parametrize("argv", [["--part", "3/2"], ["--part", "x"], ["--kind", "speech"]])
def test_arguments_that_make_no_sense(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        survey.main(argv)
    assert stopped.value.code == 2
