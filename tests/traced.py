"""The templates of all patterns on disk, for the processes that tests start.

To trace them takes 12 s. A new process, or one with a cache directory of its own, finds them there.
"""

import functools
import os
import shutil
from pathlib import Path

from fusion_backend.cache.disk import file_of
from fusion_backend.frontends.loading import patterns
from fusion_backend.match.templates import templates


@functools.cache
def trace() -> None:
    """Of two processes that run tests, one begins with the last pattern: each traces half of them
    and reads the others.
    """
    backwards = os.environ.get("PYTEST_XDIST_WORKER", "gw0").endswith(tuple("13579"))
    for pattern in patterns()[:: -1 if backwards else 1]:
        templates(pattern)


def files() -> list[Path]:
    return [file for file in map(file_of, patterns()) if file is not None and file.exists()]


def give(folder: Path) -> Path:
    """`folder` as a cache directory that has the templates and nothing else."""
    trace()
    found = files()
    (folder / "fusion").mkdir(parents=True, mode=0o700)
    for file in found:
        shutil.copy(file, folder / "fusion")
    return folder
