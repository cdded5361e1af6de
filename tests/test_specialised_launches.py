"""How products with warps of their own for the epilogue are called and launched: from generated
code, and again when they are known. tests/test_specialised.py has what is launched.
"""

from types import SimpleNamespace

import pytest
import torch
import triton

from fusion_backend.compat import triton as compat
from fusion_backend.kernels.gemm import specialised
from fusion_backend.kernels.gemm.specialised_gated_gradient import specialised_gated_gradient
from fusion_backend.kernels.gemm.specialised_gradient import specialised_gradient
from fusion_backend.kernels.gemm.specialised_linear import specialised_linear
from fusion_backend.kernels.gemm.tiles import SPECIALISED
from tests.without_interpreter import output_of, printed_by

DIRECTLY = """
import json
import fusion_backend.patterns
from benchmarks.host_runs.without_gpu import counted
from benchmarks.subjects.small_graphs import BLOCKS
from fusion_backend.kernels.gemm import specialised
specialised.on_hopper = lambda device: True

found = []
for graph in BLOCKS.values():
    _, codes = counted(graph, True, ("fusion",))
    lines = "".join(codes["fusion"]).splitlines()
    found += [line for line in lines if " = torch.ops.fusion." in line]
print(json.dumps([line.split("(")[0].split(" = ")[1] for line in found]))
"""


def test_generated_code_calls_the_functions_behind_the_operators():
    functions = specialised_linear, specialised_gradient, specialised_gated_gradient
    forward, backward, gated = (f"torch.ops.fusion.{f.__name__}.default" for f in functions)
    called = printed_by(DIRECTLY)
    assert called == [f"{op}.python_function" for op in (forward, backward, forward, gated)]
    for function in functions:
        assert getattr(torch.ops.fusion, function.__name__).default.python_function is function


LAUNCHED = """
import torch, triton
from benchmarks.launches.launches import describe
from benchmarks.launches.resources import compiled_for_hopper
from fusion_backend.compat import launchers
from tests.test_specialised import launched, operands

x, w, w2, b, b2 = operands()
launch = launched(x, w, act="silu", b=None, w2=w2, b2=b2, keep=(True, False))
compiled = compiled_for_hopper(describe(*launch, set()))
compiled.function = "loaded"
memory, asked = "memory", []
launchers.scratch = lambda size, alignment, stream: asked.append((size, stream)) or memory
static = launchers.with_loaded_code(compiled)
assert static.owner is compiled
launches, with_hooks = [], []
launchers.launch_again = lambda *args: with_hooks.append(args)
static.C_impl = type("", (), {"_launch_kernel": lambda *args: launches.append(args)})
launchers.with_loaded_code = lambda kernel: static
y, kept = launch[2][6], launch[2][7]
given = 100, 7, (x, w, w2, None, b2, None, y, kept, None, 4096)
relaunch = launchers.relauncher(compiled, ("constants",))
relaunch(*given)
((function, *grid, warps, shared, types, args, stream),) = launches
assert (function, grid, stream) == ("loaded", [100, 1, 1], 7)
assert (warps, shared) == (12, compiled.metadata.shared)
assert types == "OOOOOOiOO" and len(args) == 9, (types, len(args))
for got, want in zip(args, (x, w, w2, b2, y, kept, 4096, memory, None), strict=True):
    assert got is want or got == 4096
assert asked == [(100 * compiled.metadata.global_scratch_size, 7)] and asked[0][0] > 0
relaunch(0, *given[1:])  # of no rows
triton.knobs.runtime.launch_enter_hook.add(print)
relaunch(*given)
assert with_hooks == [(compiled, ("constants",), *given)] and len(launches) == 1
"""


def test_a_known_launch_has_inductors_launcher():
    """All that is no constant, in order, then the memory for descriptors and none to profile in.
    Where there are hooks, Triton launches, which calls them.
    """
    output_of("-c", LAUNCHED)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 5), (2, 3, 4), (1, 1), (0, 7)])
