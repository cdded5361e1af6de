"""Products whose epilogue has warps of its own: compiled for Hopper, which products it takes, and
how it is called. Gluon has no interpreter; tests/gpu/test_products.py runs the kernel.
"""

import math
from types import SimpleNamespace

import fusion_backend.patterns  # noqa: F401 (the rules by name)
import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend.compat import triton as compat
from fusion_backend.kernels.common import tuned
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.common.target import as_on, gpu
from fusion_backend.kernels.gemm import specialised
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient, gated_gradient_tile
from fusion_backend.kernels.gemm.hidden_gradient import gradient_tile, hidden_gradient
from fusion_backend.kernels.gemm.library import library_takes
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.specialised import compile_in_trial
from fusion_backend.kernels.gemm.specialised_gated_gradient import (
    specialised_gated_gradient,
    takes_gated_gradient,
)
from fusion_backend.kernels.gemm.specialised_gradient import specialised_gradient, takes_gradient
from fusion_backend.kernels.gemm.specialised_linear import (
    ACTIVATIONS,
    launch_of,
    results,
    specialised_linear,
    specialises,
    tile_of,
)
from fusion_backend.kernels.gemm.tiles import SPECIALISED, Tile, tile_for
from fusion_backend.ops.registry import FUSION_RULES
from tests.without_interpreter import output_of, printed_by


def operands(m=4096, k=1024, n=4096, by_output=True, dtype=torch.bfloat16, weights=2):
    """x, weights and biases without data."""

    def weight():
        if by_output:
            return torch.empty(n, k, dtype=dtype, device="meta").t()
        return torch.empty(k, n, dtype=dtype, device="meta")

    x = torch.empty(m, k, dtype=dtype, device="meta")
    biases = [torch.empty(n, dtype=dtype, device="meta") for _ in range(2)]
    return x, *(weight() for _ in range(weights)), *biases[:weights]


def launched(x, w, b, act, w2=None, b2=None, keep=(False, False), **changes):
    """The launch of a tile with finishers."""
    found = []
    tile = SPECIALISED[1 if w2 is None else 2]._replace(**changes)
    with trial(lambda *launch: found.append(launch)):
        filled = results(x, w, keep, torch.Tensor.new_empty)
        compile_in_trial(launch_of(x, w, b, w2, b2, act, filled, keep, tile))
    (launch,) = found
    return launch


COMPILED = """
import torch
from benchmarks.launches.launches import describe
from benchmarks.launches.resources import SHARED_LIMIT, usage
from fusion_backend.kernels.gemm.specialised_linear import specialises
from tests.test_specialised import launched, operands
for dtype, by_output in ((torch.bfloat16, True), (torch.float16, False)):
    x, w, w2, b, b2 = operands(by_output=by_output, dtype=dtype)
    more = dict(b=b, w2=w2, b2=b2, keep=(True, True)), dict(b=None, w2=w2), dict(b=b)
    for way in more:
        if "w2" in way or specialises(x, w, None, ACT):
            use = usage(describe(*launched(x, w, act=ACT, **way), set()))
            assert use.tensor_core == "wgmma.mma_async", use
            assert use.spilled == 0 and use.shared <= SHARED_LIMIT, (dtype, way, use)
"""


COMPILED_GRADIENT = """
import torch
from benchmarks.launches.launches import describe
from benchmarks.launches.resources import SHARED_LIMIT, usage
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.tiles import SPECIALISED
from tests.test_specialised import hidden
for dtype, by_output in ((torch.bfloat16, False), (torch.float16, True)):
    dy, w, pre, b = hidden(by_output=by_output, dtype=dtype)
    for b, sums in ((b, True), (None, False)):
        found = []
        with trial(lambda *launch: found.append(launch)):
            hidden_gradient(dy, w, pre, b, ACT, sums, SPECIALISED[1])
        use = usage(describe(*found[0], set()))
        assert use.tensor_core == "wgmma.mma_async", use
        most = 64 if dtype == torch.float16 and sums else 0
        assert use.spilled <= most and use.shared <= SHARED_LIMIT, (dtype, sums, use)
"""


