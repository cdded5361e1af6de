"""A rank: one process of a row, which trains in turn with the others."""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.rank_runs.training import Plan, row_of
from benchmarks.records.runs import Run
from benchmarks.subjects.plain_models import Size


class Work(NamedTuple):
    """What every rank is given: a model, its size, and the way it is spread. Rank 0 adds the row to
    `run`, and saves that as `out`.
    """

    job: tuple[str, Size, str]
    plan: Plan
    ranks: int
    port: int
    device: str
    run: Run
    out: Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def started(rank: int, ranks: int, port: int, device: str) -> Iterator[torch.device]:
    """Inside, this process is a rank of a job: through NCCL on its GPU, or gloo on a CPU."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
    }
    mine = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(mine)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield mine
    finally:
        dist.destroy_process_group()


def work(rank: int, mine: Work) -> None:
    warnings.simplefilter("ignore")
    with started(rank, mine.ranks, mine.port, mine.device) as device:
        row = row_of(*mine.job, mine.plan, device)
    if rank == 0:
        mine.run.rows.append(row)
        mine.run.save(mine.out)
