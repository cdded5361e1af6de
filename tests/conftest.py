"""CPU runs interpret the kernels; every test starts with fresh compilers and poisoned empties."""

import contextlib
import gc
import itertools
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
    # no pool of workers, here and in what tests start
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch._inductor.config
import torch.distributed as dist

import fusion_backend
from fusion_backend import remembered

from . import interpreter, quick_pytorch, selection, traced
from .eager_kernels import eager_kernels
from .sizes import watched

interpreter.hasten()


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="every combination of every dimension, and Inductor's own code in every test",
    )


def pytest_configure(config):
    selection.FULL = config.getoption("--full")
    if not selection.FULL:
        no_vectors()
        one_thread()
        quick_pytorch.hasten()


def no_vectors():
    """Inductor's C++ has no vectors, here and in what tests start. What it makes of them is its
    own; and for every new cache directory it compiles a program for each set of instructions, to
    see which ones work: 7 s of CPU time.
    """
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
    torch._inductor.config.cpp.vec_isa_ok = False


def one_thread():
    """Here and in what tests start, where there is no GPU. Two processes run tests, and threads of
    one that wait for each other would take the cores of the other.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)


def pytest_collection_finish():
    """What PyTorch and the modules of tests hold is not looked through at every collection of
    garbage, and there are fewer of those.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        traced.trace()  # before the first test that starts processes, all of which would
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def pytest_collection_modifyitems(config, items):
    if not selection.FULL:
        left = [
            item
            for item in items
            if "full" not in item.keywords and not selection.left_out(item.nodeid)
        ]
        files = [item.nodeid.partition("::")[0] for item in left]  # not where it is defined
        functions = [getattr(item, "originalname", item.name) for item in left]
        names = list(zip(files, functions, strict=True))
        left = list(itertools.compress(left, selection.sampled(names)))
        taken = {*left}
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = left
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    fusion_backend.reset()
    torch.manual_seed(0)
    remembered.USED = False  # what the passes do is tested; test_remembered.py switches it on


@pytest.fixture(autouse=True)
def sizes_left_alone():
    """No pass in any test adds a guard, a replacement or a runtime assertion."""
    with watched() as changed:
        yield
    assert not changed, changed


@pytest.fixture
def alone():
    """This process is a job of one rank."""
    from .ranks.starting import need_gloo  # takes long to load

    need_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def scalar_code():
    """C++ without vectors, which compiles faster; what Inductor makes of them is its own."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield


@pytest.fixture(name="eager_kernels")
def eager_kernels_unless_full():
    """What Inductor would compile runs operator by operator; what is checked lies before that."""
    with contextlib.nullcontext() if selection.FULL else eager_kernels():
        yield


@pytest.fixture
def scratch():
    """Forget patterns and rules that a test defines."""
    from fusion_backend.frontends.loading import patterns
    from fusion_backend.ir.rules import TABLES
    from fusion_backend.ops.registry import unregister

    before = {p.name for p in patterns()}
    rules = [(table, dict(table)) for table in TABLES]
    yield
    for table, had in rules:
        for subject in [s for s in table if s not in had]:
            del table[subject]
        for subject, known in had.items():
            if table[subject] is not known:
                table[subject] = known
    for p in patterns():
        if p.name not in before:
            unregister(p.name)


@pytest.fixture
def poisoned_empties():
    """An element that a kernel never writes is NaN. Operators without a deterministic kernel run as
    they are: on GPUs, the references of some losses.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
