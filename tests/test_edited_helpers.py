"""Whatever a pattern reaches may be edited: the next process computes what the files say, this one
what it has loaded.

Three processes share the cache of all tests, for what they compile is slow to build: one whose
files are edited between import and compilation, one that finds them edited, and one that finds
nothing changed.
"""

import json
import os
import subprocess
import sys
import uuid

import pytest

HELPERS = """
import functools
import torch

ALPHA = FACTOR

class Config:
    alpha = FACTOR
    def scale(self, x): return x * FACTOR

def act(x): return inner(x)
def inner(x): return torch.sin(x * FACTOR)

def around(factor):
    def inside(x): return torch.cos(x * factor)
    return inside

closed = around(FACTOR)
def default(x, factor=FACTOR): return torch.tan(x * factor)
partial = functools.partial(lambda factor, x: torch.cosh(x * factor), FACTOR)
def slope(grad):
    "NONCE"
    return grad * FACTOR
"""
MINE = """
import helpers
import torch
from helpers import ALPHA, Config
from torch import Tensor
from fusion_backend import Pattern
from fusion_backend.kernels.common.dropout import dropped

@Pattern
def by_module(x: Tensor) -> Tensor: return helpers.act(x)
@Pattern
def by_constant(x: Tensor) -> Tensor: return torch.sinh(x * ALPHA)
@Pattern
def by_closure(x: Tensor) -> Tensor: return helpers.closed(x)
@Pattern
def by_default(x: Tensor) -> Tensor: return helpers.default(x)
@Pattern
def by_attribute(x: Tensor) -> Tensor: return torch.erf(x * Config.alpha)
@Pattern
def by_method(x: Tensor) -> Tensor: return torch.asinh(Config().scale(x))
@Pattern
def by_partial(x: Tensor) -> Tensor: return helpers.partial(x)

@Pattern
def by_seed(x: Tensor, p: float) -> Tensor: return torch.nn.functional.dropout(x, p, True)
@by_seed.seeded
def _(x, p, seed): return dropped(x, seed, p) * helpers.ALPHA / helpers.ALPHA

@Pattern
def by_gradient(x: Tensor) -> Tensor: return torch.atan(x)
@by_gradient.backward(plain=True)
def _(saved, grad): return helpers.slope(grad)
"""
SCRIPT = """
import importlib.machinery, json, pathlib, sys, types
import torch
from torch._dynamo.utils import counters
# no built-in patterns, which take long to trace
rooms = types.ModuleType("fusion_backend.patterns")
rooms.__spec__ = importlib.machinery.ModuleSpec(rooms.__name__, None, is_package=True)
sys.modules[rooms.__name__] = rooms
import mine
for file in pathlib.Path("edited").glob("*.py"):
    pathlib.Path(file.name).write_text(file.read_text())
from fusion_backend.cache import disk
from fusion_backend.frontends.loading import patterns
from fusion_backend.cache.identity import key_of
from fusion_backend.testing import collect

FUNCTIONS = torch.sin, torch.sinh, torch.cos, torch.tan, torch.erf, torch.asinh, torch.cosh
def model(k):
    return lambda *xs: tuple(f(x * k) for f, x in zip(FUNCTIONS, xs))

x = torch.linspace(-0.5, 0.5, 16)
xs = [x + i for i in range(7)]
keys = {p.name: key_of([p], []) for p in patterns()}
kept = [p.name for p in patterns() if disk.file_of(p).exists()]
fused, error = {}, 0.0
for k in (2.0, 3.0):
    found = collect(model(k), *xs, dynamic=False)
    fused[k] = sorted(s.pattern for s in found.report.fused)
    results = zip(found.graphs[0](*xs), model(k)(*xs))
    error = max(error, *((a - b).abs().max().item() for a, b in results))
torch._inductor.config.cpp.simdlen = 1
torch._dynamo.reset()
counters.clear()
x.requires_grad_()
def both(x): return torch.atan(x), torch.sin(x * 3.0)
out = torch.compile(both, backend="fusion", options={"fusion.gate": "always"})(x)
error = max(error, *((a - b).abs().max().item() for a, b in zip(out, both(x))))
out[0].sum().backward()
hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
found = dict(keys=keys, kept=kept, fused=fused, error=error, slope=x.grad.tolist(), hits=hits)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What each of the three prints."""
    folder = tmp_path_factory.mktemp("edited_helpers")
    (folder / "edited").mkdir()
    (folder / "script.py").write_text(SCRIPT)
    nonce = uuid.uuid4().hex  # no earlier run has compiled it
    for place, factor in ((folder, "2.0"), (folder / "edited", "3.0")):
        (place / "mine.py").write_text(MINE)
        (place / "helpers.py").write_text(HELPERS.replace("FACTOR", factor).replace("NONCE", nonce))
    found = []
    for i in range(3):
        environment = (
            {**os.environ}
            | {"PYTHONHASHSEED": str(i)}
            | ({"PYTHONDONTWRITEBYTECODE": "1"} if i == 0 else {})
        )
        command = [sys.executable, "script.py"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found


FORMULAS = [
    "by_attribute",
    "by_closure",
    "by_constant",
    "by_default",
    "by_method",
    "by_module",
    "by_partial",
]


def test_what_was_loaded_is_what_runs(processes):
    """The files say 3 when it compiles."""
    first = processes[0]
    assert first["fused"] == {"2.0": FORMULAS, "3.0": []}
    assert first["error"] < 1e-6 and first["slope"] == [2.0] * 16
    assert first["hits"] == [0, 0] and first["kept"] == []


def test_after_an_edit_nothing_is_taken_from_the_caches(processes):
    first, second, _ = processes
    assert second["fused"] == {"2.0": [], "3.0": FORMULAS}
    assert second["error"] < 1e-6 and second["slope"] == [3.0] * 16
    assert second["hits"] == [0, 0] and second["kept"] == []
    assert all(second["keys"][name] != key for name, key in first["keys"].items())


def test_without_an_edit_everything_is(processes):
    """Another hash seed, and the helpers from their .pyc."""
    _, second, third = processes
    for what in ("keys", "fused", "error", "slope"):
        assert third[what] == second[what], what
    assert third["kept"] == [*second["keys"]] and third["hits"] == [2, 1]
