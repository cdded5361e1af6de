"""One token of a Llama whose layers are divided over ranks, on one rank: by plain Inductor, by
fusion, and by fusion with every site fused, and so with the kernels that sum over ranks.

`graph` is the time of a step in a CUDA graph of several, so without the host; `call` that of a step
by the host. Both are the longest of all ranks, one sample a turn.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.measure.afresh import as_a_program_of_its_own
from benchmarks.model_runs.compiling import note_sites
from benchmarks.rank_runs.running import started
from benchmarks.rank_runs.timing import CAPTURED, captured, in_turn, longest
from benchmarks.records.rows import ModelContender, Spread
from benchmarks.records.runs import Run
from benchmarks.subjects.model_zoo import build
from benchmarks.subjects.plain_models import Llama, Size
from benchmarks.subjects.subject import DECODE, Subject

MODEL, PLAIN, AGAIN = "plain_llama", "inductor", "inductor-again"
GATES = {"fusion": "auto", "fusion-always": "always"}
BY_COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
BY_ROWS = ("attention.o", "mlp.down")
CONTENDERS: dict[str, Callable[[Callable], Callable]] = {
    PLAIN: functools.partial(torch.compile, dynamic=False)
} | {
    name: functools.partial(
        torch.compile, dynamic=False, backend="fusion", options={"fusion.gate": gate}
    )
    for name, gate in GATES.items()
}
# A result of fusion may be as far from fp32 as twice what plain Inductor's is.
TOLERATED = 2.0


class Decoding(NamedTuple):
    """What every rank is given. Rank 0 adds a row for each batch to `run`, and saves that as
    `out`.
    """

    size: Size
    batches: list[int]
    dtype: torch.dtype
    rounds: int
    ranks: int
    port: int
    device: str
    run: Run
    out: Path


def work(rank: int, mine: Decoding) -> None:
    warnings.simplefilter("ignore")
    with started(rank, mine.ranks, mine.port, mine.device) as device:
        for batch in mine.batches:
            size = dataclasses.replace(mine.size, batch=batch)
            row = row_of(size, mine, device)
            if rank == 0:
                mine.run.rows.append(row)
                mine.run.save(mine.out)
                print(f"{mine.ranks} ranks, batch {batch}", flush=True)


@torch.no_grad()
def row_of(size: Size, mine: Decoding, device: torch.device) -> dict:
    """A row, the same on every rank."""
    subject = build(MODEL, DECODE, size, "sdpa", device, mine.dtype)
    exact = subject.cast(torch.float32)()
    divide(subject, init_device_mesh(device.type, (mine.ranks,)))
    calls, found = {}, {}
    torch.compiler.reset()
    for name, make in CONTENDERS.items():
        as_a_program_of_its_own()
        calls[name] = functools.partial(make(forward_of(subject)), *subject.args, **subject.kwargs)
        (far,) = longest([distance(calls[name](), exact)], device)
        found[name] = {"name": name, "far": far}
        if name in GATES:
            sites = ModelContender(name)
            note_sites(sites)
            found[name] |= {"fused": sites.fused, "declined": sites.declined}
    del exact
    calls[AGAIN], found[AGAIN] = calls[PLAIN], {"name": AGAIN}
    graphs = {name: captured(call, device) for name, call in calls.items()}
    if all(graphs.values()):
        for name, times in in_turn(graphs, mine.rounds, CAPTURED, device).items():
            found[name]["graph"] = dataclasses.asdict(Spread.of(times))
    for name, times in in_turn(calls, mine.rounds, 1, device).items():
        found[name]["call"] = dataclasses.asdict(Spread.of(times))
    about = {f: getattr(size, f) for f in ("batch", "seq", "layers", "width", "vocabulary")}
    return {"name": MODEL, "world": mine.ranks, **about, "contenders": [*found.values()]}


def forward_of(subject: Subject) -> Callable:
    model = subject.model

    def forward(*args, **kwargs):
        return model(*args, **kwargs)

    return forward


def divide(subject: Subject, mesh: DeviceMesh) -> None:
    """Divide the layers of the model over the ranks by heads and columns, and its keys and values
    by heads.
    """
    model, ranks, rank = subject.model, mesh.size(), mesh.get_local_rank()
    assert isinstance(model, Llama)
    if model.size.kv % ranks:
        raise ValueError(f"{model.size.kv} heads of keys cannot be divided over {ranks} ranks")
    plan = {name: ColwiseParallel() for name in BY_COLUMNS}
    plan |= {name: RowwiseParallel() for name in BY_ROWS}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
        whole = layer.attention.size
        parts = {name: getattr(whole, name) // ranks for name in ("width", "heads", "kv")}
        layer.attention.size = dataclasses.replace(whole, **parts)
    subject.kwargs["past"] = [
        tuple(kept.chunk(ranks, dim=1)[rank].contiguous() for kept in pair)
        for pair in subject.kwargs["past"]
    ]


def distance(have: Tensor, want: Tensor) -> float:
    """Of the logits from those of the whole model in fp32: the norm of the difference, over that of
    these.
    """
    return ((have.float() - want).norm() / want.norm()).item()


# What the rows say.


def wrong(row: dict) -> list[str]:
    """A sentence for each contender that is further from fp32 than it may be; NaN is."""
    first = row["contenders"][0]
    return [
        f"batch {row['batch']}: {one['name']} is {one['far']:.2e} from fp32, and plain Inductor "
        f"{first['far']:.2e}"
        for one in row["contenders"]
        if one["name"] in GATES and not one["far"] <= TOLERATED * first["far"]
    ]
