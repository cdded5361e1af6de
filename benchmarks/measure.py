"""How the benchmarks measure: interleaved step times, peak memory, and the distance from an fp64
result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.results import FAILED

PIECE = 1 << 27  # elements


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


def milliseconds(step: Callable[[], object], calls: int, device: torch.device) -> float:
    """Wall time a call, host and device."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / calls


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most memory a step takes on the GPU beyond what was allocated before it."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = step()  # held until the peak is read
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del result
    return peak


def distance(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact| in fp64, Euclidean norms."""
    return joint_distance({"": got}, {"": exact})


def joint_distance(got: dict[object, Tensor], exact: dict[object, Tensor]) -> float:
    """The distance of several tensors taken as one long vector (all the gradients of a model).
    ValueError where there are others, or of other shapes. Summed up a piece at a time: logits are
    large.
    """
    if got.keys() != exact.keys():
        raise ValueError(f"different tensors: {sorted(got.keys() ^ exact.keys())[:4]} ...")
    off = norm = 0.0
    for g, e in ((got[name], exact[name]) for name in exact):
        if g.shape != e.shape:
            raise ValueError(
                f"a tensor of shape {tuple(g.shape)}, in the exact run {tuple(e.shape)}"
            )
        for part, true in zip(g.reshape(-1).split(PIECE), e.reshape(-1).split(PIECE), strict=True):
            off += (part.double() - true.double()).square().sum().item()
            norm += true.double().square().sum().item()
    return (off / (norm or 1.0)) ** 0.5
