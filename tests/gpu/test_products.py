"""On a GPU: matrix products with their epilogue, launched directly and through Inductor, against
fp64.
"""

import copy
import functools

import fusion_backend.patterns  # noqa: F401 (the rules by name)
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend
from benchmarks.measure.distance import distance
from fusion_backend.kernels.common.activations import activate
from fusion_backend.kernels.gemm.decode import decode
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.library import library_linear, library_takes
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.specialised_gated_gradient import ACTIVATIONS as GATES
from fusion_backend.kernels.gemm.specialised_gradient import ACTIVATIONS as GRADIENT_ACTS
from fusion_backend.kernels.gemm.specialised_linear import ACTIVATIONS as SPECIALISED_ACTS
from fusion_backend.kernels.gemm.tiles import SPECIALISED, candidates
from fusion_backend.ops.operator import call
from fusion_backend.ops.registry import FUSION_RULES
from tests.gpu.test_on_gpu import ALWAYS, as_close_as_eager, fused, profiled, ran

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
ACTS = "identity relu relu_squared gelu gelu_tanh quick_gelu silu sigmoid tanh".split()
# One rounding of the result, and that of what the hardware approximates.
CLOSE = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 3e-3}


def tensor(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def weight(k, n, dtype=torch.bfloat16, by_output=True):
    w = tensor(n, k, dtype=dtype).t() if by_output else tensor(k, n, dtype=dtype)
    return w * k**-0.5


def product(x, w, b=None):
    y = x.double() @ w.double()
    return y if b is None else y + b.double()


def close(got, want):
    assert got.shape == want.shape and not got.isnan().any()
    assert distance(got, want) <= CLOSE[got.dtype], distance(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_every_activation(act, dtype):
    x, w, b = tensor(1000, 512, dtype=dtype), weight(512, 768, dtype), tensor(768, dtype=dtype)
    w2 = weight(512, 768, dtype, False)
    y, kept, _ = linear(x, w, b, act, save=(True, False))
    close(y, activate(product(x, w, b), act))
    close(kept, product(x, w))  # without its bias
    y, gate, up = linear(x, w, b, act, w2=w2, save=(True, True))
    close(y, activate(product(x, w, b), act) * product(x, w2))
    close(gate, product(x, w))
    close(up, product(x, w2))


@pytest.mark.parametrize("weights", [1, 2])
def test_every_tile(weights):
    """Also where tiles stick out below and on the right, and a sum ends within a step."""
    for dtype in (torch.bfloat16, torch.float32):
        for tile in candidates(weights, dtype.itemsize):
            for m, k, n in ((2000, 520, 1032), (128, 64, 256), (1, 8, 8)):
                x, w = tensor(m, k, dtype=dtype), weight(k, n, dtype)
                w2 = weight(k, n, dtype, False) if weights == 2 else None
                torch.set_float32_matmul_precision("high")
                try:
                    y, _, _ = linear(x, w, None, "silu", w2=w2, tile=tile)
                finally:
                    torch.set_float32_matmul_precision("highest")
                want = activate(product(x, w), "silu")
                close(y, want if w2 is None else want * product(x, w2))


# The products are rounded, and the result again; the squared relu doubles the error of the first.
TWICE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


def close_twice(got, want):
    assert got.shape == want.shape and not got.isnan().any()
    assert distance(got, want) <= TWICE[got.dtype], distance(got, want)


def with_finishers(m, k, n, act, dtype=torch.bfloat16, by_output=True, bias=True, keep=True):
    """One weight and two, against fp64, and what is kept for the backward."""
    x, b = tensor(m, k, dtype=dtype), tensor(n, dtype=dtype) if bias else None
    w, w2 = weight(k, n, dtype, by_output), weight(k, n, dtype, by_output)
    y, kept, none = linear(x, w, b, act, save=(keep, False), tile=SPECIALISED[1])
    close_twice(y, activate(product(x, w, b), act))
    assert not none.numel() and bool(kept.numel()) == keep
    second = tensor(n, dtype=dtype)  # there may be one bias alone
    more = dict(w2=w2, b2=second, save=(keep, keep), tile=SPECIALISED[2])
    both, gate, up = linear(x, w, b, act, **more)
    close_twice(both, activate(product(x, w, b), act) * product(x, w2, second))
    if keep:
        for got, want in ((kept, product(x, w)), (gate, product(x, w)), (up, product(x, w2))):
            close(got, want)  # without their biases
        one, gate, up = linear(x, w, b, act, **more | dict(save=(True, False)))
        assert torch.equal(one, both) and not up.numel()
        close(gate, product(x, w))


@pytest.mark.parametrize("act", SPECIALISED_ACTS)
def test_warps_of_their_own_for_the_epilogue(act):
    even = SPECIALISED_ACTS.index(act) % 2 == 0
    with_finishers(5000, 200, 776, act, DTYPES[even], by_output=True, bias=even, keep=True)
    with_finishers(5000, 200, 776, act, DTYPES[not even], by_output=False, bias=True, keep=False)


@pytest.mark.parametrize("m, k, n", [(1, 8, 8), (129, 64, 264), (40000, 72, 520), (300, 1032, 136)])
def test_edges_of_tiles_with_finishers(m, k, n):
    """Ragged on all sides, one step and many, fewer tiles than programs and many more."""
    with_finishers(m, k, n, "silu")


@pytest.mark.parametrize("by_output", [True, False])
def test_parts_of_tensors_with_finishers(by_output):
    """Two weights in one, x as columns of another tensor, and rows that are all the same."""
    n, k = 776, 512
    packed = weight(k, 2 * n, by_output=by_output)
    w, w2 = packed[:, :n], packed[:, n:]
    for x in (tensor(3000, 1024)[:, 512:], tensor(1, 512).expand(3000, 512)):
        y, _, _ = linear(x, w, None, "silu", w2=w2, tile=SPECIALISED[2])
        close_twice(y, activate(product(x, w), "silu") * product(x, w2))


def test_the_result_is_the_same_each_time():
    """A program whose warps met too early or too late would now and then store another tile."""
    x, w, w2, b = tensor(16384, 768), weight(768, 3072), weight(768, 3072), tensor(3072)
    for more in (
        dict(act="gelu", tile=SPECIALISED[1]),
        dict(act="gelu", tile=SPECIALISED[1], save=(True, False)),
        dict(act="silu", tile=SPECIALISED[2], w2=w2, b2=b, save=(True, True)),
    ):
        first = linear(x, w, b, **more)
        for _ in range(100):
            again = linear(x, w, b, **more)
            assert all(map(torch.equal, again, first)), more


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["relu", "relu_squared", "gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_gradient_of_a_hidden_layer(act, dtype):
    dy, w = tensor(1000, 512, dtype=dtype), weight(512, 776, dtype, False)
    pre = tensor(1000, 776, dtype=dtype)
    b = tensor(776, dtype=dtype)
    leaf = (pre.double() + b.double()).requires_grad_()
    (want,) = torch.autograd.grad(activate(leaf, act), leaf, product(dy, w))
    for tile in candidates(1, 2):
        d, sums = hidden_gradient(dy, w, pre, b, act, True, tile)
        close(d, want)
        close(sums, want.sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", GRADIENT_ACTS)
def test_gradients_with_finishers(act, dtype):
    """With and without bias and sums, weights that lie by outputs and by inputs."""
    by_output = (GRADIENT_ACTS.index(act) + DTYPES.index(dtype)) % 2 == 0
    gradient_with_finishers(5000, 200, 776, act, dtype, by_output)


@pytest.mark.parametrize("m, k, n", [(1, 8, 8), (129, 64, 264), (40000, 72, 520)])
def test_edges_of_gradients_with_finishers(m, k, n):
    gradient_with_finishers(m, k, n, "gelu", torch.bfloat16, False)


def gradient_with_finishers(m, k, n, act, dtype, by_output):
    dy, w, b = tensor(m, k, dtype=dtype), weight(k, n, dtype, by_output), tensor(n, dtype=dtype)
    before = tensor(m, n, dtype=dtype)
    for pre, bias, summed in ((before, b, True), (before + b, None, False)):
        leaf = (pre.double() if bias is None else pre.double() + bias.double()).requires_grad_()
        (want,) = torch.autograd.grad(activate(leaf, act), leaf, product(dy, w))
        d, sums = hidden_gradient(dy, w, pre, bias, act, summed, SPECIALISED[1])
        close_twice(d, want)
        assert summed or sums is None
        if summed:
            close_twice(sums.to(dtype), want.sum(0))


def test_a_gradient_with_finishers_is_the_same_each_time():
    dy, w, pre, b = tensor(16384, 768), weight(768, 3072), tensor(16384, 3072), tensor(3072)
    first = hidden_gradient(dy, w, pre, b, "gelu", True, SPECIALISED[1])
    for _ in range(100):
        assert all(
            map(torch.equal, hidden_gradient(dy, w, pre, b, "gelu", True, SPECIALISED[1]), first)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", GATES)
def test_gated_gradients_with_finishers(act, dtype):
    """With and without biases, weights that lie by outputs and by inputs."""
    bias = (GATES.index(act) + DTYPES.index(dtype)) % 2 == 0
    gated_gradient_with_finishers(5000, 200, 776, act, dtype, by_output=bias, bias=bias)


@pytest.mark.parametrize("m, k, n", [(1, 8, 8), (129, 64, 264), (40000, 72, 520)])
def test_edges_of_gated_gradients_with_finishers(m, k, n):
    gated_gradient_with_finishers(m, k, n, "silu", torch.bfloat16, by_output=False, bias=True)


def gated_gradient_with_finishers(m, k, n, act, dtype, by_output, bias):
    dy, w = tensor(m, k, dtype=dtype), weight(k, n, dtype, by_output)
    gate, up = tensor(m, n, dtype=dtype), tensor(m, n, dtype=dtype)
    b, b2 = (tensor(n, dtype=dtype) if bias else None for _ in range(2))
    leaves = [
        (t.double() if v is None else t.double() + v.double()).requires_grad_()
        for t, v in ((gate, b), (up, b2))
    ]
    h = activate(leaves[0], act) * leaves[1]
    wants = torch.autograd.grad(h, leaves, product(dy, w))
    found = gated_gradient(dy, w, gate, b, up, b2, act, True, SPECIALISED[1])
    for got, want in zip(found, (*wants, h.detach()), strict=True):
        close_twice(got, want)
    *both, nothing = gated_gradient(dy, w, gate, b, up, b2, act, False, SPECIALISED[1])
    assert nothing is None and all(map(torch.equal, both, found[:2]))


def test_a_gated_gradient_with_finishers_is_the_same_each_time():
    dy, w = tensor(16384, 768), weight(768, 3072)
    gate, up = tensor(16384, 3072), tensor(16384, 3072)
    first = gated_gradient(dy, w, gate, None, up, None, "silu", True, SPECIALISED[1])
    for _ in range(100):
        again = gated_gradient(dy, w, gate, None, up, None, "silu", True, SPECIALISED[1])
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_have_warps_of_their_own_for_the_derivative(bias, gated):
    """Through Inductor, in CUDA graphs, with a number of rows that changes."""
    m = FeedForward(gated, bias, 1024, 4096).to("cuda", torch.bfloat16)
    for options in ({}, {"triton.cudagraphs": True}, {"fusion.dynamic": True}):
        torch.compiler.reset()
        changes = bool(options.pop("fusion.dynamic", False))
        compiled = torch.compile(m, backend="fusion", options=ALWAYS | options, dynamic=changes)
        for rows in (16384, 16000, 9000) if changes else (16384,) * 3:
            as_close_as_eager(m, compiled, tensor(rows, 1024))
        x = tensor(16384, 1024)

        def step(x=x, call=compiled):
            m.zero_grad()  # of memory that the next replay writes to
            call(x).sum().backward()

        kernels, _ = profiled(step)
        kind = "gated_gradient" if gated else "gradient"
        assert ran(f"specialised_{kind}_kernel", kernels), kernels


@pytest.mark.parametrize("act", ["relu", "relu_squared"])
def test_infinite_products_are_masked_in_a_gradient(act):
    """Products beyond what fp16 holds are infinite; where relu is zero, so is the gradient."""
    dy, w = torch.full((256, 64), 300.0).half().cuda(), torch.full((64, 512), 20.0).half().cuda()
    pre = tensor(256, 512, dtype=torch.half).relu()
    d, sums = hidden_gradient(dy, w, pre, None, act, True, SPECIALISED[1])
    assert torch.equal(d, torch.where(pre > 0, torch.inf, 0.0).half()) and not sums.isnan().any()
    if act in GATES:
        up = torch.ones_like(pre)
        d_gate, _, h = gated_gradient(dy, w, pre, None, up, None, act, True, SPECIALISED[1])
        assert torch.equal(d_gate, d) and torch.equal(h, pre)


def test_gradients_of_no_rows_with_finishers():
    dy, w, pre = tensor(0, 64), weight(64, 512), tensor(0, 512)
    d, sums = hidden_gradient(dy, w, pre, None, "gelu", True, SPECIALISED[1])
    assert d.shape == (0, 512) and torch.equal(sums, torch.zeros_like(sums))
    found = gated_gradient(dy, w, pre, None, pre, None, "silu", True, SPECIALISED[1])
    assert [t.shape for t in found] == [(0, 512)] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 40, 64])
@pytest.mark.parametrize("k, n", [(4096, 14336), (4096, 1024), (776, 3080)])
def test_few_rows(m, k, n, dtype):
    x, b = tensor(m, k, dtype=dtype), tensor(n, dtype=dtype)
    for mine, its in ((True, True), (True, False), (False, False)):
        w, w2 = weight(k, n, dtype, mine), weight(k, n, dtype, its)
        want = activate(product(x, w, b), "silu")
        close(decode(x, w, b, "silu"), want)
        close(decode(x, w, b, "silu", w2, b), want * product(x, w2, b))


@pytest.mark.parametrize("act", ["relu", "gelu_tanh"])
def test_the_library_computes_the_same_function(act):
    x, w, b = tensor(3, 500, 512), weight(512, 768), tensor(768)
    assert library_takes(x, w, b, act) and not library_takes(x, w, b, "gelu")
    close(library_linear(x, w, b, act), activate(product(x, w, b), act))


def test_int8_is_exact():
    shapes = (999, 4096), (1040, 4096)
    q, w = (torch.randint(-128, 128, s, device="cuda").to(torch.int8) for s in shapes)
    one = torch.ones(1040, device="cuda")
    y, _, _ = linear(q, w.t(), None, "identity", column_scale=one, dtype=torch.float32)
    assert torch.equal(y.double(), (q.double() @ w.t().double()).float().double())


def test_more_than_two_to_the_31_elements():
    m, k, n = 600_000, 64, 4096
    x, w = tensor(m, k), weight(k, n)
    y, _, _ = linear(x, w, None, "relu")
    for part in (slice(0, 300), slice(m - 300, m)):
        close(y[part], activate(product(x[part], w), "relu"))


def test_rows_of_other_tensors():
    w = weight(512, 768)
    wide = tensor(700, 1024)
    for x in (wide[:, :512], wide[:, 512:], tensor(1, 512).expand(300, 512), tensor(512, 300).t()):
        assert FUSION_RULES["linear_act"].guard_fn(x, w, None, "gelu") is None
        y = call(FUSION_RULES["linear_act"], (x, w, None, "gelu"))
        close(y, activate(product(x, w), "gelu"))


class FeedForward(nn.Module):
    def __init__(self, gated: bool, bias: bool, width: int = 512, inner: int = 2048, p=0.0):
        super().__init__()
        self.dropout = nn.Dropout(p)
        self.up, self.down = nn.Linear(width, inner, bias), nn.Linear(inner, width, bias)
        self.gate = nn.Linear(width, inner, bias) if gated else None

    def forward(self, x):
        if self.gate is None:
            return self.down(self.dropout(F.gelu(self.up(x))))
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_block_trains(gated, bias, dtype):
    m = FeedForward(gated, bias).to("cuda", dtype)
    x = tensor(3, 700, 512, dtype=dtype)
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, fullgraph=True)
    as_close_as_eager(m, compiled, x)
    (site,) = fused()["gated_mlp" if gated else "mlp"]
    assert (site.forward, site.backward) == ("kernel", "kernel"), site
    x.requires_grad_()
    kernels, host = profiled(lambda: compiled(x).sum().backward())
    assert ran("linear_kernel", kernels), kernels
    assert gated or ran("hidden_gradient_kernel", kernels), kernels
    assert not [name for name in host if name.startswith("fusion::")]


@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_block_infers(gated):
    m, x = FeedForward(gated, True).to("cuda", torch.bfloat16), tensor(3, 700, 512)
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, fullgraph=True)
    with torch.no_grad():
        got = compiled(x)
        kernels, _ = profiled(lambda: compiled(x))
    assert ran("linear_kernel", kernels), kernels
    assert distance(got, copy.deepcopy(m).double()(x.double())) <= 6e-3


@pytest.mark.parametrize("rows", [1, 16, 500])
def test_cuda_graphs(rows):
    """Descriptors are made by each launch, in memory that a replay has, too."""
    m = FeedForward(True, False).to("cuda", torch.bfloat16)
    wide = copy.deepcopy(m).double()
    options = ALWAYS | {"triton.cudagraphs": True}
    compiled = torch.compile(m, backend="fusion", options=options)
    with torch.no_grad():
        for _ in range(4):
            x = tensor(rows, 512)
            assert distance(compiled(x), wide(x.double())) <= 6e-3
    assert fused()["gated_linear"]


@pytest.mark.parametrize("train", [False, True])
def test_many_rows_have_warps_of_their_own_for_the_epilogue(train):
    """Through Inductor, in CUDA graphs, with a number of rows that changes."""
    m = FeedForward(True, True, 512, 2048).to("cuda", torch.bfloat16)
    wide = copy.deepcopy(m).double()
    for options in ({}, {"triton.cudagraphs": True}, {"fusion.dynamic": True}):
        torch.compiler.reset()
        changes = bool(options.pop("fusion.dynamic", False))
        compiled = torch.compile(m, backend="fusion", options=ALWAYS | options, dynamic=changes)
        for rows in (16384, 16000, 16384, 9000) if changes else (16384,) * 3:
            x = tensor(rows, 512)
            if train:
                as_close_as_eager(m, compiled, x)
            else:
                with torch.no_grad():
                    assert distance(compiled(x), wide(x.double())) <= 6e-3
        with torch.set_grad_enabled(train):
            kernels, _ = profiled(functools.partial(compiled, tensor(16384, 512)))
        assert ran("specialised_linear_kernel", kernels), kernels
    assert fused()["gated_mlp" if train else "gated_linear"]


def test_the_number_of_rows_may_change():
    m = FeedForward(False, True).to("cuda", torch.bfloat16)
    wide = copy.deepcopy(m).double()
    compiled = torch.compile(m, backend="fusion", options=ALWAYS, dynamic=True)
    with torch.no_grad():
        for rows in (300, 77, 2000, 1, 65):
            x = tensor(rows, 512)
            assert distance(compiled(x), wide(x.double())) <= 6e-3
    assert fused()["linear_act"]


@pytest.mark.parametrize("gated", [False, True])
def test_no_more_is_kept_for_backward(gated):
    """What an MLP keeps for backward is what Inductor keeps; with a gate it is less, because the
    hidden layer is not kept.
    """
    m, x = FeedForward(gated, True, 1024, 4096).to("cuda", torch.bfloat16), tensor(8192, 1024)
    kept = {}
    for backend in ("inductor", "fusion"):
        torch.compiler.reset()
        options = ALWAYS if backend == "fusion" else None
        compiled = torch.compile(m, backend=backend, options=options)
        compiled(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = compiled(x)
        kept[backend] = torch.cuda.memory_allocated() - before
        del out
    assert kept["fusion"] <= (0.75 if gated else 1.01) * kept["inductor"], kept
    assert fusion_backend.report().fused
