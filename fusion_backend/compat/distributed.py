"""torch.distributed: its store, its calls, and what Dynamo and Inductor do because of it."""

from __future__ import annotations

import torch
from torch._guards import TracingContext

from fusion_backend.compat.torch import inductor_config, namespace_of


def default_store():
    """The key-value store of torch.distributed and this process's rank; None and 0 where it was not
    started, or with one process.
    """
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None, 0
    return dist.distributed_c10d._get_default_store(), dist.get_rank()


def collective(target) -> bool:
    """Is the target of a call from torch.distributed, or one of its operators?"""
    space, module = namespace_of(target) or "", getattr(target, "__module__", None) or ""
    return "c10d" in space or "symm_mem" in space or module.startswith("torch.distributed")


def pipelines_collectives() -> bool:
    """Is Inductor asked to pipeline collectives with matrix products?"""
    return inductor_config._micro_pipeline_tp


def fakes_first() -> bool:
    """Will AOTAutograd answer the first call of what it compiles now with fake tensors, as Dynamo
    asks it to between the buckets of DistributedDataParallel?
    """
    return cut_graph() is not None


def cut_graph() -> TracingContext | None:
    """An object that identifies the graph whose parts Dynamo compiles between buckets of
    DistributedDataParallel; None if it compiles a whole graph.
    """
    context = TracingContext.try_get()
    return context if context is not None and context.fakify_first_call else None
