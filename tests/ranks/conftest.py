"""Two processes for the whole folder."""

import pytest

from .starting import in_two_processes


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> list[dict]:
    """What both processes have observed: [rank]["trainings" or "decisions"]."""
    return in_two_processes(tmp_path_factory.mktemp("ranks"))
