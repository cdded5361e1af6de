"""Can the ranks of a process group read and write each other's memory? One answer for all ranks.

What a rank sees (its host, its GPU, which GPUs that one can reach) goes into the key-value store of
torch.distributed. The first rank of the group that finds all of it there, or waits too long,
writes the answer, and whatever was written first holds for all. No collective is called, so that
nothing hangs where a rank compiles another graph.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from fusion_backend.compat.distributed import default_store
from fusion_backend.compat.symmetric_memory import backend_of, linked_by_nvlink, process_group
from fusion_backend.kernels.collective.size_gate import GROUPS

WAIT_S, POLL_S = 60.0, 0.02


class Answer(NamedTuple):
    """`why`: why no kernel can sum over these ranks, in words; empty where one can. `gpu`: the name
    of the GPUs, where all are alike and NVLink goes from each to all others; else empty.
    """

    why: str
    gpu: str = ""


KNOWN: dict[str, tuple[object, Answer]] = {}


def out_of_reach(group: str) -> str:
    """Why no kernel can sum over the ranks of this group, in words; empty where one can. Waits for
    the other ranks to ask, and is for a group of which `unsupported` says nothing.
    """
    return answer_of(group).why


def linked(group: str) -> str:
    """Which GPUs the ranks have, if NVLink goes from each to all others; else empty. As
    `out_of_reach`.
    """
    return answer_of(group).gpu


def answer_of(group: str) -> Answer:
    store, rank = default_store()
    owner = process_group(group)
    if group not in KNOWN or KNOWN[group][0] is not owner:
        KNOWN[group] = owner, agreed(store, rank, group, owner)
    return KNOWN[group][1]


def unsupported(group: str) -> str:
    """The same, as far as every rank sees it alike."""
    if default_store()[0] is None:
        return "there is one process"
    try:
        owner = process_group(group)
    except (RuntimeError, ValueError):
        return f"the process group {group} is not known here"
    if owner.size() not in GROUPS:
        return f"the group has {owner.size()} ranks, and the kernels take 2, 4 or 8"
    if not torch.cuda.is_available() or "nccl" not in dist.get_backend_config(owner):
        return f"symmetric memory needs NCCL, and the group has {dist.get_backend(owner)}"
    return ""


def agreed(store, rank: int, group: str, owner) -> Answer:
    """The answer of the whole group, which is of its first rank or of whom the others made wait
    too long.
    """
    ranks = dist.get_process_group_ranks(owner)
    facts, answer = (f"fusion/reach/{what}/{group}/{ranks}" for what in ("facts", "answer"))
    store.set(f"{facts}/{rank}", json.dumps(seen_here()))
    until = time.monotonic() + WAIT_S
    names = [f"{facts}/{other}" for other in ranks]
    while not store.check([answer]) and not store.check(names):
        if time.monotonic() > until:
            told = Answer("a rank of the group did not say which memory it can reach")
            return Answer(*json.loads(store.compare_set(answer, "", json.dumps(told))))
        time.sleep(POLL_S)
    if not store.check([answer]):
        told = verdict([json.loads(store.get(name)) for name in names])
        return Answer(*json.loads(store.compare_set(answer, "", json.dumps(told))))
    return Answer(*json.loads(store.get(answer)))


def seen_here() -> dict:
    """What the answer depends on, and only this rank sees."""
    device = torch.device("cuda", torch.cuda.current_device())
    boot = Path("/proc/sys/kernel/random/boot_id")
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return {
        "host": f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}",
        "gpu": device.index,
        "name": torch.cuda.get_device_name(device),
        "reaches": [i for i in others if torch.cuda.can_device_access_peer(device.index, i)],
        "linked": linked_by_nvlink(device.index),
        "memory": backend_of(device),
    }


def verdict(found: list[dict]) -> Answer:
    """The answer, of what every rank sees."""
    if why := far(found):
        return Answer(why)
    gpus, names = {one["gpu"] for one in found}, {one["name"] for one in found}
    alike = len(names) == 1 and all(gpus <= {one["gpu"], *one["linked"]} for one in found)
    return Answer("", names.pop() if alike else "")


def far(found: list[dict]) -> str:
    """Why not all reach all; empty where they do."""
    gpus = {one["gpu"] for one in found}
    if any(one["memory"] != "CUDA" for one in found):
        return "torch.distributed has no symmetric memory of CUDA on every rank"
    if len({one["host"] for one in found}) > 1:
        return "the ranks are on different hosts"
    if len(gpus) < len(found):
        return "ranks share a GPU, or each sees its own alone"
    if any(not gpus <= {one["gpu"], *one["reaches"]} for one in found):
        return "a GPU cannot reach the memory of another"
    return ""


def ranks_of(group: str) -> int:
    """How many ranks there are in a group whose ranks reach each other."""
    return process_group(group).size()