COMPILED_GATED_GRADIENT = """
import torch
from benchmarks.launches.launches import describe
from benchmarks.launches.resources import SHARED_LIMIT, usage
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient
from fusion_backend.kernels.gemm.tiles import SPECIALISED
from tests.test_specialised import hidden
for act, dtype, by_output, k in (
    ("silu", torch.bfloat16, False, 1024), ("silu", torch.float16, True, 2048),
    ("gelu_tanh", torch.float16, False, 1024), ("gelu", torch.float16, True, 1024),
    ("relu", torch.bfloat16, False, 1024),
):
    dy, w, pre, b = hidden(k=k, by_output=by_output, dtype=dtype)
    for bias in (b, None):
        found = []
        with trial(lambda *launch: found.append(launch)):
            gated_gradient(dy, w, pre, bias, pre, bias, act, bias is b, SPECIALISED[1])
        use = usage(describe(*found[0], set()))
        assert use.tensor_core == "wgmma.mma_async", use
        assert use.spilled == 0 and use.shared <= SHARED_LIMIT, (act, bias is None, use)
"""


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Here Triton's functions are interpreted, of which the kernel has some."""
    monkeypatch.setattr(specialised, "interpreted", lambda kernel: False)


def hidden(m=8192, k=1024, n=4096, by_output=False, dtype=torch.bfloat16):
    """dy, the weight of the second layer, what the first has kept, and its bias, without data."""
    dy, w, b = operands(m, k, n, by_output, dtype, weights=1)
    return dy, w, torch.empty(m, n, dtype=dtype, device="meta"), b


@pytest.mark.parametrize("act", ["gelu", "silu"])  # those of the longest code
def test_it_compiles_for_hopper_without_spills(act):
    """Weights by outputs and by inputs, with everything that may be missing and without."""
    output_of("-c", f"ACT = {act!r}\n{COMPILED}")


def test_the_gradient_compiles_for_hopper():
    output_of("-c", f"ACT = 'gelu'\n{COMPILED_GRADIENT}")


def test_the_gradient_of_a_gate_compiles_for_hopper_without_spills():
    output_of("-c", COMPILED_GATED_GRADIENT)


def test_what_is_interpreted_cannot_be_compiled(monkeypatch):
    monkeypatch.undo()
    assert not specialises(*operands()[:3], "silu")


def test_what_it_takes():
    x, w, w2, *_ = operands()
    assert all(specialises(x, w, w2, act) for act in ACTIVATIONS)
    assert not specialises(x, w, None, "tanh")
    assert not specialises(x, w, w2.contiguous(), "silu"), "weights that lie differently"
    half = operands(dtype=torch.float16)
    assert specialises(*half[:3], "gelu") and not specialises(*half[:2], None, "gelu")
    assert not specialises(*operands(dtype=torch.float32)[:3], "silu")
    for name, takes in (("H100", True), ("H200", True), ("A100", False), ("B200", False)):
        with as_on(gpu(name)):
            assert specialises(x, w, w2, "silu") == takes, name
    cpu = torch.empty(4096, 1024, dtype=torch.bfloat16)
    assert not specialises(cpu, w, w2, "silu")


def test_tiles_with_finishers_are_for_many_rows_and_long_sums():
    def finishers(m, k, n, weights=1, able=True):
        x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
        return tile_for(x, m, k, n, weights, "silu", able).finishers

    assert finishers(16384, 1024, 4096) and finishers(8192, 1152, 4096)
    assert finishers(512, 2048, 14336, weights=2)
    assert not finishers(16384, 1024, 4096, able=False)
    assert not finishers(32768, 256, 4096)  # short sums
    assert not finishers(512, 16384, 4352)  # fewer tiles than multiprocessors
    assert not finishers(1152, 8192, 4096)  # 144 tiles, two waves
    assert not finishers(4096, 1024, 4096)  # shorter than its launch


