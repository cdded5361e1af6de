"""Two processes of one job, through gloo, on a CPU, which do all that the tests of this folder ask:
to start them takes as long as what they do.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.distributed import free_port

from . import decisions
from .trainings import observe_all

WORLD = 2


def in_two_processes(folder: Path) -> list[dict]:
    """What each rank has observed."""
    need_gloo()
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        # Where the tests before have left the patterns traced.
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        mp.spawn(work, (free_port(), folder), nprocs=WORLD)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def need_gloo() -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("no gloo")


def work(rank: int, port: int, folder: Path) -> None:
    """A rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    seen = {"trainings": observe_all(folder), "decisions": decisions.observe(rank, folder)}
    torch.save(seen, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
