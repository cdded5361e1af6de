"""The kernels of linear layers with what follows them, against fp64: every activation, layout and
edge, few rows, and the gradient of a hidden layer.
"""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fusion_backend.kernels.common.activations import activate, activation_gradient
from fusion_backend.kernels.gemm import operands
from fusion_backend.kernels.gemm.decode import decode, sizes
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.operands import reject_product
from fusion_backend.kernels.gemm.tiles import Tile
from fusion_backend.ops.operator import call
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject, Unmeasured
from fusion_backend.testing import fused_nodes, rewritten
from tests import selection
from tests.kernel_checks import (
    FLOATS,
    assert_close,
    check_gradient,
    check_value,
    distance,
    exact,
    randn,
    runs_kernels,
)

pytestmark = pytest.mark.usefixtures("poisoned_empties")
ACTS = "identity relu relu_squared gelu gelu_tanh quick_gelu silu sigmoid tanh".split()
BETWEEN = "relu relu_squared gelu gelu_tanh quick_gelu silu".split()  # of hidden layers
HALF = [torch.bfloat16, torch.float16]
SWEEP = Path(__file__).parent.parent / "benchmarks" / "results" / "h100-sweep-decode.json"
SMALL, IN_HALVES = Tile(64, 32, 32, 4, 2, 1, 1), Tile(64, 64, 16, 4, 2, 1, 2, group=2)


@pytest.fixture(autouse=True)
def with_tf32(monkeypatch):
    """fp32 is taken as TF32 only, which the interpreter does not know: it multiplies exactly."""
    monkeypatch.setattr(operands, "precision", lambda: "tf32")


def weight(k, n, dtype, by_output=True):
    w = randn(n, k, dtype=dtype).t() if by_output else randn(k, n, dtype=dtype)
    return w * k**-0.5


def product(x, w, b=None):
    y = exact(x) @ exact(w)
    return y if b is None else y + exact(b)


# The product and its epilogue.


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act, dtype):
    x, w, b = randn(40, 48, dtype=dtype), weight(48, 24, dtype), randn(24, dtype=dtype)
    y, kept, _ = linear(x, w, b, act, save=(True, False), tile=SMALL)
    assert_close(y, activate(product(x, w, b), act), dtype)
    assert_close(kept, product(x, w), dtype)  # without its bias
    y, _, _ = linear(x, w, None, act, w2=w.flip(1).t().contiguous().t(), b2=b, tile=IN_HALVES)
    assert_close(y, activate(product(x, w), act) * product(x, w.flip(1), b), dtype)


@runs_kernels
@pytest.mark.parametrize("tile", [SMALL, IN_HALVES], ids=["whole", "in halves"])
@pytest.mark.parametrize(
    "m, k, n", [(1, 8, 8), (130, 72, 136), (64, 128, 64), (0, 32, 16), (200, 8, 200)]
)
def test_edges_and_layouts(m, k, n, tile):
    """Tiles that stick out below and on the right, sums shorter than a step, and no rows at all."""
    for mine, its in itertools.product((True, False), repeat=2):
        x, b = randn(m, k, dtype=torch.half), randn(n, dtype=torch.half)
        w, w2 = weight(k, n, torch.half, mine), weight(k, n, torch.half, its)
        y, gate, up = linear(x, w, b, "silu", w2=w2, save=(True, True), tile=tile)
        assert_close(y, activate(product(x, w, b), "silu") * product(x, w2), torch.half)
        assert_close(gate, product(x, w), torch.half)
        assert_close(up, product(x, w2), torch.half)


@runs_kernels
def test_rows_of_other_tensors():
    """Padded rows, one row again and again, three dimensions, transposed rows; packed weights."""
    w, packed = weight(40, 24, torch.half), randn(48, 40, dtype=torch.half).t() * 0.2
    for x in (
        randn(7, 64, dtype=torch.half)[:, :40],
        randn(7, 64, dtype=torch.half)[:, 3:43],  # begins in the middle of 16 bytes
        randn(7, 45, dtype=torch.half)[:, :40],  # rows that are no multiple of 16 bytes apart
        randn(300, dtype=torch.half).as_strided((7, 40), (8, 1)),  # rows that overlap
        randn(1, 40, dtype=torch.half).expand(5, 40),
        randn(3, 2, 40, dtype=torch.half).transpose(0, 1),
        randn(40, 7, dtype=torch.half).t(),
    ):
        assert reject_product(x, w=w) is None
        y, _, _ = linear(x, w, None, "gelu")
        assert_close(y, activate(product(x, w), "gelu"), torch.half)
        assert y.is_contiguous()
        y, _, _ = linear(x, packed[:, :24], None, "silu", w2=packed[:, 24:])
        want = activate(product(x, packed[:, :24]), "silu") * product(x, packed[:, 24:])
        assert_close(y, want, torch.half)


