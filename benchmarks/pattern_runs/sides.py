"""The two processes of benchmarks.compare, and the checkout of the base revision."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Failed(Exception):
    """A side cannot do what it was asked for."""


class Process:
    """A running benchmarks.side whose fusion_backend and patterns come from `tree`.

    Its benchmarks are those of the working tree, whatever layout the fusion_backend of `tree` has
    (measure/library.py).
    """

    def __init__(self, tree: Path, directory: Path, how: str):
        package = directory / "fusion_backend"
        package.mkdir(parents=True)
        for entry in (tree / "fusion_backend").iterdir():
            if entry.name not in ("patterns", "__pycache__"):
                (package / entry.name).symlink_to(entry)
        (package / "patterns").symlink_to(tree / "patterns")
        (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
        self.errors = directory / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.side", how],
                cwd=directory,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self.package = package

    def greet(self) -> None:
        """Wait until it has started, and see that it runs the code it should."""
        built_in = Path(self.answer()["patterns"])
        assert built_in.is_relative_to(self.package), f"{built_in} is not the code of this side"

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"the process ended: {self.errors.read_text().strip().splitlines()[-1:]}")
        found = json.loads(line)
        if "error" in found:
            raise Failed(found["error"])
        return found

    def send(self, **request) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def checkout(revision: str, directory: Path) -> Iterator[Path]:
    """A worktree of the revision. Raises ValueError when git has none."""
    git, tree = ["git", "-C", str(ROOT)], directory / "base-tree"
    try:
        made = subprocess.run(
            [*git, "worktree", "add", "--detach", tree, revision], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ValueError(f"there is no git, which would check {revision} out") from None
    if made.returncode:
        why = made.stderr.strip().splitlines()[-1].removeprefix("fatal: ")
        raise ValueError(f"no revision {revision}: {why}")
    try:
        if not (tree / "fusion_backend").is_dir():
            raise ValueError(
                f"{revision} has no fusion_backend at its top: "
                f"{ROOT} is no checkout of this repository"
            )
        yield tree
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(tree)], capture_output=True)


@contextlib.contextmanager
def both_sides(base: str, how: str) -> Iterator[tuple[Process, Process]]:
    """The processes of the base revision and of the working tree; `how` is the contender that they
    time. Raises ValueError where git has no such revision, Failed where a process does not start.
    """
    sides: list[Process] = []
    with tempfile.TemporaryDirectory() as directory, checkout(base, Path(directory)) as tree:
        try:
            sides.append(Process(tree, Path(directory, "base"), how))
            sides.append(Process(ROOT, Path(directory, "new"), how))
            for side in sides:
                side.greet()
            yield tuple(sides)
        finally:
            for side in sides:
                side.close()
