"""Two processes for the whole folder: to start them takes as long as what they do. And a job of one
process, which is this one.
"""

from pathlib import Path

import pytest
import torch.distributed as dist

from . import decisions
from .starting import in_two_processes, need_gloo
from .trainings import observe_all


def observed(folder: Path) -> dict:
    return {"trainings": observe_all(folder), "decisions": decisions.observe(folder)}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> list[dict]:
    """What both processes have observed: [rank]["trainings" or "decisions"]."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_two_processes(observed, folder, folder)


@pytest.fixture
def alone():
    need_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
