"""Feed-forward parts on a rank's share of the sequence, whose collectives Inductor can pipeline."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

ROWS, WIDTH, INNER = 512, 1024, 2048  # on a rank; large enough for the tables to want kernels


def gather(x, dim=1):
    return funcol.all_gather_tensor_autograd(x, dim, dist.group.WORLD)


def scatter(x, dim=1):
    return funcol.reduce_scatter_tensor_autograd(x, "sum", dim, dist.group.WORLD)


class SequenceMLP(nn.Module):
    """With the collectives written out."""

    def __init__(self, dim: int = 1, bias: bool = False, gated: bool = False):
        super().__init__()
        self.dim, self.norm = dim, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, False)
        self.gate = nn.Linear(WIDTH, INNER, False) if gated else None

    def forward(self, x):
        h = gather(self.norm(x), self.dim)
        h = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + scatter(self.down(h), self.dim)


class Planned(nn.Module):
    """The same by a plan of torch's tensor parallelism; its layers read DTensors."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER, False), nn.Linear(INNER, WIDTH, False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def planned(device: str = "cpu") -> nn.Module:
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Planned().bfloat16().to(device), init_device_mesh(device, (2,)), plan)
