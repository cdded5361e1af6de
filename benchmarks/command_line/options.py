"""What the command lines of the benchmarks have in common: kinds of arguments, refused before
anything is measured.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def duration(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def output(text: str) -> Path:
    """A file that can be written; its folder is made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    return path
