"""How fast this machine is now: limits of time hold for an idle one."""

import copy
import time

import torch

# CPU seconds of the work below on the machine that the limits were set on. Where others share the
# cores it takes up to three times as long, and a minute later it does not.
IDLE_S = 0.045


def slowness() -> float:
    """How many times as long this machine takes at the moment for work on graphs; at least 1."""
    started = time.thread_time()
    for _ in range(2):
        copy.deepcopy(torch.fx.symbolic_trace(chain).graph)
    return max(1.0, (time.thread_time() - started) / IDLE_S)


def chain(x):
    for _ in range(300):
        x = x + 1
    return x
