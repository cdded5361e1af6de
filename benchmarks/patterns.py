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

import torch
import triton
from torch import Tensor

import fusion_backend
from benchmarks.measure import distance, interleaved, milliseconds, peak_bytes, table_json
from benchmarks.work import SMALL, WORK, Work
from fusion_backend.backend import patterns
from fusion_backend.pattern import REGISTRY

FLUSH = 256 << 20  # bytes, several times the L2


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
