"""Which launcher Inductor gives our kernels, and what it keeps of them with a compiled graph."""

import json
from types import SimpleNamespace

import pytest
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from fusion_backend.compat import launchers
from fusion_backend.compat.launchers import inductors_launcher
from tests.without_interpreter import output_of


class Compiled(launchers.TritonCompileResult):
    """A compiled kernel, as it comes back from a worker."""

    def __init__(self, name: str):
        self.kernel = SimpleNamespace(src=SimpleNamespace(fn=SimpleNamespace(__name__=name)))
        self.config, self.compile_meta, self.inductor_meta = "config", {}, {}


class Static:
    """Inductor's form of a compiled kernel."""

    taken = "norm_kernel_0", "norm_kernel", "user_kernel"

    def __init__(self, kernel, config, compile_meta, inductor_meta):
        assert config == "config"
        self.kernel = kernel

    @classmethod
    def can_statically_launch(cls, kernel, inductor_meta, compile_meta, heuristic):
        assert heuristic is not launchers.HeuristicType.USER_AUTOTUNE
        name = kernel.src.fn.__name__
        return name if name in cls.taken else None


@pytest.fixture
def forms(monkeypatch):
    """The forms in which the kernels of a tuner arrive; Inductor's takes those that it names."""
    monkeypatch.setattr(launchers, "USED", True)
    monkeypatch.setattr(launchers, "StaticTritonCompileResult", Static)
    monkeypatch.setattr(CachingAutotuner, "_precompile_worker", lambda tuner: None)

    def arrive(*names: str) -> list[type]:
        tuner = SimpleNamespace(compile_results=[Compiled(name) for name in names])
        CachingAutotuner._precompile_worker(tuner)
        return [type(result) for result in tuner.compile_results]

    return arrive


@pytest.mark.parametrize("name", ["norm_kernel", "norm_kernel_0"])
def test_our_kernels_get_inductors_launcher(forms, name):
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert forms(name, "user_kernel") == [Static, Compiled]
        with inductors_launcher(lambda: {"norm_kernel"}):  # forward and backward are nested
            assert forms(name, "user_kernel") == [Static, Compiled]
    assert forms(name) == [Compiled]


def test_nothing_is_changed_where_it_is_not_used(forms, monkeypatch):
    monkeypatch.setattr(launchers, "USED", False)
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert forms("norm_kernel") == [Compiled]


def test_what_inductor_does_not_take_keeps_tritons_launcher(forms, monkeypatch):
    monkeypatch.setattr(Static, "taken", ())
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert forms("norm_kernel_0") == [Compiled]


def test_where_inductors_fails_tritons_launcher_is_kept(forms, monkeypatch):
    def fails(*_):
        raise RuntimeError("a kernel of another Triton")

    monkeypatch.setattr(Static, "can_statically_launch", fails)
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert forms("norm_kernel") == [Compiled]


def test_tuners_are_as_before_after_an_error(forms):
    before = CachingAutotuner._precompile_worker
    with pytest.raises(ValueError), inductors_launcher(lambda: set()):
        raise ValueError
    assert CachingAutotuner._precompile_worker is before


IN_SCRATCH = 2 * 3 * 2 * 128  # programs · descriptors · bytes of each


@pytest.mark.parametrize("ours", ["copy_kernel", "described_copy_kernel", "other"])
def test_a_graph_in_the_cache_brings_our_kernels_along(tmp_path, ours):
    """Compiled for a GPU, in a process whose kernels are not interpreted. A kernel that makes
    descriptors is launched with the memory for them, and never past the function that gets it.
    """
    folders = {name: str(tmp_path) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    kept = json.loads(output_of("-m", "tests.kept_kernels", ours, **folders))
    if ours == "other":
        assert not kept
        return
    [(name, (types, sizes, fast))] = kept.items()
    assert name == f"{ours}_0" and types == "OOiOO"
    scratch = IN_SCRATCH if ours == "described_copy_kernel" else None
    assert sizes == [10, 10, 10, scratch, None]
    assert not (fast and scratch)
