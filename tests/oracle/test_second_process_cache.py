"""Inductor's and AOTAutograd's caches across processes: hits when nothing changed, misses when
anything of ours did.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from .harness import BACKEND

pytestmark = pytest.mark.skipif(
    BACKEND != "fusion", reason="the plain backend has no cache identity"
)

PATTERN = """
import torch
from torch import Tensor
from fusion_backend import Pattern

@Pattern
def scaled_tanh(x: Tensor, s: float) -> Tensor:
    return torch.tanh(x * s) * s

@scaled_tanh.kernel
def _(x, s):
    return torch.tanh(x * s) * s * {factor}

@scaled_tanh.backward(plain=True)
def _(saved, grad):
    return grad * {slope}
"""

SCRIPT = """
import importlib.machinery, importlib.util, json, sys, types
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
# of the built-in patterns those that fit: each new cache directory has all of them traced
rooms = types.ModuleType("fusion_backend.patterns")
rooms.__path__ = importlib.util.find_spec(rooms.__name__).submodule_search_locations
rooms.__spec__ = importlib.machinery.ModuleSpec(rooms.__name__, None, is_package=True)
sys.modules[rooms.__name__] = rooms
import fusion_backend.patterns.add_mul, fusion_backend.patterns.layer_norm
import user_pattern
import fusion_backend

def model(x, w):
    return F.layer_norm(torch.tanh(F.linear(x, w) * 0.7) * 0.7, (16,)) + (x + w[1]) * w[0]

torch.set_num_threads(1)
torch._inductor.config.cpp.simdlen = 1
device = "cuda" if torch.cuda.is_available() else "cpu"
for options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    fusion_backend.reset()
    torch.manual_seed(0)
    x, w = (torch.randn(n, 16, device=device, requires_grad=True) for n in (8, 16))
    out = torch.compile(model, backend="fusion", options=options)(x, w)
    out.sin().sum().backward()
    report = fusion_backend.report()
    print(json.dumps({
        "counters": {k: counters[group][k] for group in ("inductor", "aot_autograd")
                     for k in counters[group]},
        "values": [t.tolist() for t in (out, x.grad, w.grad)],
        "sites": [(s.pattern, s.where, s.fused, s.reason, s.forward, s.backward)
                  for s in report.sites],
    }))
"""

ALWAYS = {"fusion.gate": "always"}


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Run the script in a new process, with a cache directory that all of them share."""
    folder = tmp_path_factory.mktemp("second_process")
    (folder / "script.py").write_text(SCRIPT)

    def start(*options, factor=1, slope=3, **environment):
        (folder / "user_pattern.py").write_text(PATTERN.format(factor=factor, slope=slope))
        shared = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, "script.py", json.dumps(options)],
            cwd=folder,
            env={**os.environ, **shared, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return start


@pytest.fixture(scope="module")
def first(process):
    return process(ALWAYS, PYTHONHASHSEED="1")[0]


def hits(seen) -> tuple[int, int]:
    return seen["counters"].get("fxgraph_cache_hit", 0), seen["counters"].get(
        "autograd_cache_hit", 0
    )


def test_first_process_misses(first):
    assert hits(first) == (0, 0)
    assert first["counters"]["autograd_cache_miss"] == 1
    assert {s[0] for s in first["sites"] if s[2]} == {"scaled_tanh", "layer_norm", "add_mul"}


def test_second_process(process, first):
    """Unchanged: both caches answer. Another option: neither may."""
    options = ALWAYS, ALWAYS | {"fusion.only": "layer_norm"}
    same, only = process(*options, PYTHONHASHSEED="2")
    assert (
        same["counters"].get("autograd_cache_hit") == 1
        and "autograd_cache_miss" not in same["counters"]
    )
    assert (
        "autograd_cache_bypass" not in same["counters"]
        and "fxgraph_cache_bypass" not in same["counters"]
    )
    assert same["counters"]["fxgraph_cache_hit"] == 2, "forward and backward"
    assert (same["values"], same["sites"]) == (first["values"], first["sites"])
    assert hits(only) == (0, 0)
    assert [s[0] for s in only["sites"] if s[2]] == ["layer_norm"]


@pytest.mark.full
def test_second_process_without_a_site(process, first):
    (never,) = process({"fusion.gate": "never"})
    assert hits(never) == (0, 0)
    assert not any(s[2] for s in never["sites"])


def test_edited_backward(process, first):
    """The second process must give the new gradient, not the one in the cache."""
    seen = process(ALWAYS, slope=5)[0]
    assert hits(seen) == (0, 0)
    (out, *grads), (old_out, *old_grads) = seen["values"], first["values"]
    assert out == old_out
    assert all(new != old for new, old in zip(grads, old_grads, strict=True))


def test_edited_kernel(process, first):
    """A kernel that was edited is a miss, though on a CPU the reference runs."""
    seen = process(ALWAYS, factor=2)[0]
    assert hits(seen) == (0, 0)
    assert (seen["values"] == first["values"]) == (not torch.cuda.is_available())
