"""Which releases of PyTorch and Triton we work with, and that everything that names them agrees."""

import importlib
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import fusion_backend.compat
from fusion_backend.compat.versions import NEWEST, OLDEST, check

ROOT = Path(__file__).parent.parent
FIRST, LAST = (".".join(map(str, known["torch"])) for known in (OLDEST, NEWEST))


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0+cu130", "2.13.1", "2.15.0a0+git1234", "2.15.7"]
)
def test_a_release_in_the_range_is_taken_in_silence(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check("torch", version)


@pytest.mark.parametrize(
    "package, version", [("torch", "2.16.0"), ("torch", "3.0.0a0"), ("triton", "3.10.0")]
)
def test_a_release_beyond_the_range_is_a_warning(package, version):
    last = ".".join(map(str, NEWEST[package]))
    with pytest.warns(
        RuntimeWarning,
        match=f"last tested with {package} {last}; {re.escape(version)} is installed",
    ):
        check(package, version)


@pytest.mark.parametrize(
    "package, version", [("torch", "2.10.2"), ("torch", "2.9.0"), ("triton", "3.5.1")]
)
def test_a_release_before_the_range_is_an_error(package, version):
    first = ".".join(map(str, OLDEST[package]))
    with pytest.raises(
        ImportError, match=f"needs {package} {first} or newer; {version} is installed"
    ):
        check(package, version)


def test_what_is_installed_is_looked_at_when_the_backend_is_loaded(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.warns(RuntimeWarning, match="2.16.0"):
        importlib.reload(fusion_backend.compat)
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(ImportError, match="2.10.0"):
        importlib.reload(fusion_backend.compat)


def test_one_release_beyond_fuses_and_is_warned_about_once():
    program = """
        import torch
        torch.__version__ = "2.16.0"
        import fusion_backend.frontends.explain as frontend
        from fusion_backend.testing import assert_fuses
        known = [p for p in frontend.patterns() if p.name == "add_mul"]
        frontend.patterns = lambda: known  # the others would be traced for this release
        for shape in ((64, 64), (32, 32)):
            x = torch.randn(shape)
            assert_fuses(lambda x, y: (x + y) * 0.5, x, x, pattern="add_mul")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"last tested with torch {LAST}; 2.16.0 is installed") == 1, (
        done.stderr
    )


def test_pages_and_commands_name_the_range():
    triton = ".".join(map(str, OLDEST["triton"]))
    project = (ROOT / "pyproject.toml").read_text()
    assert f'dependencies = ["torch>={FIRST}", "triton>={triton}"]' in project
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"PyTorch\s(2\.\d+ to 2\.\d+)", readme)) == {f"{FIRST} to {LAST}"}
    assert (
        f"Triton {' to '.join('.'.join(map(str, known['triton'])) for known in (OLDEST, NEWEST))},"
        in readme
    )
    major, minor = NEWEST["torch"]
    assert f"RANGE := torch>={FIRST},<{major}.{minor + 1}\n" in (ROOT / "Makefile").read_text()
    assert f"TORCH={FIRST}.0" in (ROOT / ".ci" / "run").read_text()
