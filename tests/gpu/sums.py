"""What the ranks of a job compute with the kernels that sum over them, one process a GPU, for
test_all_reduce.py.

Every job is a function of the device, and returns what the test looks at: numbers, texts and bools.
A job that raises leaves the reason, on all ranks alike where it is raised before the ranks meet.
"""

from __future__ import annotations

import datetime
import os
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.tensor import DTensor

import fusion_backend
from fusion_backend.kernels.collective.norm import all_reduce_norm
from fusion_backend.kernels.norm.operands import Norm

from ..oracle.harness import fused_sites
from ..ranks import all_reduces, tp_plans
from ..ranks.sequence_parallel import ROWS, WIDTH, SequenceMLP, planned
from ..ranks.tp_plans import Job

ALWAYS = {"fusion.gate": "always"}
WAIT = datetime.timedelta(seconds=100)
SHAPES = [(1, 4096), (7, 2049), (300, 256), (3, 16384), (2048, 4096), (1, 1)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FOLDER = "SUMS_FOLDER"
# Each shape by both kernels, dtypes and norms in turn, and one of an odd size in every dtype: to
# compile all combinations would take minutes.
CASES = [
    (shape, DTYPES[i % 3], two_shot, (i + two_shot) % 2 == 0)
    for i, shape in enumerate(SHAPES)
    for two_shot in (False, True)
]
CASES += [((7, 2049), dtype, two_shot, False) for dtype in DTYPES for two_shot in (False, True)]


def drawn(rows: int, n: int, dtype: torch.dtype, device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, n, device=device, generator=generator).to(dtype)


def group() -> str:
    return dist.group.WORLD.group_name


def all_parts(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return parts


def norm_of(h: Tensor, norm: Norm) -> Tensor:
    weight = norm.weight.to(h.dtype) + (norm.offset or 0.0)
    if norm.centred:
        return F.layer_norm(h, h.shape[-1:], weight, norm.bias.to(h.dtype), norm.eps)
    return F.rms_norm(h, h.shape[-1:], weight, norm.eps)


def far(have: Tensor, want: Tensor) -> float:
    return (have.double() - want).abs().max().item()


def ranks_agree(t: Tensor) -> bool:
    return all(torch.equal(t, other) for other in all_parts(t))


def kernels(device) -> dict:
    """Case -> the distances of y and h from fp64, those of NCCL and eager code, and whether all
    ranks have the same bits.
    """
    found = {}
    for (rows, n), dtype, two_shot, centred in CASES:
        x = drawn(rows, n, dtype, device, 1 + dist.get_rank())
        residual = None if centred and rows == 7 else drawn(rows, n, dtype, device, 50)
        weight, bias = (drawn(1, n, dtype, device, seed)[0] for seed in (51, 52))
        offset = None if centred else 1.0
        norm = Norm(weight, bias if centred else None, offset, 1e-5, centred)
        y, h, mean, rstd = all_reduce_norm(x, residual, norm, True, group(), two_shot)
        exact = sum(part.double() for part in all_parts(x))
        exact = exact if residual is None else exact + residual.double()
        plain = x.clone()
        dist.all_reduce(plain)
        plain = plain if residual is None else plain + residual
        wanted = norm_of(exact, norm), exact
        saved = torch.rsqrt((exact - exact.mean(-1, True) * centred).square().mean(-1) + 1e-5)
        found[f"{rows}x{n} {dtype} {two_shot=} {centred=}"] = {
            "ours": [far(*pair) for pair in zip((y, h), wanted, strict=True)],
            "plain": [far(norm_of(plain, norm), wanted[0]), far(plain, wanted[1])],
            "scale": wanted[0].abs().max().item(),
            "eps": torch.finfo(dtype).eps,
            "rstd": (rstd.double() / saved - 1).abs().max().item(),
            "same": ranks_agree(y) and ranks_agree(h),
        }
    return found


def repeated(device) -> dict:
    """Many calls without waiting for any, of sizes that change, while the ranks run apart: how many
    results are wrong.
    """
    generator, results = torch.Generator().manual_seed(0), []
    for i in range(200):
        rows = int(torch.randint(1, 600, (), generator=generator))
        n = (256, 1024, 4096)[i % 3]
        if (i + dist.get_rank()) % 5 == 0:
            torch.cuda._sleep(200_000)
        x = torch.full((rows, n), float(i % 7 + dist.get_rank()), device=device)
        norm = Norm(torch.ones(n, device=device), None, None, 1e-6, False)
        out = all_reduce_norm(x, None, norm, False, group(), two_shot=i % 4 < 2)
        results.append((i, out[1]))
    ranks = range(dist.get_world_size())
    wrong = [i for i, h in results if not bool((h == sum(i % 7 + r for r in ranks)).all())]
    return {"wrong": wrong}


def two_sites(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = residual
    for scale in (1.0, 0.5):
        h = funcol.all_reduce(x * scale, "sum", dist.group.WORLD) + h
        x = F.rms_norm(h, h.shape[-1:], weight, 1e-6)
    return x, h


def compiled(device, **options) -> dict:
    """Two sites in one graph, called several times with other values: the largest distance from
    eager code, of the largest value, and what was fused.
    """
    torch._dynamo.reset()
    fusion_backend.reset()
    call = torch.compile(two_sites, backend="fusion", options=ALWAYS | options)
    weight, apart = drawn(1, 512, torch.bfloat16, device, 3)[0], []
    with torch.no_grad():
        for i in range(8):
            x = drawn(64, 512, torch.bfloat16, device, 10 * i + dist.get_rank())
            residual = drawn(64, 512, torch.bfloat16, device, 10 * i + 9)
            have, want = call(x, residual, weight), two_sites(x, residual, weight)
            apart += [
                far(a, b.double()) / b.abs().max().item() for a, b in zip(have, want, strict=True)
            ]
    return {"far": max(apart), "fused": dict(fused_sites(fusion_backend.report()))}


def captured(device) -> dict:
    """In a CUDA graph that is replayed with other values, between other calls."""
    x, residual = (drawn(64, 1024, torch.float32, device, dist.get_rank()) for _ in range(2))
    residual.zero_()
    norm = Norm(torch.ones(1024, device=device), None, None, 1e-6, False)
    all_reduce_norm(x, residual, norm, False, group(), False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        first = all_reduce_norm(x, residual, norm, False, group(), False)[1]
        second = all_reduce_norm(first, residual, norm, False, group(), True)[1]
        third = all_reduce_norm(second, residual, norm, False, group(), False)[1]
    apart, world = [], dist.get_world_size()
    for i in range(20):
        x.copy_(drawn(64, 1024, torch.float32, device, 7 * i + dist.get_rank()))
        graph.replay()
        want = sum(part.double() for part in all_parts(x)) * world**2
        apart.append(far(third, want) / want.abs().max().item())
        if i % 3 == 0:
            all_reduce_norm(x, residual, norm, False, group(), i % 2 == 0)
    return {"far": max(apart)}


def plan(train: bool, norm: Callable[[int], nn.Module]) -> Callable:
    """A model by torch's own plan, under fusion.gate=always: distances from eager code."""

    def run(device) -> dict:
        torch._dynamo.reset()
        fusion_backend.reset()
        model = all_reduces.planned(norm, device.type)
        want = all_reduces.steps(model, model, train, device.type)
        call = torch.compile(model, backend="fusion", options=ALWAYS)
        have = all_reduces.steps(model, call, train, device.type)
        return compared(have, want)

    return run


def pipelined(make: Callable[[str], nn.Module], train: bool) -> Callable:
    """A model whose sequence is divided, under _micro_pipeline_tp: distances from eager code, and
    how many collectives plain Inductor and fusion pipeline.
    """

    def run(device) -> dict:
        torch.manual_seed(0)
        model = make(device.type)
        enable_symm_mem_for_group(group())
        want = passed(model, model, train, device)
        with torch._inductor.config.patch(_micro_pipeline_tp=True, fx_graph_cache=False):
            torch._dynamo.reset()
            _, plain = run_and_get_code(passed, model, torch.compile(model), train, device)
            torch._dynamo.reset()
            fusion_backend.reset()
            call = torch.compile(model, backend="fusion", options=ALWAYS)
            have, ours = run_and_get_code(passed, model, call, train, device)
        counts = [len(re.findall(r"symm_mem\.fused_\w+", "".join(code))) for code in (plain, ours)]
        return compared(have, want) | {"pipelined": counts}

    return run


def passed(model: nn.Module, call: Callable, train: bool, device) -> list[Tensor]:
    """The result for this rank's share of a batch; in training then the gradients."""
    x = drawn(2 * ROWS, WIDTH, torch.bfloat16, device, dist.get_rank()).view(2, ROWS, WIDTH)
    with torch.set_grad_enabled(train):
        out = call(x.requires_grad_(train))
    if not train:
        return [out]
    model.zero_grad()
    out.square().mean().backward()
    gradients = (p.grad for p in model.parameters())
    whole = (d.full_tensor() if isinstance(d, DTensor) else d for d in gradients)
    return [out.detach(), x.grad, *(d.clone() for d in whole)]


def llama(job: Job) -> Callable:
    """A model of transformers by its own plan, in the same way."""

    def run(device) -> dict:
        torch._dynamo.reset()
        fusion_backend.reset()
        model = tp_plans.load(job, Path(os.environ[FOLDER]), divided=True)
        want = tp_plans.results(job, model, model)
        call = torch.compile(model, backend="fusion", options=ALWAYS)
        return compared(tp_plans.results(job, model, call), want)

    return run


def compared(have: list[Tensor], want: list[Tensor]) -> dict:
    """The largest distance, of the largest value of each tensor."""
    apart = [
        far(a, b.double()) / max(b.abs().max().item(), 1e-6)
        for a, b in zip(have, want, strict=True)
    ]
    report = fusion_backend.report()
    errors = [g.error or g.faults for g in report.graphs if g.error or g.faults]
    reasons = {s.reason for s in report.sites if s.pattern.startswith("all_reduce") and not s.fused}
    fused = dict(fused_sites(report))
    return {"far": max(apart), "fused": fused, "errors": errors, "reasons": reasons}


def written_out(device: str) -> nn.Module:
    return SequenceMLP(gated=True).bfloat16().to(device)


JOBS: dict[str, Callable] = {
    "kernels": kernels,
    "repeated": repeated,
    "captured": captured,
    "two sites": compiled,
    "two sites in CUDA graphs": lambda device: compiled(device, **{"triton.cudagraphs": True}),
    "plan, inference": plan(False, nn.RMSNorm),
    "plan, training": plan(True, nn.RMSNorm),
    "plan with layer norms, training": plan(True, nn.LayerNorm),
    "pipelined, inference": pipelined(written_out, False),
    "pipelined, training": pipelined(written_out, True),
    "pipelined by a plan, inference": pipelined(planned, False),
    "pipelined by a plan, training": pipelined(planned, True),
    "llama, inference": llama(Job("Llama", "inference", torch.bfloat16)),
    "llama, training": llama(Job("Llama", "training")),
}


def run_rank(rank: int, world: int, port: int, folder: Path, names: list[str], kind: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), FOLDER: str(folder)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    warnings.simplefilter("ignore")
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=WAIT)
    found = {}
    for name in names:
        print(f"rank {rank}: {name}", flush=True)
        try:
            found[name] = JOBS[name](device)
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
        torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
