"""How fast this machine is now: limits of time hold for an idle one."""

import copy
import time
import timeit

import torch

# CPU seconds of the work below on an idle machine, about; and the most that a limit is loosened.
IDLE_S, MOST = 0.045, 4.0


def slowness() -> float:
    """How many times as long this machine takes at the moment for work on graphs, from 1 to 4."""
    took = min(timeit.repeat(work, number=1, repeat=3, timer=time.thread_time))
    return min(max(1.0, took / IDLE_S), MOST)


def work() -> None:
    for _ in range(2):
        copy.deepcopy(torch.fx.symbolic_trace(chain).graph)


def chain(x):
    for _ in range(300):
        x = x + 1
    return x
