"""Processes that share one GPU: many may use it at once, but whoever times is alone on it.

Two files in the folder for temporary files are locked with flock, which ends with the process that
holds it, however that ends. Who wants the GPU queues at the first file, and holds the second one
while it uses the GPU: for itself where it times, otherwise with others. So nobody waits for ever
behind those who share.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fusion_backend.compat import tuning
from fusion_backend.compat.torch import benchmarker
from fusion_backend.measure import contest

WAITING = "waiting for the GPU"
# What measures while something is compiled: the owner of a function, and its name.
MEASURING = [(benchmarker, "benchmark_gpu"), (tuning, "milliseconds"), (contest, "race")]


def lock_file(device: torch.device) -> Path:
    """The same for all processes of a user on one GPU."""
    name = "cpu"
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
    name = re.sub(r"[^\w-]", "", name)
    return Path(tempfile.gettempdir(), f"fusion-benchmark-{os.getuid()}-{name}.lock")


class Turns:
    """The right to use the GPU. `say` is told when this process begins and ends to wait; `waited`
    counts the seconds.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda stage: None):
        self.queue = open(path.with_suffix(".queue"), "w")  # noqa: SIM115 (held by the process)
        self.room = open(path, "w")  # noqa: SIM115
        self.say, self.waited, self.depth = say, 0.0, 0
        self.stage, self.lock = "", threading.RLock()

    def at(self, stage: str) -> None:
        """From now on this process does that."""
        self.stage = stage
        self.say(stage)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self.held(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with self.held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def held(self, how: int) -> Iterator[None]:
        """Inside one that is held already, nothing more is asked for."""
        with self.lock:
            if not self.depth:
                self.wait(how)
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
                if not self.depth:
                    fcntl.flock(self.room, fcntl.LOCK_UN)

    def wait(self, how: int) -> None:
        begun = time.monotonic()
        self.say(WAITING)
        fcntl.flock(self.queue, fcntl.LOCK_EX)
        try:
            fcntl.flock(self.room, how)
        finally:
            fcntl.flock(self.queue, fcntl.LOCK_UN)
        self.waited += time.monotonic() - begun
        self.say(self.stage)


def measure_alone(turns: Turns) -> None:
    """From here on, what is timed while something is compiled is timed alone on the GPU, too."""
    for owner, name in MEASURING:
        setattr(owner, name, alone(getattr(owner, name), turns))


def alone(call: Callable, turns: Turns) -> Callable:
    @functools.wraps(call)
    def measured(*args, **kwargs):
        with turns.alone():
            return call(*args, **kwargs)

    return measured
