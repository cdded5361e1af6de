"""DDP, FSDP2, DTensor and tensor parallelism with two gloo processes: equal to plain Inductor, rank
by rank.
"""

import pytest

from .. import selection
from ..ranks.starting import in_two_processes
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
    backends = list(dict.fromkeys(("eager", "inductor", BACKEND)))
    generated = jobs_to_run() if selection.FULL else []
    folder = tmp_path_factory.mktemp("ranks")
    return in_two_processes(jobs.work, folder, jobs_to_run(), backends, generated)


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