@runs_kernels
def test_a_residual_is_added():
    x, w, r = (randn(70, 48, dtype=torch.half) for _ in range(3))
    w = w[:48].t() * 0.2
    wide = torch.cat([r, r], 1)[:, :48]  # rows that are apart
    for residual in (r, wide):
        y, _, _ = linear(x, w, None, "relu", residual=residual, tile=IN_HALVES)
        assert_close(y, activate(product(x, w), "relu") + exact(r), torch.half)


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_scaled_back(dtype):
    x, w = (torch.randint(-99, 99, shape, dtype=torch.int8) for shape in ((70, 64), (48, 64)))
    rows, columns, b = (randn(n, dtype=dtype) * 0.01 for n in (70, 48, 48))
    y, _, _ = linear(
        x, w.t(), b, "identity", row_scale=rows, column_scale=columns, dtype=dtype, tile=SMALL
    )
    want = (x.double() @ w.t().double()) * exact(rows)[:, None] * exact(columns) + exact(b)
    assert_close(y, want, dtype)


@runs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("act", ACTS)
def test_values_that_are_no_ordinary_numbers(act, value):
    x = torch.full((4, 8), value).bfloat16()  # of a weight with zeros, 0 · inf would be NaN
    w = torch.full((8, 8), 0.125).bfloat16()
    y, _, _ = linear(x, w, None, act, tile=SMALL)
    want = activate(x.float() @ w.float(), act).bfloat16()
    if (act, value) == ("gelu", float("inf")):
        want = x  # torch's, on a CPU, is NaN
    torch.testing.assert_close(y, want, equal_nan=True, rtol=0.02, atol=0)


@runs_kernels
@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "quick_gelu", "silu", "sigmoid"])
def test_small_results_keep_their_digits(act):
    """No activation is computed as 1 + something: far left of zero its result is small. Only GELU
    that is rounded to bf16 is.
    """
    x = -torch.linspace(0, 4, 64).half()
    rows = torch.zeros(64, 8, dtype=torch.half)
    rows[:, 0] = x
    w = torch.eye(8).half()
    y, _, _ = linear(rows, w, None, act, tile=SMALL)
    want = activate(x.double(), act)
    torch.testing.assert_close(y[:, 0].double(), want, rtol=0.004, atol=1e-7)


# Few rows.


@runs_kernels
@selection.product(
    shape=[(40, 72, 132), (1048, 24, 132), (136, 200, 1)], m=[0, 1, 5, 33, 64], dtype=FLOATS
)
def test_few_rows(shape, m, dtype):
    """The third shape has many columns for each multiprocessor."""
    k, n, processors = shape
    x, b = randn(m, k, dtype=dtype), randn(n, dtype=dtype)
    for mine, its in ((True, True), (True, False), (False, True), (False, False)):
        w, w2 = weight(k, n, dtype, mine), weight(k, n, dtype, its)
        want = activate(product(x, w, b), "silu")
        size = m, k, n
        for weights, laid in ((1, mine), (2, mine and its)):
            constants = sizes(*size, weights, dtype.itemsize, processors, laid)
            more, second = ((), 1) if weights == 1 else ((w2, b), product(x, w2, b))
            y = decode(x, w, b, "silu", *more, constants=constants)
            assert_close(y, want * second, dtype)
        assert_close(decode(x, w, b, "silu", w2, b), want * product(x, w2, b), dtype)


@runs_kernels
def test_few_rows_that_are_far_apart():
    """As of the last token of each text: the fifth row begins behind 2³¹ elements."""
    apart = 2**29 + 8
    memory = np.empty(4 * apart + 16, dtype=np.int16)  # of which hardly any page is ever touched
    x = torch.from_numpy(memory).view(torch.bfloat16).as_strided((5, 16), (apart, 1))
    x.copy_(randn(5, 16, dtype=torch.bfloat16))
    w = weight(16, 24, torch.bfloat16)
    assert_close(decode(x, w, None, "relu"), activate(product(x, w), "relu"), torch.bfloat16)


