"""Where the device's time goes: kernels of a step by class, from torch.profiler, and Chrome traces.

    found = profile(step, device, trace=Path("traces/llama-fusion.json.gz"))
    found.shares()      # {"matmul": 0.71, "attention": 0.12, ...}
    print(found.table())

Open a trace in chrome://tracing or https://ui.perfetto.dev. On a CPU the "kernels" are torch's
operators, and the loops that Inductor generates are not among them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure.wall_time import synchronize
from fusion_backend.ops.registry import FUSION_RULES

# The first that fits a kernel's name has it; "ours" comes before all of them, by the names of our
# Triton functions. What Inductor generates is named after every operator in it: its prefix decides.
CLASSES = (
    ("pointwise", r"^triton_(poi|for)_"),
    ("norm, softmax, reduction", r"^triton_(red|per|split_scan)_"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|attention"),
    (
        "matmul",
        r"gemm|nvjet|cutlass|cublas|gemv|splitk|^triton_(tem|mm)|_fprop|_dgrad|_wgrad|convol|implicit_con"
        r"|aten::(add)?b?mm|aten::(baddbmm|linear|matmul|conv)|mkldnn",
    ),
    (
        "copy",
        r"memcpy|memset|copy|catarray|fillfunctor|aten::(cat|clone|contiguous|to|fill_|zero_)\b",
    ),
    (
        "norm, softmax, reduction",
        r"reduce|softmax|norm|nll_loss|cross_entropy|scan|gammabeta"
        r"|aten::(sum|mean|amax|max|var|cumsum)\b",
    ),
    (
        "pointwise",
        r"elementwise|cpp_fused|aten::(add|sub|mul|div|neg|exp|pow|rsqrt|tanh|sigmoid|silu|gelu|cos|sin|where"
        r"|masked_fill|bitwise_and|le)_?\b",
    ),
)
OURS, OTHER = "ours", "other"
CPU, CUDA = {torch.profiler.ProfilerActivity.CPU}, {torch.profiler.ProfilerActivity.CUDA}
KINDS = ("matmul", "attention", "norm, softmax, reduction", "pointwise", OURS, "copy", OTHER)


@dataclasses.dataclass
class Kernel:
    name: str
    kind: str
    calls: float  # a step
    ms: float  # of all its calls in a step


@dataclasses.dataclass
class Profile:
    """The kernels of one step, the longest first."""

    kernels: list[Kernel]

    @property
    def ms(self) -> float:
        return sum(k.ms for k in self.kernels)

    def shares(self) -> dict[str, float]:
        """The part of the device's time that each class of kernels takes; classes without any are
        left out.
        """
        sums = {kind: sum(k.ms for k in self.kernels if k.kind == kind) for kind in KINDS}
        return {kind: ms / self.ms for kind, ms in sums.items() if ms}

    def table(self, rows: int = 10) -> str:
        if not self.kernels:
            return "  no kernels; on a CPU the loops that Inductor generates are not seen"
        lines = [f"{'ms':>10}{'share':>7}{'calls':>7}  {'class':26}kernel"]
        for k in self.kernels[:rows]:
            lines.append(
                f"{k.ms:10.4f}{k.ms / self.ms:7.1%}{k.calls:7.4g}  {k.kind:26}{k.name[:90]}"
            )
        if rest := self.kernels[rows:]:
            ms = sum(k.ms for k in rest)
            lines.append(f"{ms:10.4f}{ms / self.ms:7.1%}  ... {len(rest)} more")
        return "\n".join(lines)


JITTED = ("JITFunction", "InterpretedFunction", "GluonJITFunction")


def our_kernels() -> set[str]:
    """The names of the Triton and Gluon functions in fusion_backend.kernels and in the files of the
    registered patterns.
    """
    files = {pattern.file for pattern in FUSION_RULES.values()}
    names = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("fusion_backend.kernels") or getattr(module, "__file__", None) in files:
            names |= {
                fn.__name__
                for fn in vars(module).values()
                if type(fn).__module__.startswith("triton.") and type(fn).__name__ in JITTED
            }
    return names


def kind_of(kernel: str, ours: set[str]) -> str:
    """The class of a kernel by its name."""
    if re.sub(r"_\d+$", "", kernel) in ours or kernel in ours:
        return OURS
    return next((kind for kind, names in CLASSES if re.search(names, kernel, re.IGNORECASE)), OTHER)


def profile(
    step: Callable[[], object], device: torch.device, calls: int = 3, trace: Path | None = None
) -> Profile:
    """Run `step` once to warm up and `calls` times under the profiler; `trace` is where the Chrome
    trace goes.
    """
    step()
    synchronize(device)
    if device.type == "cuda" and trace is None:
        # Host events are most of a trace: writing and reading them takes seconds a model.
        found = of_trace(profiled(step, device, calls, CUDA), calls)
        return (
            found if found.kernels else of_trace(profiled(step, device, calls, CPU | CUDA), calls)
        )
    run = profiled(step, device, calls, CPU | (CUDA if device.type == "cuda" else set()))
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        run.export_chrome_trace(str(trace))
    if device.type == "cuda":
        return read_trace(trace, calls)
    events = [
        (e.key, e.self_cpu_time_total / 1e3, e.count)
        for e in run.key_averages()
        if e.self_cpu_time_total > 0
    ]
    # not the regions around them
    operators = [e for e in events if re.match(r"(?!autograd)\w+::|.*cpp_fused", e[0])]
    return summed(operators, calls)


def profiled(step: Callable[[], object], device: torch.device, calls: int, activities: set):
    with torch.profiler.profile(activities=activities) as run:
        for _ in range(calls):
            step()
        synchronize(device)
    return run


def of_trace(run, calls: int) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run.export_chrome_trace(str(path))
        return read_trace(path, calls)


def read_trace(path: Path, calls: int) -> Profile:
    """The kernels of a Chrome trace by torch.profiler: what ran on the device, without the regions
    drawn around it.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events = json.load(file)["traceEvents"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return summed([(e["name"], e["dur"] / 1e3, 1) for e in on_device], calls)


def summed(events: list[tuple[str, float, int]], calls: int) -> Profile:
    """(name, milliseconds, count) of `calls` steps -> the kernels of one."""
    ours, found = our_kernels(), {}
    for name, ms, count in events:
        kernel = found.setdefault(name, Kernel(name, kind_of(name, ours), 0, 0.0))
        kernel.calls += count / calls
        kernel.ms += ms / calls
    return Profile(sorted(found.values(), key=lambda k: -k.ms))
