"""Contenders that raise: the exception in one line, and the others go on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.records.rows import FAILED


def said(error: BaseException) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        text = f"out of memory ({text})"
    return text[:300]


def until_it_fails(one, call: Callable) -> Callable:
    """The call; once it raises, the contender `one` has failed, and its turns are empty: the others
    go on.
    """

    def run(*args):
        if one.status != FAILED:
            try:
                return call(*args)
            except Exception as error:  # out of memory, say, which it was not when it ran alone
                one.status, one.note = FAILED, f"in its turn: {said(error)}"

    return run
