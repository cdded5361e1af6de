"""CPU runs interpret the kernels; every test starts with fresh compilers and poisoned empties."""

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
    # no pool of workers, here and in what tests start
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch._inductor.config

import fusion_backend

from .sizes import watched


def pytest_collection_finish():
    """What PyTorch and the modules of tests hold is not looked through at every collection of
    garbage.
    """
    gc.freeze()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    fusion_backend.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def sizes_left_alone():
    """No pass in any test adds a guard, a replacement or a runtime assertion."""
    with watched() as changed:
        yield
    assert not changed, changed


@pytest.fixture
def scalar_code():
    """C++ without vectors, which compiles faster; what Inductor makes of them is its own."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture
def scratch():
    """Forget patterns that a test defines."""
    from fusion_backend.frontends.loading import patterns
    from fusion_backend.ops.registry import unregister

    before = {p.name for p in patterns()}
    yield
    for p in patterns():
        if p.name not in before:
            unregister(p.name)


@pytest.fixture
def poisoned_empties():
    """An element that a kernel never writes is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
