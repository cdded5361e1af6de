"""torch.distributed: its store, its calls, and what Dynamo and Inductor do because of it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import fx
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


def cut_at(backend: object, places: Callable[..., set[fx.Node] | None]) -> None:
    """Let Dynamo cut graphs that `backend` compiles under DistributedDataParallel in front of the
    nodes that `places(gm, bucket, first_bucket, options)` returns. The sizes are in bytes, and the
    options torch.compile's. Where it returns None, and for other backends, Dynamo chooses.
    """
    if not torch.distributed.is_available():
        return
    from torch._dynamo.backends import distributed
    from torch._dynamo.eval_frame import innermost_backend

    class AtPlaces(distributed.DDPOptimizer):
        chosen: set[fx.Node] | None = None

        def compile_fn(self, gm: fx.GraphModule, *args, **kwargs):
            given = innermost_backend(self.backend_compile_fn)  # by torch.compile, in a wrapper
            asked, keywords = getattr(given, "compiler_fn", given), getattr(given, "kwargs", {})
            if isinstance(asked, functools.partial):
                asked, keywords = asked.func, {**asked.keywords, **keywords}
            if asked is backend:
                sizes = self.bucket_bytes_cap, self.first_bucket_cap
                self.chosen = places(gm, *sizes, keywords.get("options"))
            # Dynamo calls add_param_args for functions alone. It does so for all of them before it
            # compiles a part, so that no other code sees these methods as functions.
            self.methods = {n: n.target for n in self.chosen or () if n.op == "call_method"}
            for n in self.methods:
                n.op, n.target = "call_function", getattr(torch.Tensor, n.target)
            return super().compile_fn(gm, *args, **kwargs)

        def add_param_args(self, bucket, node: fx.Node) -> None:
            """Called with every call_function, the last one first. A bucket whose size reaches the
            cap ends in front of that node.
            """
            if node in self.methods:
                node.op, node.target = "call_method", self.methods[node]
            super().add_param_args(bucket, node)
            if self.chosen is not None:
                full = node in self.chosen
                # not 0, by which Dynamo knows a part without parameters
                bucket.size = self.bucket_bytes_cap if full else min(bucket.size, 1)

    distributed.DDPOptimizer = AtPlaces  # type: ignore[misc]  # Dynamo imports it for each graph
