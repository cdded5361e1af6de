"""benchmarks.survey: a model class is right, wrong, failed, or says nothing about the backend."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import survey
from benchmarks.compiler import regions
from benchmarks.compiler.survey import Skipped, compared, stop, surveyed
from fusion_backend.frontends.explain import Collector
from tests.measured_cases import cuts_of


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


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 16)

    def forward(self, x, scale):
        q = self.qkv(x).view(2, 8, 2, 8).transpose(1, 2)
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        return {"y": F.scaled_dot_product_attention(q, q, q, mask) * scale}


def test_a_site_that_disagrees_with_its_region_is_told(monkeypatch):
    given = dict(x=torch.randn(2, 8, 16), scale=2.0)
    assert compared(Causal(), given, False) == "ok"
    made_up = regions.made_up

    def reversed_masks(cut, device):
        return [t.flip(-1) if t.dtype == torch.bool else t for t in made_up(cut, device)]

    monkeypatch.setattr(regions, "made_up", reversed_masks)
    assert compared(Causal(), given, False).startswith("WRONG: attention: result 0 differs by ")
    with torch.no_grad():
        assert compared(Causal(), given, False).startswith("WRONG: attention: result 0 differs by ")


def test_a_region_that_cannot_be_compared_has_failed(monkeypatch):
    given = dict(x=torch.randn(2, 8, 16), scale=2.0)
    monkeypatch.setattr(regions, "made_up", raises)
    assert compared(Causal(), given, False).startswith("FAILED: ")

    class Breaks(Causal):
        def forward(self, x, scale):
            raise ValueError("of the model")

    with pytest.raises(Skipped, match="of the model"):
        compared(Breaks(), given, False)


@pytest.mark.parametrize("train", [False, True])
def test_results_and_gradients_of_a_region(train):
    with torch.set_grad_enabled(train):
        (cut,) = cuts_of(lambda x: Causal()(x, 2.0)["y"], torch.randn(2, 8, 16), only="attention")
    values = regions.values_of(cut, [], regions.made_up(cut, torch.device("cpu")))
    assert [v.name for v in values] == ["result 0"] + ["gradient 0"] * train
