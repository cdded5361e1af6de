"""The arguments that torch believes a kernel writes."""

from __future__ import annotations

import torch

from benchmarks.launches.driver import Driver
from benchmarks.launches.launches import SHARED, TYPES, Found, Launch
from fusion_backend.compat.inductor import mutated_tensors
from fusion_backend.compat.triton import set_driver

# Kernels that write to what they are given.
IN_PLACE = {"cross_entropy_in_place_kernel": {"X"}} | dict.fromkeys(SHARED, {"MAILBOX"})


def mutated(launch: Launch) -> list[str]:
    """The arguments that torch believes the kernel writes."""
    constants = dict(launch.constants)
    tensors = {}
    for name, kind in launch.signature:
        if kind.startswith("*"):
            tensors[name] = torch.empty(
                2, dtype=next(d for d, short in TYPES.items() if "*" + short == kind)
            )
        elif name not in constants:
            constants[name] = 0.5 if kind == "fp64" else 48
    return mutated_tensors(launch.kernel, constants, tensors)


def check_mutations(found: list[Found]) -> int:
    """Print the arguments that torch believes each kernel writes. Returns how often it is wrong."""
    set_driver(Driver())
    bad = 0
    for launch, dtype, _ in found:
        written = mutated(launch)
        tensors = [name for name, kind in launch.signature if kind.startswith("*")]
        wrong = set(written) != set(tensors) - set(launch.inputs) | IN_PLACE.get(launch.name, set())
        bad += wrong
        print(
            f"{launch.name:37}{dtype:6}writes {', '.join(written)}{'  WRONG' if wrong else ''}",
            flush=True,
        )
    print(f"{bad} launches whose written arguments torch does not see")
    return bad
