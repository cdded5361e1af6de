"""What two processes compute with sums over ranks in front of norms, for test_all_reduce.py.

Each job runs eagerly, under plain Inductor, fused as on this machine, where the sums are left to
gloo, and fused as if the ranks reached each other's memory: then the reference of the op stands for
its kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fusion_backend

from ..eager_kernels import eager_kernels
from ..oracle.harness import FAST, fused_sites
from ..sums_over_ranks import within_reach
from . import shared_memory, tp_plans
from .tp_plans import Job, collectives, whole

BACKENDS = ("eager", "inductor", "left", "taken")
OPTIONS = {"fusion.gate": "always"}


class Planned(nn.Module):
    """Two feed-forward parts whose layers are divided, with norms that are not."""

    def __init__(self, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.norms = nn.ModuleList([norm(32), norm(32)])
        self.up = nn.ModuleList([nn.Linear(32, 64, False) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(64, 32, False) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(F.gelu(up(norm(x))))
        return x


def planned(norm: Callable[[int], nn.Module], device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = Planned(norm).to(device)
    plan = {f"up.{i}": ColwiseParallel() for i in range(2)}
    plan |= {f"down.{i}": RowwiseParallel() for i in range(2)}
    return parallelize_module(model, init_device_mesh(device, (dist.get_world_size(),)), plan)


def steps(model: nn.Module, call: Callable, train: bool, device: str = "cpu") -> list[Tensor]:
    """The result, and in training all gradients."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(2, 8, 32, generator=drawn).to(device).requires_grad_(train)
    model.zero_grad()
    with torch.set_grad_enabled(train):
        y = call(x)
        if not train:
            return [y]
        (y * torch.linspace(0, 1, 32, device=device)).sum().backward()
    return [y.detach(), x.grad, *(whole(p.grad) for p in model.parameters())]


def of_plan(norm: Callable[[int], nn.Module], train: bool) -> Callable:
    """`backend`'s compile function -> results."""

    def run(folder: Path, compiled: Callable) -> list[Tensor]:
        model = planned(norm)
        return steps(model, compiled(model), train)

    return run


def of_transformers(job: Job) -> Callable:
    def run(folder: Path, compiled: Callable) -> list[Tensor]:
        model = tp_plans.load(job, folder, divided=True)
        return tp_plans.results(job, model, compiled(model))

    return run


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def summed(x: Tensor, how: str = "sum", group=None) -> Tensor:
    return funcol.all_reduce(x, how, group or dist.group.WORLD)


def in_place(x: Tensor, weight: Tensor) -> Tensor:
    x = x @ x.mT
    dist.all_reduce(x)
    return x


# Functions of x, a residual, a weight and another process group with the same ranks. Those that
# are a sum with its norm, ...
SITES: dict[str, Callable] = {
    "functional": lambda x, r, w, g: rms(summed(x) + r, w),
    "without a residual": lambda x, r, w, g: rms(summed(x), w),
    "layer norm": lambda x, r, w, g: F.layer_norm(summed(x) + r, (16,), w, w, 1e-5),
    "in place": lambda x, r, w, g: rms(in_place(x, w) + r, w),
    "another group": lambda x, r, w, g: rms(summed(x, group=g) + r, w),
}


def sum_is_read(x, r, w, g):
    y = summed(x)
    return rms(y + r, w), y


def written_over(x, r, w, g):
    y = summed(x)
    x.add_(1.0)
    return rms(y + r, w)


def read_afterwards(x, r, w, g):
    x = x.sin()
    dist.all_reduce(x)
    return rms(x + r, w), x.cos()


def older_name(x, r, w, g):
    x = x.sin()
    older = x.t()
    dist.all_reduce(x)
    return rms(x + r, w), older.cos()


def from_outside(x, r, w, g):
    dist.all_reduce(x)
    return rms(x + r, w)


# ... and those that are not, or may not be replaced.
OTHERS: dict[str, Callable] = {
    "the mean over the ranks": lambda x, r, w, g: rms(summed(x, "avg") + r, w),
    "the largest over the ranks": lambda x, r, w, g: rms(summed(x, "max") + r, w),
    "two sums": lambda x, r, w, g: rms(summed(summed(x), group=g) * summed(x) + r, w),
    "over other dimensions": lambda x, r, w, g: F.layer_norm(summed(x) + r, (16, 16)),
    "the sum is read elsewhere": sum_is_read,
    "the sum in place is read elsewhere": read_afterwards,
    "an older name is read": older_name,
    "the sum in place of an input": from_outside,
    "a write in between": written_over,
    "a gradient that is summed": lambda x, r, w, g: rms(summed(x.requires_grad_()) + r, w),
}


def of_function(fn: Callable, grad: bool = False) -> Callable:
    def run(folder: Path, compiled: Callable) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(2 + dist.get_rank())
        x = torch.randn(16, 16, generator=drawn)
        drawn = torch.Generator().manual_seed(9)
        r, w = torch.randn(16, 16, generator=drawn), torch.randn(16, generator=drawn)
        with torch.set_grad_enabled(grad):
            out = compiled(fn)(x, r, w, other_group())
        return [t.detach().clone() for t in (out if isinstance(out, tuple) else (out,))]

    return run


GROUPS: list = []


def other_group():
    if not GROUPS:
        GROUPS.append(dist.new_group([*range(dist.get_world_size())]))
    return GROUPS[0]


JOBS: dict[str, Callable] = {
    "plan, inference": of_plan(nn.RMSNorm, False),
    "plan, training": of_plan(nn.RMSNorm, True),
    "plan with layer norms, training": of_plan(nn.LayerNorm, True),
    "llama, inference": of_transformers(Job("Llama", "inference")),
    "llama, training": of_transformers(Job("Llama", "training")),
    **{name: of_function(fn) for name, fn in SITES.items()},
    **{name: of_function(fn, "gradient" in name) for name, fn in OTHERS.items()},
}
# Those that only `--full` runs. By default one plan remains; test_tp_plans.py has a model.
DEAR = {"plan, inference", "plan with layer norms, training"}
DEAR |= {"llama, inference", "llama, training"}


def observe(run: Callable, folder: Path, backend: str) -> dict:
    torch._dynamo.reset()
    fusion_backend.reset()
    seen: list[list[tuple]] = []
    compiled = {
        "eager": lambda fn: fn,
        "inductor": torch.compile,
    }.get(backend, lambda fn: torch.compile(fn, backend="fusion", options=OPTIONS))

    groups: set[str] = set()

    def look(gm, options) -> None:
        seen.append(collectives(gm))
        groups.update(n.args[2] for n in gm.graph.nodes if "all_reduce" in str(n.target))

    with eager_kernels(look), within_reach() if backend == "taken" else contextlib.nullcontext():
        found = run(folder, compiled)
    report = fusion_backend.report()
    sites = [s for s in report.sites if s.pattern.startswith("all_reduce")]
    return {
        "results": found,
        "collectives": seen,
        "fused": dict(fused_sites(report)),
        "reasons": {s.reason for s in sites if not s.fused},
        "errors": [g.error or g.faults for g in report.graphs if g.error or g.faults],
        "groups": groups,
    }


def observe_all(folder: Path, names: list[str], calls: list[shared_memory.Call]) -> dict:
    """ "jobs": (job, backend) -> what was seen. "kernels": what shared_memory.py has observed."""
    with torch._inductor.config.patch(FAST):
        jobs = {
            (name, backend): observe(JOBS[name], folder, backend)
            for name in names
            for backend in BACKENDS
        }
    return {"jobs": jobs, "kernels": shared_memory.observe(folder, calls)}
