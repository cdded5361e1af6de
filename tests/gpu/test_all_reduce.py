"""On several GPUs: sums over ranks by the kernels, alone, in graphs and in models that tensor
parallelism divides; and asynchronous tensor parallelism.
"""

import time

import pytest
import torch
import torch.multiprocessing as mp

from benchmarks.rank_runs.running import free_port

from ..ranks import tp_plans
from . import sums

SECONDS = 230  # for all jobs; ranks that wait for each other would do so for ever
RANKS = min(2, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What the ranks have observed: job -> results."""
    folder, names = tmp_path_factory.mktemp("sums"), [*sums.JOBS]
    try:
        tp_plans.save(folder)
    except ImportError:
        names = [name for name in names if "llama" not in name]
    given = (RANKS, free_port(), folder, names, "cuda")
    processes = mp.spawn(sums.run_rank, given, nprocs=RANKS, join=False)
    until = time.monotonic() + SECONDS
    try:
        while not processes.join(timeout=1.0) and time.monotonic() < until:
            pass
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def of(seen: list[dict], name: str) -> list[dict]:
    """What each rank has observed in a job."""
    if "llama" in name and name not in seen[0]:
        pytest.importorskip("transformers.distributed")
    found = [one.get(name, {"failed": "the ranks did not come to it in time"}) for one in seen]
    failed = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(found) if "failed" in one]
    assert not failed, "\n".join(failed)
    return found


def test_kernels_are_as_near_to_fp64_as_nccl(seen):
    for one in of(seen, "kernels"):
        for case, found in one.items():
            rounding = found["eps"] * found["scale"]
            for ours, plain in zip(found["ours"], found["plain"], strict=True):
                assert ours <= 2 * plain + rounding, case
            assert found["rstd"] < 0.01, case
            assert found["same"], f"{case}: ranks differ"


def test_many_calls_of_changing_sizes_while_ranks_run_apart(seen):
    assert all(one["wrong"] == [] for one in of(seen, "repeated"))


def test_a_cuda_graph_is_replayed_with_other_values(seen):
    assert all(one["far"] < 1e-5 for one in of(seen, "captured"))


@pytest.mark.parametrize("name", ["two sites", "two sites in CUDA graphs"])
def test_two_sites_in_one_graph(seen, name):
    for one in of(seen, name):
        assert one["fused"] == {"all_reduce_add_rms_norm": 2}
        assert one["far"] < 0.03


MODELS = {
    "plan, inference": (1, 1e-5),
    "plan, training": (1, 1e-4),
    "plan with layer norms, training": (1, 1e-4),
    "llama, inference": (2, 0.05),
    "llama, training": (2, 1e-3),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_eager_code_does(seen, name):
    count, allowed = MODELS[name]
    for one in of(seen, name):
        kinds = {p: n for p, n in one["fused"].items() if p.startswith("all_reduce")}
        assert not one["errors"] and sum(kinds.values()) == count, one["reasons"]
        assert one["far"] < allowed


@pytest.mark.parametrize("by", ["", " by a plan"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_collectives_are_pipelined_as_by_plain_inductor(seen, by, mode):
    for one in of(seen, f"pipelined{by}, {mode}"):
        plain, ours = one["pipelined"]
        assert ours == plain >= 1 and not one["errors"]
        assert one["far"] < 0.03 and one["fused"]
