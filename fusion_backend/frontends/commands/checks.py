"""The checks of `fusion doctor`. They change nothing except caches, which a compilation fills."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton

from fusion_backend.compat.torch import cache_folder, inductor_config
from fusion_backend.frontends.commands.gate_store import for_whom, trouble
from fusion_backend.frontends.commands.one_kernel import compiled_and_compared
from fusion_backend.frontends.loading import patterns
from fusion_backend.match.templates import backward_of, templates
from fusion_backend.measure.store import store
from fusion_backend.ops.rule import Rule
from fusion_backend.reporting.reject import PatternError


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check. ok: the backend can work with what was found. advice: what to do if
    it cannot; for a check that is ok, what to know.
    """

    name: str
    found: str
    ok: bool = True
    advice: str = ""


def all_checks() -> list[Check]:
    """All checks, in the order in which they are printed."""
    return [
        *versions(),
        *gpus(),
        registered(),
        *caches(),
        answers(),
        compiler(),
        headers(),
        kernel(),
        *map(pattern, patterns()),
    ]


def versions() -> Iterator[Check]:
    yield Check("fusion", installed("fusion-backend") or "not installed, only imported")
    yield Check("python", platform.python_version())
    yield Check("torch", f"{torch.__version__}, CUDA runtime {torch.version.cuda or 'none'}")
    yield Check("triton", triton.__version__)
    yield Check("transformers", installed("transformers") or "not installed, and not needed")


def installed(package: str) -> str:
    """The version of an installed package, or ""."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def gpus() -> Iterator[Check]:
    """The driver and each GPU. A machine without a GPU is not broken; a GPU that torch cannot use
    gets a hint.
    """
    driver = driver_version()
    yield Check("driver", driver or "none found (no nvidia-smi)")
    if not torch.cuda.is_available():
        unused = "torch cannot use the GPU: install a build of PyTorch with CUDA for this driver"
        cpu = "without a GPU no kernel is used by default"
        yield Check("GPU", "none that torch can use", advice=unused if driver else cpu)
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found = f"{about.name}, compute capability {about.major}.{about.minor}"
        yield Check(f"GPU {i}", f"{found}, {readable(about.total_memory)}")


def driver_version() -> str:
    """The driver's version by nvidia-smi; "" if there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def registered() -> Check:
    """Does torch.compile find the backend by its name?"""
    ok = "fusion" in torch.compiler.list_backends()
    advice = "install the package (pip install .): torch.compile finds it by an entry point"
    return Check("backend", 'found by torch.compile(backend="fusion")' if ok else "not found",
                 ok, "" if ok else advice)  # fmt: skip


def caches() -> Iterator[Check]:
    """The folders of what was compiled before, and of our traced patterns."""
    inductor = cache_folder()
    if inductor is None:
        yield Check("Inductor's cache", "switched off", advice="every process compiles anew")
    else:
        yield cache("Inductor's cache", Path(inductor), "TORCHINDUCTOR_CACHE_DIR")
        yield cache("our cache", Path(inductor) / "fusion", "TORCHINDUCTOR_CACHE_DIR")
    yield cache("Triton's cache", Path(triton.knobs.cache.dir), "TRITON_CACHE_DIR")


def answers() -> Check:
    """The store of measured answers."""
    held = store()
    if held.folder is None:
        return Check("measured answers", "none: Inductor's caches are off")
    if why := trouble(held, to_write=True):
        advice = "make the folder yours alone and writable, or set TORCHINDUCTOR_CACHE_DIR"
        return Check("measured answers", why, False, advice)
    return Check("measured answers", f"{for_whom([*held.all()])}, in {held.folder}")


def cache(name: str, folder: Path, variable: str) -> Check:
    there = next(p for p in (folder, *folder.parents) if p.exists())
    ok = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    size = readable(size_of(folder)) if folder.is_dir() else "not made yet"
    found = f"{folder}, {size}{'' if ok else ', not writable'}"
    return Check(name, found, ok, "" if ok else f"make it writable, or set {variable}")


def size_of(folder: Path) -> int:
    """Bytes in all files below a folder; a file that vanishes meanwhile counts as nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total


def compiler() -> Check:
    """The C++ compiler that Inductor calls for what runs on the CPU."""
    names = [name for name in inductor_config.cpp.cxx if name]
    found = next(filter(None, map(shutil.which, names)), None)
    advice = "install a C++ compiler (on Debian and Ubuntu: apt install g++), or set CXX"
    return Check("C++ compiler", found or f"none: no {', '.join(names)}", found is not None,
                 "" if found else advice)  # fmt: skip


def headers() -> Check:
    """Python's C headers, which the code that Inductor and Triton compile includes."""
    file = Path(sysconfig.get_path("include")) / "Python.h"
    advice = "install Python's C headers (on Debian and Ubuntu: apt install python3-dev)"
    ok = file.exists()
    return Check("Python headers", str(file) if ok else f"{file} is missing", ok,
                 "" if ok else advice)  # fmt: skip


def kernel() -> Check:
    try:
        return Check("kernel", compiled_and_compared())
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        advice = "the kernels cannot be used here; please report this with the lines above"
        return Check("kernel", f"{type(error).__name__}: {first}", False, advice)


def pattern(rule: Rule) -> Check:
    """Can it be traced?"""
    try:
        kernel = "yes" if getattr(rule, "kernel_fn", None) else "no"
        state = f"{len(templates(rule))} templates, kernel {kernel}, backward {backward_of(rule)}"
    except PatternError as error:
        return Check(f"pattern {rule.name}", str(error), False, "correct its definition")
    return Check(f"pattern {rule.name}", state)


def readable(n: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return ""
