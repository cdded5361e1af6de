"""Kernels on trial, without a GPU: Triton's own front half, with a driver that says sm_90, and its
compiler or a fake.

`python -m tests.trial_cases` runs every function of CASES and prints their tracebacks as JSON. It
needs a process of its own: kernels are not interpreted here, and CPU tensors pass for CUDA's.
"""

import json
import threading
import time
import traceback

import torch
import triton
import triton.language as tl
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fusion_backend.decide.gate
import fusion_backend.ops.operator
from benchmarks.host_runs.without_gpu import counted
from benchmarks.launches.driver import Driver, pretended_gpu
from benchmarks.subjects.small_graphs import SMALL_GRAPHS
from fusion_backend import Pattern
from fusion_backend.compat.inductor import ANALYSED, ANALYSES, kernel_wrap, our_kernels
from fusion_backend.compat.torch import inductor_config
from fusion_backend.decide.kernel_trials import Trials
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.kernels import launch
from fusion_backend.kernels.common.launch import TRIAL, trial
from fusion_backend.ops.operator import operator_of
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord


@triton.jit
def twice_kernel(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, at < n) * 2, at < n)


@triton.jit
def small_kernel(X, OUT, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 64, "too large a block")
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + at, tl.load(X + at, at < n) * 3, at < n)


