"""Two processes for the whole folder: to start them takes as long as what they do."""

from pathlib import Path

import pytest

from . import decisions
from .starting import in_two_processes
from .trainings import observe_all


def observed(folder: Path) -> dict:
    return {"trainings": observe_all(folder), "decisions": decisions.observe(folder)}


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> list[dict]:
    """What both processes have observed: [rank]["trainings" or "decisions"]."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_two_processes(observed, folder, folder)
