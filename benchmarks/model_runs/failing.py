"""A contender that fails, and the memory that it gives back."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from benchmarks.measure.failures import said
from benchmarks.records.rows import FAILED, ModelContender


@contextlib.contextmanager
def failing(one: ModelContender) -> Iterator[None]:
    """What is raised inside becomes the contender's failure, and the memory it held is
    given back.
    """
    try:
        yield
    except (
        Exception
    ) as error:  # of the model, the compiler or the device: the other contenders go on
        one.status, one.note, one.step = FAILED, said(error), None
    if one.status == FAILED:
        give_back()


def give_back() -> None:
    gc.collect()  # tracebacks hold on to tensors
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
