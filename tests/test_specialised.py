"""Products whose epilogue has warps of its own: compiled for Hopper, which products it takes, and
how it is called. Gluon has no interpreter; tests/gpu/test_products.py runs the kernel.
"""

import math

import fusion_backend.patterns  # noqa: F401 (the rules by name)
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend.kernels.common import tuned
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.common.target import as_on, gpu
from fusion_backend.kernels.gemm import specialised
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient, gated_gradient_tile
from fusion_backend.kernels.gemm.hidden_gradient import gradient_tile, hidden_gradient
from fusion_backend.kernels.gemm.library import library_takes
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.specialised import compile_in_trial
from fusion_backend.kernels.gemm.specialised_gated_gradient import takes_gated_gradient
from fusion_backend.kernels.gemm.specialised_gradient import takes_gradient
from fusion_backend.kernels.gemm.specialised_linear import (
    ACTIVATIONS,
    launch_of,
    results,
    specialises,
    tile_of,
)
from fusion_backend.kernels.gemm.tiles import SPECIALISED, Tile, tile_for
from fusion_backend.ops.registry import FUSION_RULES
from tests.without_interpreter import output_of


def operands(m=4096, k=1024, n=4096, by_output=True, dtype=torch.bfloat16, weights=2):
    """x, weights and biases without data."""

    def weight():
        if by_output:
            return torch.empty(n, k, dtype=dtype, device="meta").t()
        return torch.empty(k, n, dtype=dtype, device="meta")

    x = torch.empty(m, k, dtype=dtype, device="meta")
    biases = [torch.empty(n, dtype=dtype, device="meta") for _ in range(2)]
    return x, *(weight() for _ in range(weights)), *biases[:weights]


def launched(x, w, b, act, w2=None, b2=None, keep=(False, False), dropout=None, **changes):
    """The launch of a tile with finishers."""
    found = []
    tile = SPECIALISED[1 if w2 is None else 2]._replace(**changes)
    with trial(lambda *launch: found.append(launch)):
        filled = results(x, w, keep, torch.Tensor.new_empty)
        compile_in_trial(launch_of(x, w, b, w2, b2, dropout, act, filled, keep, tile))
    (launch,) = found
    return launch


COMPILED = """
import torch
from benchmarks.launches.launches import describe
from benchmarks.launches.resources import SHARED_LIMIT, usage
from fusion_backend.kernels.common.dropout import Dropout
from fusion_backend.kernels.gemm.specialised_linear import specialises
from tests.test_specialised import launched, operands
dropout = Dropout(torch.empty(1, dtype=torch.int64, device="meta"), 0.1)
for dtype, by_output in ((torch.bfloat16, True), (torch.float16, False)):
    x, w, w2, b, b2 = operands(by_output=by_output, dtype=dtype)
    more = [dict(b=b, w2=w2, b2=b2, keep=(True, True)), dict(b=None, w2=w2), dict(b=b)]
    more += [dict(b=b, keep=(keep, False), dropout=dropout) for keep in (True, False)]
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