def test_the_library_is_taken_where_it_was_faster(monkeypatch):
    """cuBLASLt has relu and the tanh form of GELU, and other GPUs than Hopper have it alone."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: t.is_meta))
    x, w, b = operands(16384, 1024, 4096, weights=1)
    other = operands(16384, 1024, 5120, weights=1)  # not timed
    for act in ("relu", "gelu_tanh"):
        assert not library_takes(x, w, b, act) and not library_takes(*other, act)
    for size in ((16384, 256, 1024), (2048, 768, 768), (2048, 4096, 1024), (4096, 2048, 256)):
        x1, w1, b1 = operands(*size, weights=1)
        assert not tile_of(x1, w1, "gelu_tanh").finishers and library_takes(x1, w1, b1, "gelu_tanh")
    assert library_takes(x[:1000], w, b, "gelu_tanh"), "few rows"
    with as_on(gpu("A100")):
        assert library_takes(x, w, b, "gelu_tanh") and library_takes(*other, "relu")
    monkeypatch.setitem(tuned.PRODUCTS, "linear relu 1024x5120", ())
    assert library_takes(*other, "relu"), "timed, and the library was the fastest"
    assert not library_takes(x, w, None, "relu") and not library_takes(x, w, b, "gelu")


@pytest.mark.parametrize("keep", [(True, False), (False, False), (True, True)])
def test_a_compiled_graph_has_the_operator(keep):
    with FakeTensorMode():
        x, w, w2, b, b2 = operands()
        x = x.view(4, 1024, 1024)

        def run(x, w, b, w2, b2):
            return linear(x, w, b, "silu", w2=w2, b2=b2, save=keep)

        traced = make_fx(run)(x, w, b, w2, b2)
    (call,) = [n for n in traced.graph.nodes if "specialised_linear" in str(n.target)]
    assert len(call.meta["val"]) == 1 + sum(keep)
    for out in call.meta["val"]:
        assert out.shape == (4, 1024, 4096) and out.is_contiguous() and out.dtype == x.dtype
    (results,) = next(iter(reversed(traced.graph.nodes))).args
    assert [math.prod(node.meta["val"].shape) > 0 for node in results] == [True, *keep]
    assert Tile(*call.args[-1]).finishers


def test_a_scaled_or_added_product_has_the_plain_kernel():
    """What else the plain kernel does, the other does not."""
    x, w, *_ = operands(weights=1)
    for more in (
        dict(residual=torch.empty(4096, 4096, dtype=x.dtype, device="meta")),
        dict(row_scale=torch.empty(4096, device="meta")),
        dict(column_scale=torch.empty(4096, device="meta")),
        dict(dtype=torch.float32),
    ):
        names = []
        with trial(lambda kernel, *_, names=names: names.append(kernel.fn.__name__)):
            linear(x, w, None, "relu", **more)
        assert names == ["linear_kernel"], more


def test_a_tile_with_finishers_is_for_nothing_else():
    x, w, *_ = operands(weights=1)
    for more in (dict(row_scale=torch.empty(4096, device="meta")), dict(save=(False, True))):
        with pytest.raises(AssertionError, match="does not do"):
            linear(x, w, None, "relu", tile=SPECIALISED[1], **more)


def test_gates_of_tiles_without_finishers_keep_their_rule():
    worthwhile = FUSION_RULES["gated_linear"].worthwhile_fn
    for size, training, takes in (
        ((16384, 2048, 8192), False, True),
        ((2048, 4096, 1024), False, False),  # the library's product wins
        ((16384, 512, 2048), True, False),
    ):
        x, w, w2, *_ = operands(*size)
        answer = worthwhile(x, w, None, w2, None, "silu", training)
        assert (answer is None) == takes, (size, training, answer)


def test_gradients_of_a_hidden_layer_have_warps_of_their_own():
    dy, w, *_ = hidden()
    assert gradient_tile(dy, w, "gelu").finishers
    assert not gradient_tile(dy.float(), w, "gelu").finishers
    assert not gradient_tile(dy[:512], w, "gelu").finishers, "a short product"
    assert not takes_gradient(dy, "sigmoid"), "no derivative is written for it"
    with as_on(gpu("A100")):
        assert not gradient_tile(dy, w, "gelu").finishers


@pytest.mark.parametrize("sums", [True, False])
def test_a_compiled_graph_has_the_gradient(sums):
    def run(dy, w, pre, b):
        return hidden_gradient(dy, w, pre, b, "gelu", sums)

    with FakeTensorMode():
        dy, w, pre, b = hidden()
        dy, pre = dy.view(4, 2048, 1024), pre.view(4, 2048, 4096)
        traced = make_fx(run)(dy, w, pre, b)
    (call,) = [n for n in traced.graph.nodes if "specialised_gradient" in str(n.target)]
    d, *parts = call.meta["val"]
    assert d.shape == pre.shape and d.is_contiguous() and d.dtype == pre.dtype
    # a row for each warp that finishes, in each of the 64 tiles from top to bottom
    assert [t.shape for t in parts] == [(256, 4096)] * sums
    assert all(t.dtype == torch.float32 for t in parts)
    _, total = next(iter(reversed(traced.graph.nodes))).args[0]
    assert (total.meta["val"].shape == (4096,)) if sums else total is None


DIRECTLY = """
import json, torch
import torch.nn.functional as F
import fusion_backend.patterns
from benchmarks.host_runs.without_gpu import counted
from benchmarks.subjects.small_graphs import SmallGraph
from fusion_backend.kernels.gemm import specialised
specialised.on_hopper = lambda device: True

