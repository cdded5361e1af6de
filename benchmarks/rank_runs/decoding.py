"""One token of a Llama whose layers are divided over ranks, on one rank: by plain Inductor, by
fusion, and by fusion with every site fused, with and without the kernels that sum over ranks.

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

import fusion_backend
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
SUMS = ("all_reduce_add_layer_norm", "all_reduce_add_rms_norm")
ALWAYS = {"fusion.gate": "always"}
OURS = {"fusion": {}, "without-sums": {**ALWAYS, "fusion.skip": SUMS}, "with-sums": ALWAYS}
BY_COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
BY_ROWS = ("attention.o", "mlp.down")
CONTENDERS: dict[str, Callable[[Callable], Callable]] = {
    PLAIN: functools.partial(torch.compile, dynamic=False)
} | {
    name: functools.partial(torch.compile, dynamic=False, backend="fusion", options=options)
    for name, options in OURS.items()
}
# A result of fusion may be as far from the exact one as twice what plain Inductor's is.
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
    exact = subject.cast(torch.float32 if mine.dtype.itemsize < 4 else torch.float64)()
    divide(subject, init_device_mesh(device.type, (mine.ranks,)))
    calls, found = {}, {}
    torch.compiler.reset()
    for name, make in CONTENDERS.items():
        as_a_program_of_its_own()
        calls[name] = functools.partial(make(forward_of(subject)), *subject.args, **subject.kwargs)
        (far,) = longest([distance(calls[name](), exact)], device)
        found[name] = {"name": name, "far": far}
        if name in OURS:
            found[name] |= sites_of(name, device)
    del exact
    calls[AGAIN], found[AGAIN] = calls[PLAIN], {"name": AGAIN}
    graphs = {name: captured(call, device) for name, call in calls.items()}
    graphs = {name: graph for name, graph in graphs.items() if graph is not None}
    if graphs:
        for name, times in in_turn(graphs, mine.rounds, CAPTURED, device).items():
            found[name]["graph"] = dataclasses.asdict(Spread.of(times))
    for name, times in in_turn(calls, mine.rounds, 1, device).items():
        found[name]["call"] = dataclasses.asdict(Spread.of(times))
    about = {f: getattr(size, f) for f in ("batch", "seq", "layers", "width", "vocabulary")}
    about |= {"name": MODEL, "world": mine.ranks, "device": device.type}
    return {**about, "contenders": [*found.values()]}


def sites_of(name: str, device: torch.device) -> dict:
    """What this rank fused; `sums`: the sums over ranks among it, the fewest of all ranks."""
    sites = ModelContender(name)
    note_sites(sites)
    (fewest,) = longest([-float(sum(sites.fused.get(sum_, 0) for sum_ in SUMS))], device)
    faults = [fault for graph in fusion_backend.report().graphs for fault in graph.faults]
    return dict(fused=sites.fused, declined=sites.declined, faults=faults, sums=int(-fewest))


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
    """Of the logits from those of the whole model in a wider dtype: the norm of the difference,
    over that of these.
    """
    return ((have.to(want.dtype) - want).norm() / want.norm()).item()


# What the rows say.


def wrong(row: dict) -> list[str]:
    """A sentence for each contender that is further from the exact logits than it may be, that met
    a fault, or that computed no sum over ranks by a kernel where that was asked for.
    """
    # no distance where plain Inductor itself has NaN, which a file has as null
    allowed, told = TOLERATED * (row["contenders"][0]["far"] or 0.0), []
    for one in row["contenders"]:
        if one["name"] not in OURS:
            continue
        begin = f"batch {row['batch']}: {one['name']}"
        far = one["far"]
        if far is None or not far <= allowed:
            told.append(f"{begin} is {far} from the exact logits, and {allowed} is allowed")
        told += [f"{begin}: {fault}" for fault in one["faults"]]
        if one["name"] == "with-sums" and row["device"] == "cuda" and not one["sums"]:
            told.append(f"{begin} computes no sum over ranks by a kernel")
    return told
