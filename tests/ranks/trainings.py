"""What two processes train together under one backend, for test_trainings.py. With DDP and plain
FSDP2 tests/oracle/ compares gradients.

A job takes a model, a mesh and `compiled`, which compiles a callable or leaves it as it is, and
returns what a step calls.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fusion_backend

from ..eager_kernels import eager_kernels
from ..oracle.harness import FAST, fused_sites
from .model import PLAN, WORDS, Model

STEPS = 4
Compile = Callable[[Callable], Callable]


def fsdp(model: Model, mesh: DeviceMesh, compiled: Compile) -> Callable:
    return compiled(sharded(model, mesh))


def fsdp_blocks(model: Model, mesh: DeviceMesh, compiled: Compile) -> Callable:
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
    return sharded(model, mesh)


def fsdp_mixed(model: Model, mesh: DeviceMesh, compiled: Compile) -> Callable:
    for layer in model.layers:
        layer.forward = compiled(layer.forward)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(model, mesh, mp_policy=policy)


def fsdp_checkpoint(model: Model, mesh: DeviceMesh, compiled: Compile) -> Callable:
    for layer in model.layers:
        layer.forward = compiled(checkpointed(layer.forward))
    return sharded(model, mesh)


def checkpointed(forward: Callable) -> Callable:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def sharded(model: Model, mesh: DeviceMesh, **policy) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def tensor_parallel(model: Model, mesh: DeviceMesh, compiled: Compile) -> Callable:
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
    return compiled(model)


# A job, and the width of its model: of an odd one two ranks hold unequal parts.
JOBS = {
    "fsdp, uneven": (fsdp, 17),
    "fsdp by blocks, mixed precision": (fsdp_mixed, 16),
    "fsdp by blocks, checkpoints": (fsdp_checkpoint, 16),
    "fsdp by blocks, accumulation, resumed": (fsdp_blocks, 16),
    "tensor parallel": (tensor_parallel, 16),
}


class Training:
    """A model and its optimizer, from a seed; all ranks and backends see the same batches."""

    def __init__(self, name: str, backend: str, seed: int = 0):
        self.name, (job, width) = name, JOBS[name]
        # Eager takes a batch at once, and must come to the same.
        self.parts = 2 if "accumulation" in name and backend == "fusion" else 1
        torch.manual_seed(seed)
        self.model = Model(width, layers=1)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.call = job(self.model, mesh, compiler(backend))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)

    def batch(self, step: int) -> Tensor:
        """That of one rank; the same on both ranks under tensor parallelism."""
        rank = 0 if self.name == "tensor parallel" else dist.get_rank()
        drawn = torch.Generator().manual_seed(2 * (step % 2) + rank)
        rows = 4 + 2 * rank if "uneven" in self.name else 4
        return torch.randint(WORDS, (rows, 8), generator=drawn)

    def step(self, number: int) -> float:
        """The mean over the ranks of the loss of a step."""
        self.optimizer.zero_grad()
        parts = self.batch(number).chunk(self.parts)
        losses = []
        for part in parts:
            if len(parts) > 1:
                self.call.set_requires_gradient_sync(part is parts[-1])
            loss = self.call(part) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        mean = torch.stack(losses).sum()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


def compiler(backend: str) -> Compile:
    if backend == "eager":
        return lambda fn: fn
    options = {"fusion.gate": "always"} if backend == "fusion" else None
    return lambda fn: torch.compile(fn, backend=backend, options=options)


def observe(name: str, backend: str, folder: Path) -> dict:
    """The losses of a job under a backend, and what was fused."""
    torch._dynamo.reset()
    fusion_backend.reset()
    training = Training(name, backend)
    losses = [training.step(number) for number in range(STEPS // 2)]
    if "resumed" in name and backend == "fusion":
        training = resumed(training, Training(name, backend, seed=1), folder)
    losses += [training.step(number) for number in range(STEPS // 2, STEPS)]
    report = fusion_backend.report()
    errors = [g.error for g in report.graphs if g.error]
    return {"losses": losses, "fused": dict(fused_sites(report)), "errors": errors}


def resumed(before: Training, after: Training, folder: Path) -> Training:
    """`after`, with all that `before` has in memory when it is saved."""
    model, optimizer = get_state_dict(before.model, before.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(after.model, after.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    given = {"model_state_dict": model, "optim_state_dict": optimizer}
    set_state_dict(after.model, after.optimizer, **given)
    return after


def observe_all(folder: Path) -> dict:
    """Every job eagerly and fused."""
    with torch._inductor.config.patch(FAST), eager_kernels():
        return {(n, b): observe(n, b, folder / "saved") for n in JOBS for b in ("eager", "fusion")}
