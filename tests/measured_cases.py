"""Graphs, scopes and made-up contests for the tests of the measured gate, on a CPU.

`as_on_a_gpu` lets the judge take a CPU for a GPU. Only what runs without a kernel is proposed there
(attention with a mask that can be recognised), so a contest compares real code.
"""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.compiler.regions import scopes
from fusion_backend.decide import gate as gating
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.measure import judge as judging
from fusion_backend.measure import measuring, store
from fusion_backend.measure.allowance import Allowance
from fusion_backend.measure.judge import cut_of
from fusion_backend.measure.region import regions
from fusion_backend.measure.timing import Race
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord


class Block(nn.Module):
    """Two normalisations, causal attention with a mask that is computed, and a feed-forward."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, s, n = x.shape
        q, k, v = (
            t.view(b, s, 2, n // 2).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, n))
        return x + self.down(F.gelu(self.up(self.second(x))))


def regions_of(fn, *inputs, only: str = "", **more):
    """(scope, the regions of what is fused), where only sites of these patterns count."""
    (top,) = scopes(fn, *inputs, **more)
    chosen = [
        d
        for d in top.decisions
        if d.fused and d.match.pattern.name in (only or d.match.pattern.name)
    ]
    return top, regions(top.facts, chosen)


def cuts_of(fn, *inputs, **more):
    top, found = regions_of(fn, *inputs, **more)
    return [cut_of(top.gate, region) for region in found]


@dataclasses.dataclass
class Stub:
    """A contest whose races end as a function of the sites that are replaced says."""

    ratio_of: object
    replaced: list = dataclasses.field(default_factory=list)
    compile_s: float = 0.0

    def generated(self, chosen):
        return False

    @property
    def asked(self) -> list[list[str]]:
        return [[d.match.pattern.name for d in chosen] for chosen in self.replaced]

    def against(self, chosen, seconds):
        self.replaced.append(chosen)
        given = self.ratio_of(chosen)
        if isinstance(given, Exception):
            raise given
        race = Race()
        noise, ratio = given if isinstance(given, tuple) else (0.0, given)
        for i in range(20):
            race.add(1.0 * ratio * (1 + noise * (-1) ** i), 1.0)
        return race, 0


@contextlib.contextmanager
def as_on_a_gpu(monkeypatch, tmp_path, ratio_of=None, gpu: str = "NVIDIA H200"):
    """Inside, the judge takes a CPU for this GPU, and keeps its answers in a folder of the test.
    With `ratio_of`, contests are made up. Yields the stub.
    """
    stub = Stub(ratio_of)
    with monkeypatch.context() as m:
        for module in (judging, measuring):
            m.setattr(module, "gpu_name", lambda device: gpu)
        m.setattr(judging, "on_gpu", lambda d: True)
        m.setattr(gating, "on_gpu", lambda t: True)  # its kernels then run as their references
        m.setattr(measuring, "ALLOWANCE", Allowance())
        m.setattr(store, "cache_folder", lambda: str(tmp_path))
        m.setattr(store, "seed", dict)
        store.store_in.cache_clear()
        if ratio_of is not None:
            m.setattr(measuring, "contest", lambda *how: contextlib.nullcontext(stub))
        yield stub
    store.store_in.cache_clear()


def empty_results(gm):
    """What runs instead of a graph whose values nobody looks at, and which is large."""
    (output,) = gm.graph.find_nodes(op="output")
    made = [getattr(n, "meta", {}).get("example_value") for n in output.args[0]]
    tensors = all(isinstance(v, torch.Tensor) for v in made)
    if not tensors or not all(type(size) is int for v in made for size in v.shape):
        return gm.forward
    return lambda *inputs: [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in made]


def decided(fn, *inputs, compiles=True, dynamic=None, **options) -> GraphRecord:
    record = GraphRecord(0)

    def backend(gm, example_inputs):
        fuse_graph(gm, Options(**options), record, usable(patterns()), compiles)
        return empty_results(gm)

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    assert record.error is None
    return record


def pattern(name):
    return next(p for p in patterns() if p.name == name)


def told(record, *names):
    return [
        (s.pattern, s.fused, s.reason) for s in record.sites if s.pattern in names and s.counted
    ]


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def long_norm():
    return torch.randn(64, 65536, dtype=torch.bfloat16)


def two_norms(x, y):
    return F.layer_norm(x, (4096,)) * torch.softmax(y, -1)


class Answers:
    """ratio_of for a stub: by the names of the sites that are replaced."""

    def __init__(self, **ratios):
        self.ratios = ratios

    def __call__(self, chosen):
        return self.ratios["_".join(sorted(d.match.pattern.name for d in chosen))]


def refused_by_the_tables(x):
    return F.relu(x.sin()).square() * F.layer_norm(x * 2, (1024,))


def names_of_sites(region):
    return [d.match.pattern.name for d in region.sites]


NORMS = Options(gate="always", only=("add_rms_norm", "rms_norm"))


def rms(x, weight):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * weight
