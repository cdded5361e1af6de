"""Times of calls that all ranks make together, by the host and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.measure.wall_time import milliseconds, synchronize

CAPTURED = 10  # calls in a CUDA graph


def longest(values: list[float], device: torch.device) -> list[float]:
    """Of each value the largest of all ranks; inf where one has NaN, which a maximum may leave
    out.
    """
    found = torch.tensor(values, dtype=torch.float64, device=device).nan_to_num(nan=torch.inf)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def captured(call: Callable, device: torch.device) -> Callable | None:
    """Several calls as a CUDA graph; None on any rank is None on all."""
    if device.type != "cuda":
        return None
    call()
    synchronize(device)
    graph, failed, stream = torch.cuda.CUDAGraph(), 0.0, torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CAPTURED):
                call()
    except RuntimeError as error:
        print(f"rank {dist.get_rank()}: cannot be captured: {error}", flush=True)
        failed = 1.0
        torch.cuda.set_stream(stream)  # a capture that ends in an error leaves its own
    (failed,) = longest([failed], device)
    return None if failed else graph.replay


def in_turn(
    calls: dict[str, Callable], rounds: int, each: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of one of the `each` calls that a call makes, one sample a turn, the longest of
    all ranks. The ranks begin a turn together, and make the same number of calls.
    """
    repeats: dict[str, int] = {}
    for name, call in calls.items():
        call()
        (ms,) = longest([milliseconds(call, 3, device)], device)
        repeats[name] = max(3, min(50, round(5.0 / max(ms, 1e-3))))
    names = [*calls]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            dist.barrier()
            times[name].append(timed(calls[name], repeats[name], device) / each)
    return {name: longest(samples, device) for name, samples in times.items()}


def timed(call: Callable, repeats: int, device: torch.device) -> float:
    """Milliseconds a call; on a GPU by its own clock."""
    if device.type != "cuda":
        return milliseconds(call, repeats, device)
    synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()  # the ranks do not leave the barrier at once
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    synchronize(device)
    return start.elapsed_time(end) / repeats