def mlp(x, w1, b1, w2):
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2)

def gated(x, w1, v, w2):
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, v), w2)

wide, found = (4096, 1024), []
for fn, more in ((mlp, (4096,)), (gated, wide)):
    graph = SmallGraph(fn, ((8192, 1024), wide, more, (1024, 4096)))
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
y, kept = launch[2][5], launch[2][6]
given = 100, 7, (x, w, w2, None, b2, y, kept, None, 4096)
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


@pytest.mark.parametrize("wanted", [True, False])
def test_a_compiled_graph_has_the_gradient_of_a_gate(wanted):
    def run(dy, w, gate, up, b):
        return gated_gradient(dy, w, gate, b, up, None, "silu", wanted)

    with FakeTensorMode():
        dy, w, gate, b = hidden()
        dy, gate = dy.view(4, 2048, 1024), gate.view(4, 2048, 4096)
        traced = make_fx(run)(dy, w, gate, torch.empty_like(gate), b)
    (call,) = [n for n in traced.graph.nodes if "specialised_gated_gradient" in str(n.target)]
    assert [t.shape for t in call.meta["val"]] == [gate.shape] * (2 + wanted)
    assert all(t.is_contiguous() and t.dtype == gate.dtype for t in call.meta["val"])


def test_which_gates_have_warps_of_their_own_for_the_gradient():
    dy, w, *_ = hidden()
    assert gated_gradient_tile(dy, w, "silu").finishers
    assert not gated_gradient_tile(dy.float(), w, "silu").finishers
    assert not gated_gradient_tile(dy[:512], w, "silu").finishers, "a short product"
    assert not takes_gated_gradient(dy, "sigmoid"), "no derivative is written for it"
    with as_on(gpu("A100")):
        assert not gated_gradient_tile(dy, w, "silu").finishers


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
    """With another alignment, layout, dtype or activation it is compiled, with other rows not."""
    first, again, lent = launches
    tile = list(SPECIALISED[2])

    def run(
        rows=256, act="silu", dtype=torch.bfloat16, by_output=True, offset=0, save=True, bias=None
    ):  # fmt: skip
        x = torch.zeros(rows * 64 + offset, dtype=dtype)[offset:].view(rows, 64)
        w, w2 = (torch.zeros(64, 128, dtype=dtype) for _ in range(2))
        if by_output:
            w, w2 = w.t().contiguous().t(), w2.t().contiguous().t()
        b = torch.zeros(128, dtype=bias or dtype)
        out = specialised_linear(x, w, b, w2, None, act, save, False, tile)
        return x, w, b, w2, out

    run()
    x, w, b, w2, (out, kept) = run(rows=512)
    ((grid, args),) = again
    assert lent == [0], "memory for descriptors, before the launch: another thread may have none"
    assert grid == (4, 1, 1) and len(args) == len(first[0][1])
    for got, want in zip(args[:9], (x, w, w2, b, None, out, kept, None, 512), strict=True):
        assert got is want or got == 512
    assert args[9:] == first[0][1][9:]
    for n, change in enumerate(
        (dict(act="gelu"), dict(dtype=torch.half), dict(by_output=False), dict(offset=4),
         dict(save=False), dict(bias=torch.float32))
    ):  # fmt: skip
        run(**change)
        assert len(first) == n + 2, change
    assert len(again) == 1
    x = torch.zeros(256, 128, dtype=torch.bfloat16)[:, :64]
    for _ in range(2):  # rows that are further apart are never taken for those of before
        specialised_linear(x, w, b, w2, None, "silu", True, False, tile)
    assert len(first) == 9 and len(again) == 1
    one = torch.zeros(1, 128, dtype=torch.bfloat16)[:, :64]  # contiguous, whatever its distance
    specialised.KNOWN.clear()
    specialised_linear(one, w, b, w2, None, "silu", True, False, tile)
    run(rows=512)
    assert len(first) == 11 and len(again) == 1


