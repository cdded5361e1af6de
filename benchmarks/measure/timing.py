"""Device time of a call, contenders in turn, and the ceilings of the machine.

Clock frequency and neighbours drift slowly, so only times of the same rounds compare: in each round
every contender has its turn, in rotating order, on fresh arguments. A twin, the same code timed
again under another name, shows what is left: differences smaller than the twin's are noise.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.measure.wall_time import milliseconds
from benchmarks.records.rows import Spread

LONG_MS = 0.02  # kernels shorter than 20 µs are not asked to agree within 3 %
FLUSH = 256 << 20  # bytes, several times the L2
PRIME = 4  # flushes queued before a call, 0.12 ms each on an H200
ROUNDS = 7
TURN_MS = 40.0  # a turn repeats its call for about this long, ...
CALLS = (2, 10)  # ... within these bounds
SMALLEST = 0.01  # a difference of 1 % is never called one


class Clock:
    """Device time of a call in milliseconds, with a cold L2 and the host out of sight. On CPU, its
    wall time. The gate has one of its own: benchmarks.compare times older revisions of the package
    with this one.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.buffer = torch.ones(FLUSH // 4, device=device) if device.type == "cuda" else None
        self.prime = PRIME
        self.exposed = 0  # samples that may hold waiting for the host

    def __call__(self, call: Callable[[], object]) -> float:
        if self.buffer is None:
            return milliseconds(call, 1, self.device)
        while True:
            ms, exposed = self.once(call)
            # The GPU reached the call before the host had queued all of it: it may have waited for
            # the host.
            if not exposed:
                return ms
            if self.prime >= 16 * PRIME:
                self.exposed += 1
                return ms
            self.prime *= 2

    def once(self, call: Callable[[], object]) -> tuple[float, bool]:
        # It ends with reading: lines of the L2 that wait to be written back would be charged to the
        # call.
        for _ in range(self.prime):
            self.buffer.fill_(1.0)
            self.buffer.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        exposed = start.query()
        torch.cuda.synchronize()
        return start.elapsed_time(end), exposed


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    size = (1 << 30) if device.type == "cuda" else (1 << 24)
    a, clock = torch.ones(size // 4, device=device), Clock(device)
    b = torch.empty_like(a)
    return 2 * size / typical(clock, lambda: b.copy_(a)) * 1e3


def matrix_rate(device: torch.device) -> float:
    """Operations a second of a bf16 matrix product, 8192³ on a GPU."""
    n = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    return 2 * n**3 / typical(Clock(device), lambda: a @ b) * 1e3


def typical(clock: Clock, call: Callable[[], object], calls: int = 20) -> float:
    """The median milliseconds of some calls, after two."""
    call(), call()
    return statistics.median(clock(call) for _ in range(calls))


def in_turn(
    calls: dict[str, Callable[[list], object]],
    fresh: Callable[[], list],
    clock: Clock,
    rounds: int = ROUNDS,
) -> dict[str, list[float]]:
    """Device times of `calls[name](fresh())`, which have all run before. A long call gets fewer
    calls a turn.
    """
    names, args = list(calls), fresh()
    turn_calls, clock.prime = {}, PRIME
    for name, call in calls.items():
        start = time.perf_counter()
        clock(functools.partial(call, args))
        took = (time.perf_counter() - start) * 1e3
        turn_calls[name] = max(CALLS[0], min(CALLS[1], round(TURN_MS / took)))
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        args = fresh() if turn else args
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            call = functools.partial(calls[name], args)
            times[name] += [clock(call) for _ in range(turn_calls[name])]
    return times


def noise(one: Spread, twin: Spread) -> float:
    """|a - b| / b of the medians of a contender and its twin."""
    return abs(one.median - twin.median) / twin.median


def verdict(mine: Spread, other: Spread, twins: float | None) -> str:
    """Is `mine` "faster" or "slower" than `other`, or neither ("")?

    The medians must differ by more than 1 %, than twins of the same row do, and than three standard
    errors of their difference (of a median, 1.25 IQR / 1.35 / sqrt(n)).
    """
    errors = [1.25 * s.iqr / 1.35 / s.n**0.5 / s.median for s in (mine, other)]
    bound = max(SMALLEST, twins or 0.0, 3 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5)
    ratio = mine.median / other.median
    return "slower" if ratio > 1 + bound else "faster" if ratio < 1 / (1 + bound) else ""
