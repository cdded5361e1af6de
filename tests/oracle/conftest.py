"""A cache directory of its own for the session: nothing compiled before may answer. Only the
templates of patterns are there, for the processes that later tests start.
"""

import os
from unittest import mock

import pytest
import torch

from .. import traced


@pytest.fixture(scope="session", autouse=True)
def fresh_cache(tmp_path_factory):
    folder = traced.give(tmp_path_factory.mktemp("inductor"))
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)):
        yield


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
