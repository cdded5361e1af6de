"""A job of one process trains like others, and decides as a process by itself does."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fusion_backend
from fusion_backend import remembered
from fusion_backend.compat.distributed import default_store
from fusion_backend.measure.agree import Ranks

from ..eager_kernels import eager_kernels
from .trainings import JOBS, STEPS, observe


@pytest.mark.parametrize("job", ["fsdp by blocks, accumulation, resumed", "tensor parallel"])
def test_the_losses_are_those_of_eager(alone, job, tmp_path):
    assert job in JOBS
    with eager_kernels():
        eager, ours = (observe(job, backend, tmp_path) for backend in ("eager", "fusion"))
    assert len(ours["losses"]) == STEPS and ours["fused"] and not ours["errors"]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-5)


def norm(x):
    return F.layer_norm(x.sin(), (16,))


@pytest.mark.parametrize("world", [1, 2])
def test_graphs_are_remembered_by_one_process_alone(alone, world, tmp_path, monkeypatch):
    """With more ranks, the others may decide otherwise."""
    monkeypatch.setattr(dist, "get_world_size", lambda *group: world)
    monkeypatch.setattr(remembered, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(remembered, "USED", True)
    assert (Ranks().store is None) == (default_store()[0] is None) == (world == 1)
    for _ in range(2):
        torch.compiler.reset()
        with eager_kernels():
            options = {"fusion.gate": "always"}
            torch.compile(norm, backend="fusion", options=options)(torch.randn(4, 16))
    first, second = fusion_backend.report().graphs
    assert not first.remembered and second.remembered == (world == 1)