def test_results_are_made_as_inductor_makes_them(shape, monkeypatch):
    """On the GPU that is the current one. Here Inductor's function for CPUs makes them."""
    on_cpu = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(specialised, "empty_cuda", on_cpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    wanted = torch.empty(shape, dtype=torch.half)
    for index in (3, 1):
        device, made = torch.device("cuda", index), []
        like = SimpleNamespace(
            is_cuda=True,
            device=device,
            dtype=torch.half,
            new_empty=lambda *args, made=made, **more: made.append(args),
        )
        for dtype in (None, torch.float32):
            got = specialised.empty(like, wanted.shape, dtype)
            if index == 3:
                assert (got.shape, got.stride()) == (wanted.shape, wanted.stride())
                assert got.dtype == (dtype or torch.half)
        assert len(made) == (0 if index == 3 else 2), "on another GPU"


STREAM = 7


@pytest.fixture
def launches(monkeypatch):
    """In place of Triton: the launches that it makes, those that are known, and how many of these
    there were whenever memory for descriptors was lent.
    """
    first, again = [], []

    class Compiled:
        name = "of which Inductor's launcher knows nothing"

        def __getitem__(self, grid):
            def run(*args, stream):
                assert stream == STREAM
                again.append((grid, args))

            return run

    def launched(kernel, grid, *args, num_warps, **constants):
        assert list(constants) == kernel.arg_names[len(args) :]
        first.append((grid, (*args, *constants.values())))
        return Compiled()

    lent = []
    driver = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(compat, "lend_scratch", lambda: lent.append(len(again)))
    monkeypatch.setattr(specialised, "directly", launched)
    monkeypatch.setattr(specialised, "KNOWN", {})
    return first, again, lent


def test_a_known_launch_is_launched_as_the_first_was(launches):
    """With another alignment, layout, dtype, activation or share that is dropped it is compiled,
    with other rows not.
    """
    first, again, lent = launches
    tile = list(SPECIALISED[2])

    def run(
        rows=256, act="silu", dtype=torch.bfloat16, by_output=True, offset=0, save=True, bias=None,
        p=None,
    ):  # fmt: skip
        x = torch.zeros(rows * 64 + offset, dtype=dtype)[offset:].view(rows, 64)
        w, w2 = (torch.zeros(64, 128, dtype=dtype) for _ in range(2))
        if by_output:
            w, w2 = w.t().contiguous().t(), w2.t().contiguous().t()
        b = torch.zeros(128, dtype=bias or dtype)
        seed = None if p is None else torch.zeros(2, dtype=torch.int64)[:1]
        out = specialised_linear(x, w, b, w2, None, seed, p or 0.0, act, save, False, tile)
        return x, w, b, w2, out

    run()
    x, w, b, w2, (out, kept) = run(rows=512)
    ((grid, args),) = again
    assert lent == [0], "memory for descriptors, before the launch: another thread may have none"
    assert grid == (4, 1, 1) and len(args) == len(first[0][1])
    for got, want in zip(args[:10], (x, w, w2, b, None, None, out, kept, None, 512), strict=True):
        assert got is want or got == 512
    assert args[10:] == first[0][1][10:]
    for n, change in enumerate(
        (dict(act="gelu"), dict(dtype=torch.half), dict(by_output=False), dict(offset=4),
         dict(save=False), dict(bias=torch.float32), dict(p=0.1), dict(p=0.2))
    ):  # fmt: skip
        run(**change)
        assert len(first) == n + 2, change
    assert len(again) == 1
    x = torch.zeros(256, 128, dtype=torch.bfloat16)[:, :64]
    for _ in range(2):  # rows that are further apart are never taken for those of before
        specialised_linear(x, w, b, w2, None, None, 0.0, "silu", True, False, tile)
    assert len(first) == 11 and len(again) == 1
    one = torch.zeros(1, 128, dtype=torch.bfloat16)[:, :64]  # contiguous, whatever its distance
    specialised.KNOWN.clear()
    specialised_linear(one, w, b, w2, None, None, 0.0, "silu", True, False, tile)
    run(rows=512)
    assert len(first) == 13 and len(again) == 1


def test_a_known_gradient_is_launched_as_the_first_was(launches):
    first, again, lent = launches

    def run(
        rows=256, act="gelu", sums=True, offset=0, bias=torch.bfloat16, by_output=False, above=0,
        kept=torch.bfloat16, tile=SPECIALISED[1], scale=1.0,
    ):  # fmt: skip
        dy = torch.zeros(rows * 64 + above, dtype=torch.bfloat16)[above:].view(rows, 64)
        w = torch.zeros(64, 512, dtype=torch.bfloat16)
        w = w.t().contiguous().t() if by_output else w
        pre = torch.zeros(rows * 512 + offset, dtype=kept)[offset:].view(rows, 512)
        b = None if bias is None else torch.zeros(512, dtype=bias)
        return dy, w, pre, b, specialised_gradient(dy, w, pre, b, act, scale, sums, list(tile))

    run()
    dy, w, pre, b, (d, parts) = run(rows=512)
    ((grid, args),) = again
    assert grid == (4, 1, 1) and lent == [0] and parts.shape == (16, 512)
    for got, want in zip(args[:7], (dy, w, pre, b, d, parts, 512), strict=True):
        assert got is want or got == 512
    assert args[7:] == first[0][1][7:]
    changes = (
        dict(act="silu"), dict(sums=False), dict(offset=4), dict(bias=None),
        dict(bias=torch.float32), dict(by_output=True), dict(above=4), dict(kept=torch.half),
        dict(tile=SPECIALISED[1]._replace(group=16)), dict(scale=1.25),
    )  # fmt: skip
    for n, change in enumerate(changes):
        run(**change)
        assert len(first) == n + 2, change
    assert len(again) == 1


def test_a_known_gradient_of_a_gate_is_launched_as_the_first_was(launches):
    first, again, lent = launches

    def run(
        rows=256, act="silu", offset=0, of_up=0, biases=(torch.bfloat16, None), by_output=False,
        kept=torch.bfloat16, kept_up=None, tile=SPECIALISED[1], hidden=True, scale=1.0,
    ):  # fmt: skip
        dy, w = torch.zeros(rows, 64, dtype=torch.bfloat16), torch.zeros(64, 512).bfloat16()
        w = w.t().contiguous().t() if by_output else w
        gate, up = (
            torch.zeros(rows * 512 + above, dtype=kind)[above:].view(rows, 512)
            for above, kind in ((offset, kept), (of_up, kept_up or kept))
        )
        b, b2 = (None if kind is None else torch.zeros(512, dtype=kind) for kind in biases)
        found = specialised_gated_gradient(dy, w, gate, up, b, b2, act, scale, hidden, list(tile))
        return dy, w, gate, up, b, b2, found

    run()
    *given, found = run(rows=512)
    ((grid, args),) = again
    assert grid == (4, 1, 1) and lent == [0] and [t.shape for t in found] == [(512, 512)] * 3
    for got, want in zip(args[:10], (*given, *found, 512), strict=True):
        assert got is want or got == 512
    assert args[10:] == first[0][1][10:]
    changes = (
        dict(act="gelu"), dict(hidden=False), dict(offset=4), dict(of_up=4),
        dict(biases=(None, torch.bfloat16)),
        dict(biases=(torch.float32, None)), dict(by_output=True), dict(kept=torch.half),
        dict(kept_up=torch.half), dict(tile=SPECIALISED[1]._replace(group=16)), dict(scale=1.25),
    )  # fmt: skip
    for n, change in enumerate(changes):
        run(**change)
        assert len(first) == n + 2, change
    assert len(again) == 1