def launched(kernel, x, block=64):
    out = torch.empty_like(x)
    launch(kernel, ((x.numel() + block - 1) // block,), x, out, x.numel(), BLOCK=block)
    return out


@Pattern
def twice_cosine(x: Tensor) -> Tensor:
    return torch.cos(x) * 2


@twice_cosine.kernel
def _(x):
    return launched(twice_kernel, x)


@Pattern
def thrice_sine(x: Tensor) -> Tensor:
    return torch.sin(x) * 3


@thrice_sine.kernel
def _(x):
    return launched(small_kernel, x)


@Pattern
def thrice_sine_of_exp(x: Tensor) -> Tensor:
    return torch.sin(torch.exp(x)) * 3


@thrice_sine_of_exp.kernel
def _(x):
    return launched(small_kernel, x, 128)


class Compiler:
    """Takes the place of triton.compile. `wrong`: kernel and block -> what is raised; `meets`: how
    many run at once.
    """

    def __init__(self, wrong=(), meets=0):
        self.wrong, self.calls, self.inside = dict(wrong), [], []
        self.barrier = threading.Barrier(meets, timeout=20) if meets else None

    def __call__(self, src, target=None, options=None, _env_vars=None):
        stack = torch._C._len_torch_dispatch_stack()
        self.inside.append(
            (threading.current_thread() is threading.main_thread(), stack, TRIAL.get())
        )
        called = src.fn.__name__, src.constants[src.fn.arg_names.index("BLOCK"),]
        self.calls.append(called)
        if self.barrier:
            self.barrier.wait()
        if called in self.wrong:
            raise self.wrong[called]
        return object()


class Examples(fx.Interpreter):
    def run_node(self, n):
        n.meta["example_value"] = out = super().run_node(n)
        return out


def sites(fn, compiler=None, shape=(64, 64), **options):
    """What is reported of fn, with kernels as yet uncompiled."""
    for kernel in (twice_kernel, small_kernel):
        kernel.device_caches.clear()
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.empty(*shape)
        gm = fx.symbolic_trace(fn)
        Examples(gm).run(x)
    record, real = GraphRecord(0), triton.compiler.compile
    only = ("twice_cosine", "thrice_sine", "thrice_sine_of_exp")
    try:
        triton.compiler.compile = compiler or real
        with pretended_gpu():
            fuse_graph(gm, Options(only=only, **options), record, usable(patterns()))
    finally:
        triton.compiler.compile = real
    return [(s.pattern, s.fused, s.reason) for s in record.sites if s.pattern in only]


def both(x):
    return (x.cos() * 2) @ (x.sin() * 3)


def refused(error):
    return f"its kernel failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def overlap():
    with inductor_config.patch(compile_threads=2):
        compiler = Compiler(meets=2)  # one alone would wait, and break the barrier
        assert [s[1] for s in sites(both, compiler)] == [True, True], compiler.calls
    with inductor_config.patch(compile_threads=1):
        found = sites(both, Compiler())
        assert [s[1] for s in found] == [True, True], found


def threads_see_no_modes():
    compiler = Compiler()
    sites(both, compiler)
    assert compiler.inside == [(False, 0, None)] * 2, compiler.inside
    kernel = Compiler()
    triton.compiler.compile, real = kernel, triton.compiler.compile
    try:  # a launch after a trial is compiled on the spot again
        twice_kernel.device_caches.clear()
        twice_kernel.warmup(torch.float32, torch.float32, 4096, grid=(1,), BLOCK=64)
    finally:
        triton.compiler.compile = real
    assert kernel.inside == [(True, 0, None)], kernel.inside


def each_launch_once():
    def layers(x):
        for _ in range(3):
            x = (x.cos() * 2) @ (x.sin() * 3)
        return x

    compiler = Compiler()
    found = sites(layers, compiler)
    assert len(found) == 6 and all(s[1] for s in found), found
    assert sorted(compiler.calls) == [("small_kernel", 64), ("twice_kernel", 64)], compiler.calls
    error = RuntimeError("no such instruction")
    compiler = Compiler({("small_kernel", 64): error})
    found = sites(layers, compiler)
    assert [s[1:] for s in found if s[0] == "thrice_sine"] == [(False, refused(error))] * 3, found
    assert [s[1] for s in found if s[0] == "twice_cosine"] == [True] * 3, found
    assert sorted(compiler.calls) == [("small_kernel", 64), ("twice_kernel", 64)], compiler.calls


def a_failure_is_told_at_its_site():
    error, other = RuntimeError("no such instruction\nand more"), ValueError("registers")
    whole = sites(both, Compiler())
    found = sites(both, Compiler({("small_kernel", 64): error}))
    assert [s[0] for s in found] == [s[0] for s in whole], (found, whole)  # in the same order
    assert found == [
        (p, p == "twice_cosine", "" if p == "twice_cosine" else refused(error)) for p, _, _ in whole
    ]
    found = sites(both, Compiler({("small_kernel", 64): error, ("twice_kernel", 64): other}))
    found = {pattern: reason for pattern, _, reason in found}
    assert found == {"thrice_sine": refused(error), "twice_cosine": refused(other)}, found


def a_smaller_site_takes_the_place():
    def fn(x):
        return (x.exp().sin() * 3) @ x

    compiler = Compiler({("small_kernel", 128): RuntimeError("too large")})
    found = sites(fn, compiler)
    assert ("thrice_sine", True, "") in found and any("too large" in s[2] for s in found), found
    assert sorted(compiler.calls) == [("small_kernel", 64), ("small_kernel", 128)], compiler.calls
    found = sites(
        fn, Compiler({("small_kernel", block): RuntimeError(f"no {block}") for block in (64, 128)})
    )
    assert (
        found and not any(s[1] for s in found) and {s[2][-3:] for s in found} == {" 64", "128"}
    ), found


def what_failed_does_not_count_for_the_limit():
    found = sites(both, Compiler({("twice_kernel", 64): RuntimeError("no")}), limit=1)
    other = sites(both, Compiler({("small_kernel", 64): RuntimeError("no")}), limit=1)
    assert [s[0] for s in found if s[1]] == ["thrice_sine"], found
    assert [s[0] for s in other if s[1]] == ["twice_cosine"], other


def triton_itself_refuses():
    found = {s[0]: s for s in sites(both)}
    assert found["twice_cosine"][1], found
    _, fused, reason = found["thrice_sine"]
    assert not fused and reason.startswith("its kernel failed: CompileTimeAssertionFailure"), found


def no_constant_of_more_than_32_bits():
    def fn(x):
        return x.cos() * 2

    assert [s[1] for s in sites(fn, Compiler(), (65536, 32767))] == [True]
    ((_, fused, reason),) = sites(fn, Compiler(), (65536, 32768))
    assert not fused and "no constant like 2147483648, of more than 32 bits" in reason, reason


def an_interrupt_waits_for_nobody():
    trials, begun, release, started = (
        Trials(),
        threading.Event(),
        threading.Event(),
        time.monotonic(),
    )
    calls: list[int] = []

    def compile(src, *_, **__):
        calls.append(src.constants[src.fn.arg_names.index("BLOCK"),])
        begun.set()
        return release.wait(60)

    real, triton.compiler.compile = triton.compiler.compile, compile
    twice_kernel.device_caches.clear()
    try:
        with inductor_config.patch(compile_threads=1), trial(trials):
            for _ in trials.rounds():
                for block in (16, 32):
                    launch(twice_kernel, (1,), torch.empty(4), torch.empty(4), 4, BLOCK=block)
                assert begun.wait(20)
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert time.monotonic() - started < 30
    finally:
        release.set()
    # What was cancelled, the second of the two, is compiled when it is asked for again.
    trials, before = Trials(), list(calls)
    try:
        with trial(trials):
            for _ in trials.rounds():
                launch(twice_kernel, (1,), torch.empty(4), torch.empty(4), 4, BLOCK=32)
    finally:
        triton.compiler.compile = real
    assert (before, calls, trials.failed) == ([16], [16, 32], {}), (before, calls, trials.failed)
    twice_kernel.device_caches.clear()


def writes_are_analysed_once():
    (name,) = (n for n in ANALYSES if hasattr(kernel_wrap, n))
    with our_kernels():
        analyse = getattr(kernel_wrap, name)
    calls, real = [], kernel_wrap.generate_ttir
    kernel_wrap.generate_ttir = lambda kernel, *rest: calls.append(kernel) or real(kernel, *rest)

    def asked(kernel, dtype=torch.float32, n=100, block=64):
        with FakeTensorMode():
            given = dict(X=torch.empty(4, dtype=dtype), OUT=torch.empty(4), n=n, BLOCK=block)
        before = len(calls)
        known, anew = analyse(kernel, dict(given), {}), analyse.__wrapped__(kernel, dict(given), {})
        written = (
            known if isinstance(known, list) else [dep.name for dep in known.read_writes.writes]
        )
        assert known == anew and written == ["OUT"], (known, anew)
        return len(calls) - before - 1

    class Stop(Exception):
        pass

    def stop(gm, inputs):
        found = [n for n in gm.graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        assert len(found) == 3, gm.graph
        raise Stop

    try:
        ANALYSED.clear()
        assert [asked(twice_kernel), asked(twice_kernel)] == [1, 1]  # a kernel of somebody else's
        ANALYSED[twice_kernel] = {}
        assert [asked(twice_kernel), asked(twice_kernel), asked(twice_kernel, n=200)] == [1, 0, 1]
        assert [
            asked(twice_kernel, torch.bfloat16),
            asked(twice_kernel, n=1),
            asked(twice_kernel, n=True),
        ] == [1] * 3
        assert [asked(twice_kernel, block=32), asked(twice_kernel), asked(twice_kernel, n=1)] == [
            1,
            0,
            0,
        ]
        ANALYSED.clear()
        calls.clear()
        op = operator_of(twice_cosine).overload
        with FakeTensorMode() as mode:
            x = torch.empty(64, 64)
        try:
            with mode, torch.no_grad(), our_kernels():
                aot_function(lambda x: op(op(op(x)) + 1), stop)(x)
        except Stop:
            pass
        assert [k.fn.__name__ for k in calls] == ["twice_kernel"], calls
    finally:
        kernel_wrap.generate_ttir = real


def no_more_launches_than_stated():
    """In the code for a GPU, forward and backward: launches, and allocations."""
    stated = {"layer_norm": (3, 7), "softmax": (2, 2)}
    for name, most in stated.items():
        counts, _ = counted(SMALL_GRAPHS[name], train=True, contenders=("fusion",))
        found = counts["fusion"]
        assert found.inductors == found.fills == found.library == 0, (name, found)
        assert 0 < found.launches <= most[0] and found.allocations <= most[1], (name, found)


CASES = {
    f.__name__: f
    for f in (
        overlap,
        threads_see_no_modes,
        each_launch_once,
        a_failure_is_told_at_its_site,
        a_smaller_site_takes_the_place,
        what_failed_does_not_count_for_the_limit,
        triton_itself_refuses,
        no_constant_of_more_than_32_bits,
        an_interrupt_waits_for_nobody,
        writes_are_analysed_once,
        no_more_launches_than_stated,
    )
}


def outcome(case) -> str:
    try:
        case()
        return ""
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    patterns()
    fusion_backend.decide.gate.on_gpu = fusion_backend.ops.operator.on_gpu = lambda t: True
    print(json.dumps({name: outcome(case) for name, case in CASES.items()}))
