"""Under `_micro_pipeline_tp` Inductor pipelines as many collectives as without this backend.

One process of a job that is not there, through torch's fake process group. What is compiled is
decided and passed through Inductor's passes as for an H200; no kernel is generated or run.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.compile_fx as compile_fx
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusion_backend
from fusion_backend.compat.pretended_cuda import described, empty_like, moved, pretended
from fusion_backend.kernels.common.target import as_on, gpu

from ..selection import product
from . import sequence_parallel
from .sequence_parallel import INNER, ROWS, WIDTH, SequenceMLP, gather, planned, scatter

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="the pass asks for NCCL")


@pytest.fixture(scope="module", autouse=True)
def job():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with _test_mode({dist.group.WORLD.group_name}):  # symmetric memory is taken for available
        yield
    dist.destroy_process_group()


class Redistributed(nn.Module):
    """Local layers between redistributions of DTensors."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, False), nn.Linear(INNER, WIDTH, False)
        self.mesh = init_device_mesh("cpu", (2,))

    def forward(self, x):
        h = DTensor.from_local(x, self.mesh, [Shard(1)]).redistribute(placements=[Replicate()])
        h = self.down(F.gelu(self.up(h.to_local(grad_placements=[Partial()]))))
        h = DTensor.from_local(h, self.mesh, [Partial()]).redistribute(placements=[Shard(1)])
        return x + h.to_local()


def needs_gathers_along_the_sequence() -> None:
    if torch.__version__.startswith("2.12."):
        pytest.skip("Dynamo of torch 2.12 fails at a gather along any dimension but the first")


def along_the_sequence(**options) -> nn.Module:
    needs_gathers_along_the_sequence()
    return SequenceMLP(**options).bfloat16()


MODELS = {
    "gathered along the first dimension": lambda: SequenceMLP(dim=0).bfloat16(),
    "gathered along the sequence": along_the_sequence,
    "gated": lambda: along_the_sequence(gated=True),
    "with a bias": lambda: along_the_sequence(bias=True),
    "by a plan": planned,
    "redistributed": lambda: Redistributed().bfloat16(),
}


@contextlib.contextmanager
def post_grad_graphs():
    """Inside, Inductor's passes run on each graph as on CUDA, and the list gets it."""
    found = []

    def inner(gm, inputs, **options):
        given_nodes = gm.graph.find_nodes(op="placeholder")
        outputs = [(n, described(n)) for n in gm.graph.find_nodes(op="output")[0].args[0]]
        with pretended():
            given = moved(gm, inputs)
            mode = next(t.fake_mode for t in given if isinstance(t, torch.Tensor))
            with V.set_fake_mode(mode):
                view_to_reshape(gm)
                post_grad_passes(gm, options.get("is_inference", False))
        found.append(gm.graph)

        def run(arguments: list):
            given = dict(zip(given_nodes, arguments, strict=True))  # a mesh, too
            return [empty_like(*like) if like else given.get(n) for n, like in outputs]

        run._boxed_call = True
        return run

    with (
        mock.patch.object(compile_fx, "_compile_fx_inner", inner),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield found


def collectives(model, backend: str, train: bool, gate: str = "auto", asked: bool = True):
    """How many there are of each, in the forward and the backward; then the report."""
    torch._dynamo.reset()
    fusion_backend.reset()
    options = {"fusion.gate": gate, "fusion.measure_s": 0.0} if backend == "fusion" else None
    x = torch.randn(2, ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=train)
    with (
        torch._inductor.config.patch(_micro_pipeline_tp=asked, fx_graph_cache=False),
        as_on(gpu("H200")),
        post_grad_graphs() as graphs,
        torch.set_grad_enabled(train),
    ):
        out = torch.compile(model, backend=backend, options=options)(x)
        if train:
            out.sum().backward()
    report = fusion_backend.report()
    assert not [g.error for g in report.graphs if g.error]
    return [Counter(names(graph)) for graph in graphs], report


def names(graph) -> list[str]:
    called = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [re.sub(r"\.default$", "", t) for t in called if re.match("symm_mem|_c10d", t)]


def fused(report) -> set[str]:
    return {s.pattern for s in report.sites if s.fused}


def refused(report, pattern: str) -> str:
    return next(s.reason for s in report.sites if s.pattern == pattern and not s.fused)


@product(name=[*MODELS], gate=["auto", "always"], train=[False, True])
def test_as_many_are_pipelined_as_under_plain_inductor(name, gate, train):
    model = MODELS[name]()
    plain, _ = collectives(model, "inductor", train)
    assert sum(plain, Counter())["symm_mem.fused_matmul_reduce_scatter"]
    ours, report = collectives(model, "fusion", train, gate)
    assert ours == plain
    # what is not pipelined is fused as always
    assert fused(report) & {"gelu", "layer_norm"} or (name, gate) == ("gated", "auto")


@pytest.mark.parametrize("name", [n for n in MODELS if n != "by a plan"])
def test_the_linear_layers_are_fused_where_nothing_is_pipelined(name):
    """And would hide what the pass looks for."""
    found, report = collectives(MODELS[name](), "fusion", False, "always", asked=False)
    assert fused(report) & {"linear_act", "gated_linear"}
    assert not any(name.startswith("symm_mem") for name in found[0])


def test_the_reason_names_the_collective():
    _, report = collectives(MODELS["gated"](), "fusion", False)
    file = sequence_parallel.__file__
    line = next(n for n, text in enumerate(Path(file).open(), 1) if "funcol.all_gather" in text)
    why = "left to Inductor: its linear layer reads the all-gather at {}, which _micro_pipeline_tp "
    assert refused(report, "gated_linear") == why.format(f"{file}:{line}") + "pipelines"
    _, report = collectives(MODELS["redistributed"](), "fusion", False)
    assert "layer reads the redistribution at" in refused(report, "linear_act")


class Apart(nn.Module):
    """Collectives that the pass would not pipeline with these layers: there is code in between, or
    it is the weight that is gathered.
    """

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER, False)
        self.part = nn.Parameter(torch.randn(INNER // 2, WIDTH))

    def forward(self, x):
        after_norm = F.gelu(self.up(self.norm(gather(x))))
        gathered_weight = F.gelu(F.linear(x, gather(self.part, 0)))
        return scatter(after_norm), gathered_weight


def test_layers_apart_from_collectives_are_fused():
    needs_gathers_along_the_sequence()
    _, report = collectives(Apart().bfloat16(), "fusion", False, "always")
    assert sum(s.pattern == "linear_act" and s.fused for s in report.sites) == 2


def test_a_layer_before_a_reduce_scatter():
    """It reads no all-gather; the second layer of an MLP in training."""
    norm, up, down = (
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, INNER, False),
        nn.Linear(INNER, WIDTH, False),
    )
    model = nn.ModuleList([norm, up, down]).bfloat16()

    def forward(x):
        return scatter(model[2](F.gelu(model[1](model[0](x)))))

    plain, _ = collectives(forward, "inductor", True)
    ours, report = collectives(forward, "fusion", True, "always")
    assert ours == plain and ours[0]["symm_mem.fused_matmul_reduce_scatter"] == 1
    assert "layer feeds the reduce-scatter at" in refused(report, "mlp")
    assert "linear_act" in fused(report)