def test_a_known_gradient_is_launched_as_the_first_was(launches):
    first, again, lent = launches

    def run(
        rows=256, act="gelu", sums=True, offset=0, bias=torch.bfloat16, by_output=False, above=0,
        kept=torch.bfloat16, tile=SPECIALISED[1],
    ):  # fmt: skip
        dy = torch.zeros(rows * 64 + above, dtype=torch.bfloat16)[above:].view(rows, 64)
        w = torch.zeros(64, 512, dtype=torch.bfloat16)
        w = w.t().contiguous().t() if by_output else w
        pre = torch.zeros(rows * 512 + offset, dtype=kept)[offset:].view(rows, 512)
        b = None if bias is None else torch.zeros(512, dtype=bias)
        return dy, w, pre, b, specialised_gradient(dy, w, pre, b, act, sums, list(tile))

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
        dict(tile=SPECIALISED[1]._replace(group=16)),
    )  # fmt: skip
    for n, change in enumerate(changes):
        run(**change)
        assert len(first) == n + 2, change
    assert len(again) == 1


def test_a_known_gradient_of_a_gate_is_launched_as_the_first_was(launches):
    first, again, lent = launches

    def run(
        rows=256, act="silu", offset=0, of_up=0, biases=(torch.bfloat16, None), by_output=False,
        kept=torch.bfloat16, kept_up=None, tile=SPECIALISED[1], hidden=True,
    ):  # fmt: skip
        dy, w = torch.zeros(rows, 64, dtype=torch.bfloat16), torch.zeros(64, 512).bfloat16()
        w = w.t().contiguous().t() if by_output else w
        gate, up = (
            torch.zeros(rows * 512 + above, dtype=kind)[above:].view(rows, 512)
            for above, kind in ((offset, kept), (of_up, kept_up or kept))
        )
        b, b2 = (None if kind is None else torch.zeros(512, dtype=kind) for kind in biases)
        found = specialised_gated_gradient(dy, w, gate, up, b, b2, act, hidden, list(tile))
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
        dict(kept_up=torch.half), dict(tile=SPECIALISED[1]._replace(group=16)),
    )  # fmt: skip
    for n, change in enumerate(changes):
        run(**change)
        assert len(first) == n + 2, change
    assert len(again) == 1
