"""DDP, FSDP2, DTensor and tensor parallelism with two gloo processes: equal to plain Inductor, rank
by rank.
"""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.distributed import free_port

from .. import selection
from . import jobs
from .harness import BACKEND, close, sites_of

# Sites that must fuse in each process: two layers of norm + gate; the norm at the end, where its
# frame is compiled.
FUSED = {
    "ddp": {"gated_linear": 2, "layer_norm": 3},
    "fsdp2": {"gated_linear": 2, "layer_norm": 2},
    "fsdp2_by_layer": {"gated_linear": 2, "layer_norm": 2},
    "dtensor": {"gated_linear": 1},
    "tensor_parallel": {"layer_norm": 3},
}


def jobs_to_run() -> list[str]:
    test = "tests/oracle/test_distributed.py::test_two_processes"
    return [job for job in FUSED if selection.FULL or not selection.left_out(f"{test}[{job}]")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both processes saw: [rank][job, backend]."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    backends = list(dict.fromkeys(("eager", "inductor", BACKEND)))
    generated = jobs_to_run() if selection.FULL else []
    given = free_port(), jobs_to_run(), backends, str(folder), generated
    with mock.patch.dict(os.environ):
        # Where the tests before have left the patterns traced; the jobs use no cache of Inductor.
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        mp.spawn(jobs.work, given, nprocs=jobs.WORLD)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(jobs.WORLD)]


@pytest.mark.parametrize("job", FUSED)
def test_two_processes(ranks, job):
    for seen in ranks:
        eager, plain, ours = (seen[job, backend] for backend in ("eager", "inductor", BACKEND))
        assert not ours["errors"]
        close("value", ours["values"], plain["values"], eager["values"])
        close("grad", ours["grads"], plain["grads"], eager["grads"])
        assert ours["graphs"] == plain["graphs"]
        if BACKEND == "fusion":
            counted = {p: sites_of(p, ours["fused"]) for p in ("gated_linear", "layer_norm")}
            assert counted == {"gated_linear": 0, "layer_norm": 0} | FUSED[job], ours["report"]
