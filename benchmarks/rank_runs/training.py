"""The training of a model on one rank under each backend: losses, memory, graphs, and step times in
turns.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure.afresh import as_a_program_of_its_own
from benchmarks.measure.memory import saved_bytes
from benchmarks.measure.wall_time import milliseconds, synchronize
from benchmarks.model_runs.compiling import note_sites
from benchmarks.rank_runs.wrapping import WRAPPINGS, Compile
from benchmarks.records.rows import ModelContender, Spread
from benchmarks.subjects.model_zoo import build
from benchmarks.subjects.plain_models import Size
from benchmarks.subjects.subject import TRAIN
from fusion_backend.compat.torch import counters

BATCHES = 4  # which come again, so that the loss falls
LEARNING_RATE = 3e-4
AGAIN, EAGER = "inductor-again", "eager"
SETTLED_S = 1.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """steps: of which the losses are compared. rounds: turns of each contender, of `calls` steps
    each. options: of fusion. dropout: as the model has it; without it losses differ by rounding
    alone.
    """

    steps: int = 200
    rounds: int = 7
    calls: int = 4
    dropout: bool = False
    options: dict = dataclasses.field(default_factory=dict)


class Training:
    """One contender: its own copy of the model, the same weights and batches on every backend."""

    def __init__(
        self, name: str, size: Size, how: str, compiled: Compile, device: torch.device,
        dropout: bool,
    ):  # fmt: skip
        subject = build(name, TRAIN, size, "sdpa", device, torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.module = subject.model.train(dropout)
        self.call = WRAPPINGS[how](self.module, mesh, compiled)
        fused = device.type == "cuda" or None
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=LEARNING_RATE, fused=fused, foreach=False
        )
        torch.manual_seed(1 + dist.get_rank())
        shape = BATCHES, size.batch, size.seq
        self.batches = torch.randint(1, size.vocabulary, shape, device=device)
        self.step = 0

    def __call__(self) -> torch.Tensor:
        """A step. Returns its loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self) -> torch.Tensor:
        ids = self.batches[self.step % BATCHES]
        self.step += 1
        return self.call(input_ids=ids, labels=ids, use_cache=False).loss


def row_of(name: str, size: Size, how: str, plan: Plan, device: torch.device) -> dict:
    """A row. Every rank calls this, and has the same afterwards but for its times and memory."""
    makes: dict[str, Compile] = {
        "inductor": lambda fn: torch.compile(fn),
        "fusion": lambda fn: torch.compile(fn, backend="fusion", options=plan.options),
    }
    trainings: dict[str, Callable] = {}
    found: list[dict] = []
    for contender, make in makes.items():
        graphs = counters["stats"]["unique_graphs"]
        as_a_program_of_its_own()
        before = allocated(device)
        training = Training(name, size, how, make, device, plan.dropout)
        started = time.perf_counter()
        losses = [training()]
        synchronize(device)
        compile_s = time.perf_counter() - started
        losses += [training() for _ in range(plan.steps - 1)]
        one = {"name": contender, "compile_s": compile_s, "losses": averaged(losses)}
        one["peak_bytes"] = peak(training, device) - before
        one["saved_bytes"] = saved_bytes(training.loss, [])
        one["graphs"] = counters["stats"]["unique_graphs"] - graphs
        if contender == "fusion":
            sites = ModelContender(contender)
            note_sites(sites)
            one |= {"fused": sites.fused, "declined": sites.declined}
        trainings[contender] = training
        found.append(one)
    found.append({"name": EAGER, "losses": eager_losses(name, size, how, plan, device)})
    times = in_turn(trainings | {AGAIN: trainings["inductor"]}, plan, device)
    for one in found[:2]:
        one["step"] = dataclasses.asdict(Spread.of(times[one["name"]]))
    again = Spread.of(times[AGAIN]).median
    plain = found[0]["step"]["median"]
    about = {f: getattr(size, f) for f in ("batch", "seq", "layers", "width", "vocabulary")}
    about |= {"world": dist.get_world_size(), "wrapping": how, "steps": plan.steps}
    about["dropout"] = plan.dropout
    del trainings
    torch.compiler.reset()
    return {"name": name, **about, "noise": abs(again / plain - 1), "contenders": found}


def eager_losses(name: str, size: Size, how: str, plan: Plan, device: torch.device) -> list[float]:
    """The losses without a compiler, which rounds elsewhere: how far rounding alone takes a
    training from that of plain Inductor.
    """
    as_a_program_of_its_own()
    training = Training(name, size, how, lambda fn: fn, device, plan.dropout)
    return averaged([training() for _ in range(plan.steps)])


def averaged(losses: list[torch.Tensor]) -> list[float]:
    """The mean over the ranks, of each step."""
    all_of_them = torch.stack(losses).float()
    dist.all_reduce(all_of_them)
    return (all_of_them / dist.get_world_size()).tolist()


def allocated(device: torch.device) -> int:
    """The memory that is allocated once it no longer shrinks, because what an earlier training used
    may be freed late. 0 without a GPU.
    """
    if device.type != "cuda":
        return 0
    gc.collect()
    synchronize(device)
    least = math.inf
    while (now := torch.cuda.memory_allocated(device)) < least:
        least = now
        time.sleep(SETTLED_S)
    return now


def peak(training: Callable, device: torch.device) -> int:
    """The most memory that is allocated during a step; 0 without a GPU."""
    if device.type != "cuda":
        training()
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    training()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def in_turn(
    trainings: dict[str, Callable], plan: Plan, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds a step, one sample a turn. All ranks make the same number of steps."""
    names = list(trainings)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(plan.rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            dist.barrier()
            times[name].append(milliseconds(trainings[name], plan.calls, device))
    return times
