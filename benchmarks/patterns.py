"""The built-in patterns against eager and plain Inductor, kernel by kernel.

    python -m benchmarks.patterns [--only NAME ...] [--out FILE.json] [--quick]
    python -m benchmarks.patterns --sweep layer_norm gated_linear quantize_int8

For each piece of work: device time (CUDA events around a call, L2 flushed before it and the launch queued ahead, so
that the host does not show), time of a whole call including the host, distance from an fp64 result, peak memory when
training, and the floor: the bytes it must move at the copy bandwidth measured in the same run, or its operations at
700 TFLOP/s. Contenders take turns in one process, so that ratios hold when clocks drift. Without a GPU the sizes
are small and the times mean nothing; the errors do.
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

import fusion_backend
from benchmarks.measure import distance, interleaved, milliseconds, peak_bytes, table_json
from fusion_backend.backend import patterns
from fusion_backend.pattern import REGISTRY

FLOPS = 700e12  # dense bf16 with fp32 sums on an H200 SXM
FLUSH = 256 << 20  # bytes, several times the L2
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
F32, BF16 = torch.float32, torch.bfloat16


class Work(NamedTuple):
    pattern: str
    case: dict[str, int]
    dtype: torch.dtype
    train: bool = False
    linear: bool = False  # weights lie in memory as those of nn.Linear do

    @property
    def name(self) -> str:
        words = " ".join(f"{k}={v}" for k, v in self.case.items())
        notes = " train" * self.train + " linear" * self.linear
        return f"{self.pattern} {NAMES[self.dtype]} {words}{notes}"

    def arguments(self, device: torch.device) -> list:
        """Fresh random arguments; weights scaled so that outputs are of order one."""
        args = list(
            REGISTRY[self.pattern].inputs_fn(
                lambda *shape: torch.randn(shape, device=device, dtype=self.dtype), **self.case
            )
        )
        if self.pattern == "gated_linear":
            for i in (1, 3):
                args[i] *= self.case["k"] ** -0.5
                args[i] = args[i].t().contiguous().t() if self.linear else args[i]
        for i, value in PLAIN.get(self.pattern, {}).items():
            args[i] = value
        return [a.requires_grad_(self.train and a.is_floating_point()) if isinstance(a, Tensor) else a for a in args]

    def floor_ms(self, bandwidth: float) -> float:
        item = self.dtype.itemsize
        if self.pattern == "gated_linear":
            m, k, n = (self.case[name] for name in "mkn")
            moved = (m * k + 2 * k * n + m * n) * item * (3 if self.train else 1)
            return max(moved / bandwidth, 4 * m * k * n * (3 if self.train else 1) / FLOPS) * 1e3
        size = self.case.get("size") or self.case["rows"] * self.case.get("n", self.case.get("v"))
        integers = self.pattern in ("quantize_int8", "quantize_per_token")
        moved = size * (item + 1) if integers else size * item * PASSES[self.pattern][self.train]
        return moved / bandwidth * 1e3


# How often a tensor of the size is read or written, at least: forward alone, and with the backward.
PASSES = {
    "add_mul": (4, 4), "add_mul_exp": (3, 3), "layer_norm": (2, 5), "rms_norm": (2, 5), "softmax": (2, 5),
    "add_rms_norm": (4, 8), "add_layer_norm": (4, 8), "cross_entropy": (1, 3),
}  # fmt: skip
# Arguments (by position) in the form that is measured: no mask, no offset, no smoothing.
PLAIN = {
    "softmax": dict.fromkeys((1, 2, 3, 4)), "rms_norm": {2: None}, "add_rms_norm": {3: None}, "cross_entropy": {3: 0.0},
}  # fmt: skip
ROWS = [(16384, 4096), (8192, 8192), (2048, 32768), (64, 131072)]
FEW = [(192, 5120), (16, 8192), (4096, 768)]
WORK = [
    Work("add_mul", dict(size=20_000_000), F32),
    Work("add_mul_exp", dict(size=20_000_000), F32),
    Work("add_mul_exp", dict(size=100_000_000), F32),
    Work("quantize_int8", dict(size=10_000_000), F32),
    Work("quantize_int8", dict(size=50_000_000), F32),
    Work("quantize_int8", dict(size=64_000_000), BF16),
    *(Work("layer_norm", dict(rows=rows, n=n), BF16) for rows, n in ROWS),
    *(Work("layer_norm", dict(rows=rows, n=n), BF16, train=True) for rows, n in ROWS),
    *(Work("softmax", dict(rows=rows, n=n), BF16, train) for train in (False, True) for rows, n in ROWS[:3]),
    *(Work("add_rms_norm", dict(rows=rows, n=n), BF16, train) for train in (False, True) for rows, n in ROWS[:3]),
    *(
        Work(name, dict(rows=16384, n=4096), BF16, train)
        for train in (False, True)
        for name in ("rms_norm", "add_layer_norm")
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in FEW
        for name in ("layer_norm", "softmax", "add_rms_norm")
    ),
    Work("quantize_per_token", dict(rows=8192, n=4096), BF16),
    Work("cross_entropy", dict(rows=8192, v=128256), BF16, train=True),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16, linear=True),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16, train=True, linear=True),
    Work("gated_linear", dict(m=16384, k=512, n=2048), BF16, linear=True),
    Work("gated_linear", dict(m=8192, k=4096, n=14336), BF16, linear=True),
    Work("gated_linear", dict(m=16, k=4096, n=14336), BF16, linear=True),
]
SMALL = [
    Work("add_mul", dict(size=10_000), F32),
    Work("add_mul_exp", dict(size=10_000), F32),
    Work("quantize_int8", dict(size=10_000), F32),
    Work("layer_norm", dict(rows=64, n=256), BF16),
    Work("layer_norm", dict(rows=64, n=256), BF16, train=True),
    *(Work(name, dict(rows=64, n=256), BF16, train=True) for name in ("softmax", "rms_norm", "add_rms_norm")),
    Work("add_layer_norm", dict(rows=64, n=256), BF16, train=True),
    Work("quantize_per_token", dict(rows=64, n=256), F32),
    Work("cross_entropy", dict(rows=64, v=1000), BF16, train=True),
    Work("gated_linear", dict(m=64, k=64, n=64), F32),
    Work("gated_linear", dict(m=64, k=64, n=64), F32, train=True, linear=True),
]


def contenders(work: Work) -> dict[str, Callable]:
    reference = REGISTRY[work.pattern].reference

    def compiled(**how):
        return torch.compile(lambda *args: reference(*args), dynamic=False, **how)

    return {
        "eager": reference,
        "inductor": compiled(),
        "fusion": compiled(backend="fusion", options={"fusion.gate": "always"}),
        "auto": compiled(backend="fusion", options={"fusion.gate": "auto"}),
    }


def step(fn: Callable, args: list, dys: list[Tensor] | None) -> list[Tensor]:
    """The results, and with `dys` the gradients of the arguments."""
    outs = results_of(fn, args)
    if dys is None:
        return outs
    return [*outs, *torch.autograd.grad(outs, [a for a in args if isinstance(a, Tensor) and a.requires_grad], dys)]


def results_of(fn: Callable, args: list) -> list[Tensor]:
    out = fn(*args)
    return list(out) if isinstance(out, tuple) else [out]


class Clock:
    """Device time of a call, with a cold L2 and the host out of sight."""

    def __init__(self, device: torch.device):
        self.device = device
        self.buffer = torch.ones(FLUSH // 4, device=device) if device.type == "cuda" else None

    def __call__(self, call: Callable[[], object]) -> float:
        if self.buffer is None:
            return milliseconds(call, 1, self.device)
        # 0.5 ms of work hides the launches of the call. It ends with reading: lines of the L2 that wait to be written
        # back would be charged to the call.
        for _ in range(4):
            self.buffer.fill_(1.0)
            self.buffer.sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    size = (1 << 30) if device.type == "cuda" else (1 << 24)
    a, clock = torch.ones(size // 4, device=device), Clock(device)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * size / statistics.median(clock(lambda: b.copy_(a)) for _ in range(10)) * 1e3


def widened(args: list, dtype: torch.dtype) -> list:
    floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    return [
        a.detach().to(dtype).requires_grad_(a.requires_grad) if yes else a for a, yes in zip(args, floats, strict=True)
    ]


def in_fp64(work: Work, args: list, dys: list[Tensor] | None) -> list[Tensor]:
    wide = widened(args, torch.float64)
    return step(REGISTRY[work.pattern].reference, wide, None if dys is None else [dy.double() for dy in dys])


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    """The largest relative distance; for integers the share that differs from eager in fp32."""
    return max(
        distance(g, e) if g.is_floating_point() else (g != e).double().mean().item()
        for g, e in zip(got, exact, strict=True)
    )


def measure(work: Work, clock: Clock, bandwidth: float, rounds: int, calls: int) -> dict:
    device = clock.device
    torch.compiler.reset()
    args = work.arguments(device)
    with torch.set_grad_enabled(work.train):
        outs = results_of(REGISTRY[work.pattern].reference, args)
        dy = [torch.randn_like(out) for out in outs] if work.train else None
        del outs
        fns, reports, errors, peaks = contenders(work), {}, {}, {}
        exact = in_fp64(work, args, dy)
        if not exact[0].is_floating_point():  # what has to be met is eager's integers
            exact = results_of(REGISTRY[work.pattern].reference, widened(args, torch.float32))
        for name, fn in fns.items():
            fusion_backend.reset()
            errors[name] = error(step(fn, args, dy), exact)
            reports[name] = [
                dict(pattern=s.pattern, fused=s.fused, reason=s.reason, forward=s.forward, backward=s.backward)
                for s in fusion_backend.report().sites
            ]
        del exact
        steps = {name: functools.partial(step, fn, args, dy) for name, fn in fns.items()}
        if device.type == "cuda" and work.train:
            peaks = {name: peak_bytes(call, device) / 2**20 for name, call in steps.items()}
        wall = interleaved(steps, device, rounds=rounds, least_ms=10)
        times: dict[str, list[float]] = {name: [] for name in fns}
        names = list(fns)
        for turn in range(rounds):
            args = work.arguments(device)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                call = functools.partial(step, fns[name], args, dy)
                times[name] += [clock(call) for _ in range(calls)]
    return dict(
        work=work.name,
        floor_ms=work.floor_ms(bandwidth),
        ms={name: statistics.median(found) for name, found in times.items()},
        spread_ms={name: [min(found), max(found)] for name, found in times.items()},
        call_ms=wall,
        error=errors,
        peak_mib=peaks,
        sites=reports["fusion"],
        auto_sites=reports["auto"],
    )


def machine(device: torch.device) -> dict:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(
        gpu=gpu,
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=torch.version.cuda,
        python=platform.python_version(),
        command=" ".join(["python -m benchmarks.patterns", *sys.argv[1:]]),
    )


def show(result: dict) -> str:
    """One line of the table: times, Inductor's time over ours, the floor's share, errors and what the gate did."""
    ms, site = result["ms"], (result["sites"] or [{}])[0]
    how = f"{site.get('forward')}/{site.get('backward')}" if site.get("fused") else f"not fused: {site.get('reason')}"
    auto = (result["auto_sites"] or [{}])[0]
    line = f"{result['work']:52}{result['floor_ms']:9.4f}" + "".join(f"{t:10.4f}" for t in ms.values())
    line += f"{ms['inductor'] / ms['fusion']:8.2f}{result['floor_ms'] / ms['fusion']:8.0%}"
    line += "".join(f"{result['error'][name]:10.1e}" for name in ("eager", "inductor", "fusion"))
    line += "".join(f"{result['call_ms'][name]:9.4f}" for name in ("inductor", "fusion"))
    peaks = result["peak_mib"]
    line += f"  peak {peaks['inductor']:.0f} -> {peaks['fusion']:.0f} MiB" if peaks else ""
    return f"{line}  {how}" + ("" if auto.get("fused") else f"; auto: {auto.get('reason')}")


HEADER = (
    f"{'work':52}{'floor':>9}{'eager':>10}{'inductor':>10}{'fusion':>10}{'auto':>10}{'ratio':>8}{'floor':>8}"
    f"{'err eager':>10}{'inductor':>10}{'fusion':>10}{'call ind':>9}{'fusion':>9}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="patterns to measure (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the results as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds (always so without a GPU)")
    parser.add_argument("--sweep", nargs="+", metavar="NAME", help="time configurations of these kernels instead")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patterns()
    if args.sweep:
        from benchmarks.sweep import sweep

        sweep(args.sweep, Clock(device), device, args.out)
        return
    quick = args.quick or device.type == "cpu"
    known = {work.pattern for work in WORK}
    if unknown := set(args.only or ()) - known:
        parser.error(f"no work for {', '.join(sorted(unknown))}; there is {', '.join(sorted(known))}")
    bandwidth = copy_bandwidth(device)
    about = machine(device) | dict(copy_tb_s=bandwidth / 1e12)
    print(f"{about['gpu'] or 'CPU: the times below mean nothing'}, torch {about['torch']}, triton {about['triton']}")
    print(f"copy {bandwidth / 1e12:.2f} TB/s; times in ms a call, ratio = inductor / fusion\n{HEADER}")
    results, clock = [], Clock(device)
    for work in SMALL if quick else WORK:
        if args.only and work.pattern not in args.only:
            continue
        results.append(measure(work, clock, bandwidth, *((5, 1) if quick else (7, 10))))
        print(show(results[-1]), flush=True)
        if args.out:  # after each, so that a lost machine loses one line
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(table_json(about, "results", results))


if __name__ == "__main__":
    main()
