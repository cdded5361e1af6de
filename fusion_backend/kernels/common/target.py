"""The GPU that decisions are made for, where it is not the one that is there."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class GPU:
    """What decisions ask of a GPU: its name, the number of its multiprocessors, the bytes of
    shared memory that a program may have, and the first number of its compute capability.
    """

    name: str
    multiprocessors: int
    shared: int
    capability: int


# Of the SXM modules where there are several forms. Source: NVIDIA's architecture papers.
GPUS = {
    "H200": GPU("NVIDIA H200", 132, 227 << 10, 9),
    "H100": GPU("NVIDIA H100", 132, 227 << 10, 9),
    "A100": GPU("NVIDIA A100", 108, 163 << 10, 8),
    "L40S": GPU("NVIDIA L40S", 142, 99 << 10, 8),
    "B200": GPU("NVIDIA B200", 148, 227 << 10, 10),
    "RTX 4090": GPU("NVIDIA GeForce RTX 4090", 128, 99 << 10, 8),
}
TARGET: contextvars.ContextVar[GPU | None] = contextvars.ContextVar("fusion_target", default=None)


def gpu(name: str) -> GPU:
    """The GPU of that name, in any case. Raises ValueError, with the names there are."""
    found = {key.lower(): value for key, value in GPUS.items()}.get(str(name).lower())
    if found is None:
        raise ValueError(f"target is {name!r}; known are {', '.join(GPUS)}")
    return found


@contextlib.contextmanager
def as_on(target: GPU | None) -> Iterator[None]:
    """Inside, tensors are taken for tensors on that GPU, wherever they are; None changes nothing.

    Only for decisions: nothing may be launched inside.
    """
    token = TARGET.set(target if target is not None else TARGET.get())
    try:
        yield
    finally:
        TARGET.reset(token)
