"""What two processes decide where they do not see the same: another measurement, another graph, a
fault in one of them. For test_decisions.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fusion_backend
from fusion_backend import remembered
from fusion_backend.measure.agree import Ranks

from ..eager_kernels import eager_kernels
from ..measured_cases import as_on_a_gpu, decided
from .model import WORDS, Model
from .trainings import compiler, fsdp_blocks


def norm(x):
    return F.layer_norm(x.sin(), (4096,))


def softmax(x):
    return torch.softmax(x.sin(), -1)


def said(record) -> list[tuple]:
    return [(s.pattern, s.fused, s.reason) for s in record.sites if s.counted]


def measured(rank: int, folder: Path) -> dict:
    """What is decided of kernels that are faster where rank 0 measures, and slower on rank 1: by
    each alone, then together with these answers kept, then together without answers.
    """
    found, x = {}, torch.randn(4096, 4096, dtype=torch.bfloat16)
    alone = {"claim": lambda self, key: True, "publish": lambda self, key, answer: answer}
    with pytest.MonkeyPatch.context() as patch:
        ratio = 1.5 if rank == 0 else 0.5
        with as_on_a_gpu(patch, folder / f"own{rank}", lambda chosen: ratio):
            with mock.patch.multiple(Ranks, **alone):
                found["alone"] = said(decided(norm, x))
            found["kept"] = said(decided(norm, x, measure_s=0))
        with as_on_a_gpu(patch, folder / f"other{rank}", lambda chosen: ratio):
            record = decided(softmax, x)
            found |= {"together": said(record), "measured": record.measured}
            # each decides what the other does not
            found["apart"] = said(decided(norm, x[: 1024 * (1 + rank)]))
    return found


def failing(rank: int) -> dict:
    """The losses of two steps, eager and fused, where rank 1 cannot decide."""
    fusion_backend.reset()
    broken = mock.patch.object(remembered, "fuse", side_effect=RuntimeError("planted"))
    with broken if rank == 1 else contextlib.nullcontext():
        losses = {backend: two_steps(backend) for backend in ("eager", "fusion")}
    graphs = fusion_backend.report().graphs
    fused = [s.pattern for g in graphs for s in g.sites if s.fused]
    return {"losses": losses, "errors": [g.error for g in graphs], "fused": fused}


def two_steps(backend: str) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    call = compiler(backend)(DistributedDataParallel(Model(layers=1)))
    optimizer, ids = torch.optim.SGD(call.parameters(), lr=0.2), torch.randint(WORDS, (4, 8))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = call(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Norm(nn.Module):
    """One block, which is all that is compiled: Inductor's own code for more takes long."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(16)])

    def forward(self, x):
        return self.layers[0](x).square().sum()


def restarted() -> list[dict]:
    """What the caches of Inductor and AOTAutograd said in a first and a second compilation of a
    block that is sharded, and whether its graph was remembered.
    """
    found = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for _ in range(2):
        torch.compiler.reset()
        fusion_backend.reset()
        counters.clear()
        call = fsdp_blocks(Norm(), mesh, compiler("fusion"))
        call(torch.randn(4, 16)).backward()
        dist.barrier()
        (graph,) = fusion_backend.report().graphs
        caches = {**counters["inductor"], **counters["aot_autograd"]}
        said = {name: n for name, n in caches.items() if name.startswith(("fxgraph", "autograd"))}
        fused = any(s.fused for s in graph.sites)
        found.append(said | {"remembered": graph.remembered, "fused": fused})
    return found


def observe(folder: Path) -> dict:
    rank = dist.get_rank()
    with eager_kernels():
        found = {"measured": measured(rank, folder), "failing": failing(rank)}
    return found | {"restarted": restarted()}
