"""The ways to spread a model over ranks, with torch.distributed and nothing of our own.

Each takes a model in fp32 on this rank's device and `compiled`, which compiles a callable, and
returns what a training step calls. Blocks are the layers of the model: the elements of its longest
list of modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

Compile = Callable[[Callable], Callable]
Wrapped = Callable[..., object]


def blocks(model: nn.Module) -> nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len)


def alone(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """Every rank by itself, on its own data: the gain that one GPU has."""
    return compiled(model.to(torch.bfloat16))


def alone_blocks(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """The same with each block and the loss compiled separately: the gain of one GPU to which that
    of fsdp_loss is compared.
    """
    return blocks_and_loss(model.to(torch.bfloat16), compiled)


def ddp(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """DistributedDataParallel, compiled as a whole: Dynamo cuts the graph where a bucket ends."""
    return replicated(model, mesh, compiled, None)


def ddp_large_buckets(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """The same with buckets ten times as large as usual: fewer cuts."""
    return replicated(model, mesh, compiled, 250)


def replicated(
    model: nn.Module, mesh: DeviceMesh, compiled: Compile, megabytes: int | None
) -> Wrapped:
    """In buckets of so many megabytes; None: of PyTorch's default, 25."""
    gpu = mesh.device_type == "cuda"
    given = dict(
        device_ids=[torch.cuda.current_device()] if gpu else None,
        process_group=mesh.get_group(),
        bucket_cap_mb=megabytes,
    )
    return compiled(DistributedDataParallel(model.to(torch.bfloat16), **given))


def fsdp(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """FSDP2 by blocks, weights in fp32, computed in bf16; the whole model is compiled, and Dynamo
    cuts the graph at each block.
    """
    return compiled(sharded(model, mesh))


def fsdp_blocks(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """The same with each block compiled separately."""
    return sharded(blocks_compiled(model, compiled), mesh)


def fsdp_loss(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """The same with the loss compiled separately as well, as torchtitan has it."""
    return sharded(blocks_and_loss(model, compiled), mesh)


def fsdp_checkpoint(model: nn.Module, mesh: DeviceMesh, compiled: Compile) -> Wrapped:
    """The same with activation checkpoints: what is inside a block is computed again for its
    backward.
    """
    return sharded(blocks_compiled(model, lambda block: compiled(checkpointed(block))), mesh)


def blocks_compiled(model: nn.Module, compiled: Compile) -> nn.Module:
    for block in blocks(model):
        block.forward = compiled(block.forward)
    return model


def blocks_and_loss(model: nn.Module, compiled: Compile) -> nn.Module:
    model.loss_function = compiled(model.loss_function)  # a property of transformers' models
    return blocks_compiled(model, compiled)


def checkpointed(forward: Callable) -> Callable:
    def again(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


WRAPPINGS: dict[str, Callable[[nn.Module, DeviceMesh, Compile], Wrapped]] = {
    "alone": alone,
    "alone-blocks": alone_blocks,
    "ddp": ddp,
    "ddp-large-buckets": ddp_large_buckets,
    "fsdp": fsdp,
    "fsdp-blocks": fsdp_blocks,
    "fsdp-loss": fsdp_loss,
    "fsdp-checkpoint": fsdp_checkpoint,
}
