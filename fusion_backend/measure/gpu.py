"""Only one process at a time measures times on a GPU. Another process waits for it, but no longer
than it was going to measure itself.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator

import torch

try:
    import fcntl
except ImportError:  # not a POSIX system: processes may disturb each other, which the noise shows
    fcntl = None
LONGEST_S = 60.0  # a process that was stopped keeps its lock


@contextlib.contextmanager
def alone(device: torch.device, seconds: float) -> Iterator[bool]:
    """Inside, no other process of this user that takes this lock times on this GPU. Yields False if
    another one still held it after so many seconds, or if there can be no lock: then the processes
    may disturb each other, which the noise of the times shows.
    """
    if device.type != "cuda" or fcntl is None:
        yield device.type != "cuda"
        return
    try:
        handle = os.open(lock_file(device), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        yield locked(handle, seconds)
    finally:
        # for all, a process that was forked meanwhile and has the file open, too
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)  # as the end of the process does, however it ends


def lock_file(device: torch.device) -> str:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", device.index)
    return os.path.join(tempfile.gettempdir(), f"fusion-{os.getuid()}-{uuid}.lock")


def locked(handle: int, seconds: float) -> bool:
    until = time.perf_counter() + min(seconds, LONGEST_S)
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.perf_counter() > until:
                return False
            time.sleep(0.005)
