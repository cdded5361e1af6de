"""Wall time of a call, host and device, with the contenders in rotation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def whole_calls(
    calls: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int = 7,
    least_ms: float = 10,
) -> dict[str, list[float]]:
    """Wall milliseconds a call, host and device, one sample a turn: what a model that makes this
    call waits.

    Clock frequency and neighbours drift slowly, so only times from the same rounds compare: in each
    of them every call has its turn, in rotating order, and repeats until `least_ms` have passed.
    All have run before.
    """
    names, repeat = list(calls), {}
    for name, call in calls.items():
        synchronize(device)
        repeat[name] = max(1, round(least_ms / max(milliseconds(call, 1, device), 1e-3)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(milliseconds(calls[name], repeat[name], device))
    return times


def interleaved(steps: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """The median milliseconds a call of each step, all in turn; the first call, which compiles, is
    not counted.
    """
    for step in steps.values():
        step()
    return {
        name: statistics.median(ms) for name, ms in whole_calls(steps, device, least_ms=20).items()
    }


def milliseconds(step: Callable[[], object], calls: int, device: torch.device) -> float:
    """Wall time a call, host and device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls
