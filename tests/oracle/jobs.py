"""What two processes do together: DDP, FSDP2, DTensor, tensor parallelism. Run by
test_distributed.py.
"""

import contextlib

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..eager_kernels import eager_kernels
from ..ranks.starting import WORLD
from .harness import FAST, compiled, fused_sites, local
from .models import Gate


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.out = nn.LayerNorm(16), Gate(), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.out(self.gate(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x, (16,))


def ddp(model, x, backend):
    """Buckets of just one layer, so that the graph is cut between layers."""
    layer = sum(p.nbytes for p in model.layers[0].parameters())
    dist._DEFAULT_FIRST_BUCKET_BYTES = layer
    return compile_if(
        nn.parallel.DistributedDataParallel(model, bucket_cap_mb=layer / 2**20), backend
    ), x


def fsdp2(model, x, backend):
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return compile_if(fully_shard(model, mesh=mesh), backend), x


def fsdp2_by_layer(model, x, backend):
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        layer.forward = compile_if(layer.forward, backend)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), x


def dtensor(model, x, backend):
    """Replicated parameters, a sharded input, and a plain gate as well: only that one fuses."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.data, mesh, [Replicate()])))
    return compile_if(WithPlainGate(model), backend), distribute_tensor(x, mesh, [Shard(0)])


class WithPlainGate(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.plain = inner, Gate()

    def forward(self, x):
        y = self.inner(x)
        return y, self.plain(y.to_local())


def tensor_parallel(model, x, backend):
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.layers:
        plan = {"gate.a": ColwiseParallel(), "gate.b": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    torch.manual_seed(7)  # the same input everywhere
    return compile_if(model, backend), torch.randn(4, 16)


def compile_if(model, backend):
    return compiled(model, backend) if backend != "eager" else model


def observe(job, rank, backend):
    """Values, gradients, graphs and fused sites of one job under one backend."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Model()
    if backend == "fusion":
        import fusion_backend

        fusion_backend.reset()
    torch.manual_seed(5 + rank)
    call, x = job(model, torch.randn(4, 16), backend)
    graphs = []
    for _ in range(2):
        call.zero_grad()
        out = call(x)
        tree = [local(t) for t in out] if isinstance(out, tuple) else [local(out)]
        torch.autograd.backward(tree, [torch.linspace(-1, 2, t.numel()).view_as(t) for t in tree])
        graphs.append(counters["stats"]["unique_graphs"])
    seen = {"values": [t.detach() for t in tree], "graphs": graphs, "fused": {}, "errors": []}
    seen["grads"] = [None if p.grad is None else local(p.grad).clone() for p in call.parameters()]
    if backend == "fusion":
        report = fusion_backend.report()
        seen |= {
            "fused": dict(fused_sites(report)),
            "errors": [g.error for g in report.graphs if g.error],
        }
        seen["report"] = str(report)
    return seen


def work(names, backends, generated):
    """What every job under every backend showed, in one process group.

    The jobs of `generated` run what Inductor compiles, the others eager kernels.
    """
    seen = {}
    with torch._inductor.config.patch(FAST):
        for name in names:
            with contextlib.nullcontext() if name in generated else eager_kernels():
                for backend in backends:
                    seen[name, backend] = observe(globals()[name], dist.get_rank(), backend)
    return seen
