"""Device time of calls, in turn, and when a difference between two of them is certain."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

FLUSH = 256 << 20  # bytes, several times the L2
PRIME = 4  # flushes queued before a call, 0.12 ms each on an H200
LONGEST = 16 * PRIME
ROUNDS = (8, 60)  # fewer can prove nothing at this confidence; more change nothing
TURN_MS = 3.0  # seconds for which a turn repeats its call, roughly, ...
CALLS = (1, 5)  # ... within these bounds
CONFIDENCE = 0.99
LEAST_S = 0.25  # seconds for a race that is late: both versions are compiled by then
SMALLEST = 0.01  # a difference of 1 % is never called one, ...
WORTH = 0.02  # ... nor a gain of 2 %: any change of a graph is tuned anew, which can cost as much


class Clock:
    """Device time of a call in milliseconds, with the host's time hidden and a cold L2, except for
    `recent`: the tensors computed before the call, in that order. On CPU, wall time.
    """

    def __init__(self, device: torch.device, recent: Sequence[torch.Tensor] = ()):
        self.device, self.recent = device, recent
        on_gpu = device.type == "cuda"
        numbers = dict(dtype=torch.float32, device=device)
        self.buffer = torch.ones(FLUSH // 4, **numbers) if on_gpu else None
        self.prime = PRIME
        self.exposed = 0  # samples that may hold waiting for the host

    def __call__(self, call: Callable[[], object]) -> float:
        if self.buffer is None:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        while True:
            ms, exposed = self.once(call)
            # The GPU reached the call before the host had queued all of it: it may have waited for
            # the host.
            if not exposed:
                return ms
            if self.prime >= LONGEST:
                self.exposed += 1
                return ms
            self.prime *= 2

    def once(self, call: Callable[[], object]) -> tuple[float, bool]:
        # It ends with a read: otherwise the call would pay for writing back dirty lines of the L2.
        for _ in range(self.prime):
            self.buffer.fill_(1.0)
            self.buffer.sum()
        for t in self.recent:
            t.detach().sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        exposed = start.query()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end), exposed


class Race:
    """The times of two calls, `plain` and `ours`, with one sample of each per round. The ratio is
    plain's time divided by ours: above 1, ours is faster. A gain of `worth` or less counts as none.
    """

    def __init__(self, worth: float = WORTH) -> None:
        self.worth = worth
        self.plain: list[float] = []
        self.ours: list[float] = []

    def add(self, plain: float, ours: float) -> None:
        self.plain.append(plain)
        self.ours.append(ours)

    @property
    def ratio(self) -> float:
        return statistics.median(p / o for p, o in zip(self.plain, self.ours, strict=True))

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the median of the ratios, at CONFIDENCE, for any distribution: it ends at
        two of the ordered ratios. With too few ratios it is unbounded.
        """
        ratios = sorted(p / o for p, o in zip(self.plain, self.ours, strict=True))
        n, outside, k = len(ratios), 0.0, 0
        while k < n // 2:
            outside += 2 * math.comb(n, k) * 0.5**n
            if outside > 1 - CONFIDENCE:
                break
            k += 1
        return (ratios[k - 1], ratios[n - k]) if k else (0.0, math.inf)

    @property
    def verdict(self) -> str:
        """ "faster" where the interval lies above a gain of `worth`, "slower" where it lies below a
        loss of 1 %, "same" where it lies between them, "" where it is undecided.
        """
        low, high = self.interval
        if low > 1 + self.worth:
            return "faster"
        if high < 1 / (1 + SMALLEST):
            return "slower"
        inside = low > 1 / (1 + SMALLEST) and high < 1 + self.worth
        return "same" if inside else ""

    @property
    def no_faster(self) -> bool:
        """Is it certain that ours gains no more than `worth`?"""
        return self.interval[1] < 1 + self.worth

    @property
    def close(self) -> bool:
        """Is the ratio known to within 2 %? If there is still no verdict, the gain is so close to
        `worth` that another race would hardly decide it either.
        """
        low, high = self.interval
        return high - low <= 2 * WORTH


def race(
    plain: Callable[[], object],
    ours: Callable[[], object],
    clock: Callable[[Callable[[], object]], float],
    seconds: float,
    worth: float = WORTH,
    decided: Callable[[Race], object] = lambda race: race.verdict,
) -> Race:
    """Time two calls, which have both run before, until it is decided or the time is up, but for
    LEAST_S at least. By default it is decided once the verdict is certain.

    Clock frequency and other load drift slowly, so only times of the same round are comparable: in
    each round both calls have a turn, and the first turn alternates.
    """
    found, until = Race(worth), time.perf_counter() + max(seconds, LEAST_S)
    took = max(clock(plain), clock(ours), 1e-3)
    calls = max(CALLS[0], min(CALLS[1], round(TURN_MS / took)))
    while len(found.plain) < ROUNDS[1] and not decided(found):
        turns = [plain, ours] if len(found.plain) % 2 else [ours, plain]
        ms = [statistics.median(clock(call) for _ in range(calls)) for call in turns]
        found.add(*(ms if turns[0] is plain else reversed(ms)))
        if time.perf_counter() > until:
            break
    return found