@pytest.mark.parametrize("m", [0, 1, 16, 17, 64])
@pytest.mark.parametrize("k, n", [(4096, 14336), (4096, 4096), (768, 3072), (16, 8), (14336, 4096)])
def test_the_sizes_of_few_rows(m, k, n):
    """All rows are covered, and the stages fit into the memory of a multiprocessor."""
    for weights, itemsize, laid in itertools.product((1, 2), (2, 4), (True, False)):
        c = sizes(m, k, n, weights, itemsize, 132, laid)
        assert ("BM" in c) == (not laid or m > 1)
        if "BM" in c:
            assert c["BM"] >= m
            tiles = c["BK"] * (c["BM"] + weights * c["BN"]) * itemsize
            assert tiles * c["num_stages"] <= 227 << 10
        else:  # as many fp32 sums as a thread has registers for
            assert weights * c["BK"] * c["BN"] // (32 * c["num_warps"]) <= 64


def test_the_sizes_of_few_rows_are_within_5_percent_of_the_fastest_that_was_timed():
    """The file was written with split-K among the choices, and names the vector kernel gemv."""
    times: dict[str, dict[str, float]] = {}
    for row in json.loads(SWEEP.read_text())["rows"]:
        times.setdefault(row["work"], {})[row["config"]] = row["ms"]
    for work, timed in times.items():
        m, k, n = (int(re.search(rf"\b{name}=(\d+)", work)[1]) for name in "mkn")
        weights = 2 if "gated" in work else 1
        c = sizes(m, k, n, weights, 2, 132, "by inputs" not in work)
        words = " ".join(f"{name}={number}" for name, number in c.items())
        if "BM" in c:
            whole = -(-k // c["BK"]) * c["BK"]
            words = words.replace(" num_warps", f" SHARE={whole} SHARES=1 num_warps")
        else:
            words = f"gemv {words} num_stages=1"
        fastest = min(ms for config, ms in timed.items() if config != "product alone")
        assert timed[words] <= 1.05 * fastest, (work, words)


# The gradient of a hidden layer.


@runs_kernels
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("act", BETWEEN)
def test_gradient_of_a_hidden_layer(act, dtype):
    dy, w = randn(70, 40, dtype=dtype), weight(40, 72, dtype)
    pre = randn(70, 72, dtype=dtype)
    for tile, b in ((SMALL, None), (IN_HALVES, randn(72, dtype=dtype))):
        leaf = (exact(pre) if b is None else exact(pre) + exact(b)).requires_grad_()
        (want,) = torch.autograd.grad(activate(leaf, act), leaf, product(dy, w))
        d, sums = hidden_gradient(dy, w, pre, b, act, True, tile)
        assert_close(d, want, dtype)
        by_tanh = act == "gelu" and dtype == torch.bfloat16  # rounds to 2^-11
        assert_close(sums, want.sum(0), torch.float32, factor=100 if by_tanh else 1)


@runs_kernels
def test_gradient_of_a_hidden_layer_without_sums_or_rows():
    dy, w, gate = randn(0, 40), weight(40, 72, torch.half), randn(0, 72, dtype=torch.half)
    d, sums = hidden_gradient(dy.half(), w, gate, None, "gelu", True, SMALL)
    assert d.shape == (0, 72)
    assert sums.shape == (72,) and not sums.any()
    gate = randn(3, 72, dtype=torch.half)
    for dy in (randn(1, 40).half(), randn(3, 45).half()[:, 3:43], randn(1, 1).half()):
        dy = dy.expand(3, 40)
        d, _ = hidden_gradient(dy, w, gate, None, "relu", False, SMALL)
        assert_close(d, product(dy, w) * (gate > 0), torch.half)
    assert hidden_gradient(randn(3, 40).half(), w, gate, None, "gelu", False, SMALL)[1] is None


@pytest.mark.parametrize("act", [*BETWEEN, "sigmoid", "tanh", "identity"])
def test_slopes_in_torch(act):
    x = torch.linspace(-8, 8, 401, dtype=torch.float64).requires_grad_()
    (want,) = torch.autograd.grad(activate(x, act).sum(), x)
    for rounded in (False, True):
        got = activation_gradient(torch.ones(401), x.detach().float(), act, rounded)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6)


# The patterns that use them.


@runs_kernels
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "tanh", "sigmoid", "relu_squared"])
def test_linear_act(act, dtype):
    for shape, bias in (((70, 40), True), ((2, 3, 40), False)):
        x, w, b = randn(*shape, dtype=dtype), weight(40, 24, dtype), randn(24, dtype=dtype)
        args = x, w, b if bias else None, act
        check_value("linear_act", *args)
        check_gradient("linear_act", *args)
        check_gradient("linear_act", *args, needs=["w"])


