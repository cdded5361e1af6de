"""What two processes compute with models of transformers that are divided by their `tp_plan`, for
test_tp_plans.py. The whole model, which every rank has as well, is the oracle.

Weights and inputs are the same on both ranks. Every job runs eagerly, under plain Inductor and
fused; `collectives` has those of every graph, in order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

import fusion_backend
from benchmarks.subjects.tiny_models import hugging_face

from ..eager_kernels import eager_kernels
from ..oracle.harness import FAST, fused_sites
from .trainings import compiler

WORDS, STEPS = 64, 2


@dataclasses.dataclass(frozen=True)
class Job:
    """A model of transformers by the beginning of its classes' names, and what is done with it."""

    model: str
    mode: str  # "training", "inference" or "decoding"
    dtype: torch.dtype = torch.float32


JOBS = {
    "llama, inference in bf16": Job("Llama", "inference", torch.bfloat16),
    "llama, decoding": Job("Llama", "decoding"),
    "qwen3, training": Job("Qwen3", "training"),
}
# Those that only `--full` runs. test_all_reduce.py trains a model that torch divides, and
# test_async_tensor_parallel.py has models in bf16.
DEAR = {"llama, inference in bf16", "qwen3, training"}


def save(folder: Path) -> None:
    """A small model of each kind, with weights at which its layers matter."""
    for name in {job.model for job in JOBS.values()}:
        build = hugging_face(
            f"{name}ForCausalLM",
            f"{name}Config",
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
        torch.manual_seed(0)
        build().save_pretrained(folder / name)


def load(job: Job, folder: Path, divided: bool) -> nn.Module:
    import transformers
    from transformers.distributed import DistributedConfig

    kind = getattr(transformers, f"{job.model}ForCausalLM")
    if not divided:
        return kind.from_pretrained(folder / job.model)  # in fp32
    plan = DistributedConfig(tp_plan="auto")
    with without_accelerate():
        path = folder / job.model
        return kind.from_pretrained(path, distributed_config=plan, dtype=job.dtype)


@contextlib.contextmanager
def without_accelerate():
    """transformers asks whether accelerate is installed, and does not use it for this."""
    with mock.patch("transformers.integrations.accelerate.is_accelerate_available", lambda: True):
        yield


def results(job: Job, model: nn.Module, call) -> list[Tensor]:
    """The loss and all gradients, or the logits of each call."""
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (2, 16), generator=drawn).to(model.device)
    if job.mode == "training":
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(whole(p.grad) for p in model.parameters())]
    with torch.no_grad():
        if job.mode == "inference":
            return [call(input_ids=ids, use_cache=False).logits]
        return decoded(model, call, ids)


def decoded(model: nn.Module, call, ids: Tensor) -> list[Tensor]:
    """The logits of a prompt, and of each word after it; the words are given."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=24)
    # contiguous: torch 2.11 has no DTensors of symbolic strides
    words = [ids, *(ids[:, i : i + 1].clone() for i in range(STEPS))]
    return [call(input_ids=w, past_key_values=cache, use_cache=True).logits for w in words]


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def collectives(gm: fx.GraphModule) -> list[tuple]:
    """The name, and the shape of what is given, of each collective of a graph. Of several waits for
    one result only the first, which the others follow at once.

    A backward that computes a reference again waits for its sum again. AOTAutograd merges both in
    2.11. From 2.14 on it merges the sums alone, as a wait counts as impure (checked in these two).
    """
    found, waited = [], set()
    for n in gm.graph.nodes:
        if "c10d" not in str(n.target) or n.args[0] in waited:
            continue
        if "wait_tensor" in str(n.target):
            waited.add(n.args[0])
        found.append((str(n.target), tuple(n.args[0].meta["val"].shape)))
    return found


def observe(job: Job, model: nn.Module, backend: str) -> dict:
    torch._dynamo.reset()
    fusion_backend.reset()
    seen: list[list[tuple]] = []
    with eager_kernels(lambda gm, options: seen.append(collectives(gm))):
        found = results(job, model, compiler(backend)(model))
    report = fusion_backend.report()
    return {
        "results": found,
        "collectives": seen,
        "fused": dict(fused_sites(report)),
        "errors": [g.error for g in report.graphs if g.error],
    }


def observe_all(folder: Path, names: list[str], plain: bool) -> dict:
    """(job, "whole" or "divided", backend) -> what was seen. Only the first rank fuses the whole
    model, in which nobody waits for another. The divided one runs under plain Inductor if asked to.
    """
    found, rank = {}, dist.get_rank()
    with torch._inductor.config.patch(FAST):
        for name in names:
            job = JOBS[name]
            for kind in ("whole", "divided"):
                model = load(job, folder, kind == "divided")
                for backend in ("eager", "inductor", "fusion"):
                    if backend == "inductor" and not (plain and kind == "divided"):
                        continue
                    if backend == "fusion" and kind == "whole" and rank:
                        continue
                    found[name, kind, backend] = observe(job, model, backend)
    return found
