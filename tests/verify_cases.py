"""What tests of `fusion.verify` share: stubs in Inductor's place, and races that are over."""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend
from fusion_backend.frontends import dynamo as backend
from fusion_backend.frontends import verify
from fusion_backend.measure.timing import Race

OPTIONS = {"fusion.gate": "always"}
VERIFY = {**OPTIONS, "fusion.verify": True}
TIMED = verify.timed


def norm(x, w):
    return F.layer_norm(x.exp(), (8,), w)


@pytest.fixture
def xw():
    return torch.randn(4, 8), torch.rand(8)


def of_times(plain: float, ours: float, samples: int = 20) -> Race:
    """A race that is over."""
    found = Race()
    for _ in range(samples):
        found.add(plain, ours)
    return found


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """Both run once more, and nothing is certain. A test may add times, which decide."""
    races: list[Race] = []

    def timed(plain, ours, clock):
        clock(plain), clock(ours)
        return races.pop() if races else of_times(1.0, 1.0, 2)

    monkeypatch.setattr(verify, "timed", timed)
    return races


class Stubs:
    """Inductor's place, taken by the graph itself: what is called, and what it does instead."""

    def __init__(self):
        self.calls, self.compiled = [], []
        self.ours = self.plain = lambda run, *args: run(*args)

    def compiler(self, kind: str):
        def inductor(mode, options, *told):
            def compile(gm, inputs):
                self.compiled.append((kind, (options or {}).get("triton.cudagraphs")))

                def run(*args):
                    self.calls.append(kind)
                    return getattr(self, kind)(gm.forward, *args)

                return run

            compile.config = {k: v for k, v in (options or {}).items() if k.startswith("triton")}
            return compile

        return inductor


@pytest.fixture
def stubs(monkeypatch):
    found = Stubs()
    monkeypatch.setattr(backend, "inductor", found.compiler("plain"))
    monkeypatch.setattr(backend, "inductor_of_ours", found.compiler("ours"))
    return found


def told() -> str:
    (record,) = fusion_backend.report().graphs
    return record.verified
