"""Two processes of one job, through gloo, on a CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.rank_runs.running import free_port

from .. import traced

WORLD = 2


def in_two_processes(work: Callable, folder: Path, *given) -> list:
    """What `work(*given)` returns on each rank. The processes are given no CUDA device."""
    need_gloo()
    traced.trace()
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        # Where the tests before have left the patterns traced.
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        mp.get_context("forkserver").set_forkserver_preload([f"{__package__}.prepared"])
        given = free_port(), work, folder, given
        mp.start_processes(run_rank, given, nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def need_gloo() -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo")


def run_rank(rank: int, port: int, work: Callable, folder: Path, given: tuple) -> None:
    from . import prepared  # noqa: F401 - where it could not be loaded before, this says why

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.save(work(*given), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
