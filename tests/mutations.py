"""Faults planted in the pass, each with the test that must catch it: `python -m tests.mutations
[NAME ...]`.

A mutation replaces one piece of text, which must stand exactly once in its file, in a copy of the
repository, and runs the named tests there, in the default selection. It is caught where a test
fails; a test that errors before it starts catches nothing. Run the command after a change to the
pass or to these tests: it is no part of the suite.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .planted import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent
COPIED = (
    "fusion_backend",
    "patterns",
    "tests",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
)


def copy_of_repository(folder: Path) -> Path:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(
                source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, target)
    (folder / "fusion_backend" / "patterns").symlink_to("../patterns")
    return folder


def tests_fail(folder: Path, tests: str) -> tuple[bool, str]:
    """Does one of the tests fail in the copy, and which?"""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *tests.split(),
    ]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"{' '.join(command)} could not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    # ERROR: conftest.py looks after a test
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    failed = [] if "ERROR at setup of" in done.stdout else failed
    return bool(failed), failed[0] if failed else ""


def plant(mutation: Mutation) -> tuple[bool, str]:
    """Is the fault caught, and by which test?"""
    with tempfile.TemporaryDirectory() as folder:
        file = copy_of_repository(Path(folder)) / mutation.file
        text = file.read_text()
        if text.count(mutation.old) != 1:
            raise SystemExit(
                f"{mutation.old!r} stands {text.count(mutation.old)} times in {mutation.file}"
            )
        file.write_text(text.replace(mutation.old, mutation.new))
        return tests_fail(Path(folder), mutation.tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only mutations whose name contains one of these")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many at a time (default: 1)")
    options = parser.parse_args()
    chosen = {
        n: m
        for n, m in MUTATIONS.items()
        if not options.names or any(word in n for word in options.names)
    }
    survived = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        planted = {pool.submit(plant, mutation): name for name, mutation in chosen.items()}
        for done in as_completed(planted):
            caught, by = done.result()
            print(f"{'caught  ' if caught else 'SURVIVED'}  {planted[done]}  {by}", flush=True)
            survived += not caught
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    raise SystemExit(bool(survived))


if __name__ == "__main__":
    main()
