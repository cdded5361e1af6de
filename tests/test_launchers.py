"""Which launcher Inductor gives our kernels, with both launchers made up."""

from types import SimpleNamespace

import pytest

from fusion_backend.compat import launchers
from fusion_backend.compat.launchers import inductors_launcher


class Compiled(launchers.TritonCompileResult):
    """A compiled kernel, as it comes back from a worker."""

    def __init__(self, name: str):
        self.kernel = SimpleNamespace(src=SimpleNamespace(fn=SimpleNamespace(__name__=name)))
        self.config, self.compile_meta, self.inductor_meta = "config", {}, {}


@pytest.fixture
def both(monkeypatch):
    """Both launchers, by name; Inductor takes the kernels in the list."""
    taken = ["norm_kernel_0", "norm_kernel", "user_kernel"]

    class Static:
        def __init__(self, kernel, config, compile_meta, inductor_meta):
            assert config == "config"
            self.kernel = kernel

        def make_launcher(self):
            return f"Inductor's for {self.kernel}"

        @staticmethod
        def can_statically_launch(kernel, inductor_meta, compile_meta, heuristic):
            assert heuristic is not launchers.HeuristicType.USER_AUTOTUNE
            name = kernel.src.fn.__name__
            return name if name in taken else None

    monkeypatch.setattr(launchers, "USED", True)
    monkeypatch.setattr(launchers, "StaticTritonCompileResult", Static)
    monkeypatch.setattr(launchers.TritonCompileResult, "make_launcher", lambda self: "Triton's")
    return taken


@pytest.mark.parametrize("name", ["norm_kernel", "norm_kernel_0"])
def test_our_kernels_get_inductors_launcher(both, name):
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert Compiled(name).make_launcher() == f"Inductor's for {name}"
        with inductors_launcher(lambda: {"norm_kernel"}):  # forward and backward are nested
            assert Compiled(name).make_launcher() == f"Inductor's for {name}"
        assert Compiled("user_kernel").make_launcher() == "Triton's"
    assert Compiled(name).make_launcher() == "Triton's"


def test_nothing_is_changed_where_it_is_not_used(both, monkeypatch):
    monkeypatch.setattr(launchers, "USED", False)
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert Compiled("norm_kernel").make_launcher() == "Triton's"


def test_what_inductor_does_not_take_keeps_tritons_launcher(both):
    both.clear()
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert Compiled("norm_kernel_0").make_launcher() == "Triton's"


def test_where_inductors_fails_tritons_launcher_is_kept(both, monkeypatch):
    def fails(*_):
        raise RuntimeError("a kernel of another Triton")

    monkeypatch.setattr(launchers.StaticTritonCompileResult, "can_statically_launch", fails)
    with inductors_launcher(lambda: {"norm_kernel"}):
        assert Compiled("norm_kernel").make_launcher() == "Triton's"


def test_the_launcher_is_put_back_after_an_error(both):
    before = launchers.TritonCompileResult.make_launcher
    with pytest.raises(ValueError), inductors_launcher(lambda: set()):
        raise ValueError
    assert launchers.TritonCompileResult.make_launcher is before