@runs_kernels
@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp(act, bias):
    x, w2 = randn(2, 35, 40, dtype=torch.half), weight(24, 16, torch.half, False)
    first = [weight(40, 24, torch.half), randn(24, dtype=torch.half) if bias else None]
    second = [w2, randn(16, dtype=torch.half) if bias else None]
    args = x, *first, *second, act
    check_value("mlp", *args)
    check_gradient("mlp", *args)
    check_gradient("mlp", *args, needs=["w2"])
    check_gradient("mlp", *args, needs=["x", *(["b1"] if bias else [])])


@runs_kernels
@pytest.mark.parametrize("name", ["linear_act", "gated_linear", "mlp"])
def test_gradients_of_gradients(name):
    """What a kernel has saved is a constant to autograd; it was used all the same."""
    x, w, v = (randn(8, 8, dtype=torch.half).requires_grad_() for _ in range(3))
    rest = dict(
        linear_act=(w, None, "gelu"), gated_linear=(w, None, v, None, "silu"),
        mlp=(w, None, v, None, "gelu"),
    )[name]  # fmt: skip
    leaves = [t for t in (x, w, v) if any(t is a for a in (x, *rest))]
    pattern, found = FUSION_RULES[name], []
    for fn in (lambda *a: call(pattern, a), pattern.reference):
        (g,) = torch.autograd.grad(fn(x, *rest).float().sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.float().square().sum(), leaves))
    for ours, theirs in zip(*found, strict=True):
        assert distance(ours, theirs) < 0.01


def test_what_is_refused():
    x, w = randn(70, 48, dtype=torch.half), weight(48, 24, torch.half)
    guard = FUSION_RULES["linear_act"].guard_fn
    for args, sentence in [
        ((x[0], w), "x has 1 dimensions"),
        ((x, w[None]), "w has 3 dimensions"),
        ((x, w.float()), "x is torch.float16 and w is torch.float32"),
        ((x[:, :47].contiguous(), w[:47]), "the rows of x, 47 elements apart"),
        ((x[:, :24], w[::2]), "neither the rows nor the columns of w"),
        ((x, weight(48, 20, torch.half)), "the rows of result, 20 elements apart"),
        ((x, randn(26, 52, dtype=torch.half)[1:25, 2:50].t()), "the rows of w, 52 elements apart"),
        ((x, randn(25, 56, dtype=torch.half)[:24, 4:52].t()), "w begins in the middle"),
        ((x[:, :0], w[:0]), "a weight of 0 x 24"),
    ]:
        answer = guard(*args, None, "gelu")
        assert type(answer) is Reject and sentence in answer.reason, answer
    assert "b with shape (48,)" in guard(x, w, randn(48).half(), "gelu").reason
    assert guard(x, w, None, "gelu") is None
    assert guard(x[:, :47], w[:47], None, "gelu") is None  # rows are aligned, whatever their length
    assert type(FUSION_RULES["linear_act"].worthwhile_fn(x, w, None, "gelu", False)) is Unmeasured


def test_fp32_needs_tf32(monkeypatch):
    x, w = randn(70, 48), weight(48, 24, torch.float32)
    assert FUSION_RULES["linear_act"].guard_fn(x, w, None, "gelu") is None
    monkeypatch.undo()
    assert torch.get_float32_matmul_precision() == "highest"
    answer = FUSION_RULES["linear_act"].guard_fn(x, w, None, "gelu")
    assert "set_float32_matmul_precision" in answer.reason
    assert "bf16 and fp16" in FUSION_RULES["mlp"].guard_fn(x, w, None, w.t(), None, "gelu").reason


def test_a_bias_in_fp32_under_autocast():
    """The hidden layer is fp32 then, and cast for the second product."""

    def block(x, w1, b1, w2, b2):
        with torch.autocast("cpu", torch.bfloat16):
            return F.silu(F.linear(x, w1) + b1) @ w2 + b2

    args = [randn(9, 16), randn(24, 16), randn(24), randn(24, 8), randn(8)]
    args = [t.requires_grad_() for t in args]
    fused = rewritten(block, *args)
    assert [str(n.target) for n in fused_nodes(fused)] == ["fusion.mlp.default"]
    (result,) = fused(*args)
    torch.testing.assert_close(result, block(*args), rtol=0.02, atol=0.02)
