"""The kernels of the built-in patterns against fp64, value and gradient, in Triton's interpreter or
on a GPU.
"""

import itertools
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor

from benchmarks.records.runs import Run
from fusion_backend.frontends.loading import patterns
from fusion_backend.kernels import interpreting
from fusion_backend.kernels.common.inputs import as_rows
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm import backward as norms_backward
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject

patterns()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreting(), reason="needs TRITON_INTERPRET=1 or a GPU"
)
pytestmark = pytest.mark.usefixtures("poisoned_empties")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
# |got - exact| / |exact|. fp32: some roundings of 2**-24. fp16: one rounding at the end. bf16: two,
# and the interpreter rounds to bf16 by cutting off, which doubles the error.
CLOSE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.2e-2}


def randn(*shape, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=DEVICE).to(dtype)


def exact(value):
    return value.detach().double() if isinstance(value, Tensor) else value


def distance(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-6)).item()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    assert got.dtype == dtype
    if want.numel():
        assert distance(got, want) <= factor * CLOSE[dtype]


def check_value(name: str, *args, factor: float = 1):
    """The kernel's first result against the fp64 reference."""
    pattern = FUSION_RULES[name]
    assert not isinstance(pattern.guard_fn(*args), Reject)
    out = pattern.kernel_fn(*args, *([False] if pattern.saves else []))
    out = out[0] if pattern.saves else out
    want = pattern.reference(*map(exact, args))
    assert_close(out, want, args[0].dtype, factor)
    assert out.stride() == pattern.reference(*args).stride()
    return out


def check_gradient(name: str, *args, needs=None, factor: float = 4, dy=None) -> None:
    """The backward fed by the kernel's saves, and by the plain torch ones, against autograd in
    fp64.
    """
    pattern = FUSION_RULES[name]
    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
    tensors = [p.name for p in pattern.params if p.tensor]
    needs = {k: isinstance(inputs[k], Tensor) and (needs is None or k in needs) for k in tensors}
    leaves = {
        k: exact(v).requires_grad_(needs[k]) if isinstance(v, Tensor) else v
        for k, v in inputs.items()
    }
    want = pattern.reference(*leaves.values())
    dy = randn(*want.shape, dtype=args[0].dtype) if dy is None else dy
    wanted = [k for k in tensors if needs[k]]
    gradients = dict(
        zip(
            wanted, torch.autograd.grad(want, [leaves[k] for k in wanted], dy.double()), strict=True
        )
    )
    out, *saves = pattern.kernel_fn(*args, True)
    plain = pattern.saved_fn(*args)
    plain = plain if isinstance(plain, tuple) else (plain,)
    for kept, other in zip(saves, plain, strict=True):
        assert kept.shape == other.shape and kept.dtype == other.dtype
    for result, kept in ((out, saves), (pattern.reference(*args), plain)):
        saved = SimpleNamespace(
            **inputs, **dict(zip(pattern.saves, kept, strict=True)), result=result, needs=needs
        )
        results = dict(zip(tensors, pattern.backward_fn(saved, dy), strict=True))
        for k in tensors:
            assert (results[k] is not None) == needs[k], k
            if needs[k]:
                assert_close(results[k], gradients[k], args[0].dtype, factor)


# add_mul, add_mul_exp


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 1003), (2, 3, 2049), (0, 5)])
def test_elementwise(shape, dtype):
    x, y, z = (randn(*shape, dtype=dtype) for _ in range(3))
    check_value("add_mul", x, y, z)
    check_value("add_mul", x, y, 0.3)
    check_value("add_mul_exp", x, y, 0.3)


@runs_kernels
def test_elementwise_keeps_a_permuted_layout():
    x, y, z = (randn(3, 70, 5).permute(2, 0, 1) for _ in range(3))
    assert check_value("add_mul", x, y, z).stride() == x.stride()
    check_value("add_mul_exp", x, y, -1.0)


@runs_kernels
def test_exponential_at_the_ends():
    s = torch.tensor(
        [0.0, -0.0, 88.7, 89.0, -87.0, -200.0, float("inf"), -float("inf"), float("nan")],
        device=DEVICE,
    )
    got, want = FUSION_RULES["add_mul_exp"].kernel_fn(s, torch.zeros_like(s), 1.0), torch.exp(s)
    # The interpreter rounds inside an fma.
    torch.testing.assert_close(
        got, want, rtol=3e-7 if DEVICE == "cuda" else 1e-5, atol=0, equal_nan=True
    )


@runs_kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter rounds inside an fma")
def test_exponential_within_three_ulps():
    s = torch.linspace(-87, 88, 100_003, device=DEVICE)
    got = FUSION_RULES["add_mul_exp"].kernel_fn(s, torch.zeros_like(s), 1.0)
    assert ((got.double() / s.double().exp() - 1).abs() < 3 * 2**-23).all()


def test_elementwise_refusals():
    x, y = randn(4, 6), randn(4, 6)
    guard = FUSION_RULES["add_mul"].guard_fn
    for args, sentence in [
        ((x.double(), y, 1.0), "float64"),
        ((x, y.half(), 1.0), "x is torch.float32 and y is torch.float16"),
        ((x, y[0], 1.0), "x and y differ in memory"),
        ((x, y.t().contiguous().t(), 1.0), "x and y differ in memory"),
        ((x[:, ::2], y[:, ::2], 1.0), "x is not dense"),
        ((x[:1].expand(4, 6), y, 1.0), "x is not dense"),
        ((x, y, x[:, 0]), "x and z differ in memory"),
    ]:
        answer = guard(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason


# quantize_int8


def eager_int8(x, scale, zero_point):
    return FUSION_RULES["quantize_int8"].reference(x, scale, zero_point)


@runs_kernels
@pytest.mark.parametrize(
    "scale, zero_point", [(0.05, 3.0), (0.05, None), (1 / 3, 0.5), (0.1, -128.0), (1e-3, 0.0)]
)
def test_quantize_gives_eagers_integers(scale, zero_point):
    x = torch.cat([randn(20_000) * 8 * scale, randn(20_000) * 100 * scale])
    ties = (torch.arange(-300, 300, device=DEVICE) + 0.5) * scale
    x = torch.cat([x, ties, ties.nextafter(ties + 1), ties.nextafter(ties - 1)])
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, scale, zero_point)
    assert got.dtype == torch.int8 and torch.equal(got, eager_int8(x, scale, zero_point))


@runs_kernels
def test_quantize_divides_as_torch_does_on_cuda():
    """By the reciprocal of the number as it was written: 1 / fp32(1e-3) would be 999.99994."""
    from fusion_backend.patterns.quantize_int8 import reciprocal

    found = [reciprocal(scale) for scale in (1e-3, 0.0625, 0.0, -0.0, 1e-40)]
    assert found == [1000.0, 16.0, math.inf, -math.inf, math.inf]


def test_quantize_rounds_half_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, -128.5, -129.5], device=DEVICE)
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, 1.0, None)
    assert got.tolist() == [0, 2, 2, 0, -2, -2, 126, 127, -128, -128]


@runs_kernels
def test_quantize_of_what_is_no_number():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0], device=DEVICE)
    for scale in (1.0, 1e-38, 1e30):
        got = FUSION_RULES["quantize_int8"].kernel_fn(x, scale, 2.0)
        assert torch.equal(got, eager_int8(x, scale, 2.0)), scale
    assert FUSION_RULES["quantize_int8"].kernel_fn(x, 1.0, None).tolist() == [
        0,
        127,
        -128,
        127,
        -128,
        0,
    ]


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_of_half_precision_computes_in_fp32(dtype):
    x = randn(3, 1003, dtype=dtype)
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, 0.05, 3.0)
    assert torch.equal(got, eager_int8(x.float(), 0.05, 3.0))


def test_quantize_is_taken_of_large_tensors_in_bf16():
    worthwhile = FUSION_RULES["quantize_int8"].worthwhile_fn
    large = torch.empty(64_000_000, dtype=torch.bfloat16, device="meta")
    assert (
        worthwhile(large, 0.05, None, False) is None and worthwhile(large, 0.05, 3.0, True) is None
    )
    for x in (large.float(), large.half(), large[1:]):
        assert "alone" in worthwhile(x, 0.05, None, False).reason


@runs_kernels
def test_quantize_layouts():
    x = randn(3, 4, 5).permute(2, 0, 1)
    got = FUSION_RULES["quantize_int8"].kernel_fn(x, 0.05, None)
    assert got.stride() == x.stride() and torch.equal(got, eager_int8(x, 0.05, None))
    assert FUSION_RULES["quantize_int8"].kernel_fn(x[:0], 0.05, None).shape == (0, 3, 4)


# layer_norm


@pytest.fixture(params=["few", "many"])
def few_or_many(request, monkeypatch):
    """Backward in one kernel, as of few rows, and in two."""
    if request.param == "many":
        monkeypatch.setattr(norms_backward, "FEW_ROWS", 0)


ROWS = [(1, 1), (5, 1), (1, 7), (3, 100), (7, 2049), (2, 4096), (0, 64)]


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROWS)
def test_layer_norm(shape, dtype):
    x, w, b = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype), randn(shape[1], dtype=dtype)
    check_value("layer_norm", x, w, b, 1e-5)
    if shape[0]:
        check_gradient("layer_norm", x, w, b, 1e-3)


@runs_kernels
def test_layer_norm_of_long_rows():
    x, w, b = randn(2, 17_000), randn(17_000), randn(17_000)  # too long for one program, forward
    check_value("layer_norm", x, w, b, 1e-5)
    check_value("layer_norm", x, None, None, 1e-5)
    x, w, b = randn(6, 9001), randn(9001), randn(9001)  # and backward
    check_gradient("layer_norm", x, w, b, 1e-5)
    check_gradient("layer_norm", x, None, None, 1e-5)
    check_gradient("layer_norm", x, w, b, 1e-5, needs=["bias"])


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("affine", list(itertools.product([True, False], repeat=2)))
def test_layer_norm_without_weight_or_bias(affine):
    x, w, b = randn(4, 6, 130), *(randn(130) if have else None for have in affine)
    check_value("layer_norm", x, w, b, 1e-5)
    check_gradient("layer_norm", x, w, b, 1e-5)


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("needs", [["x"], ["weight"], ["bias"], ["x", "bias"], ["weight", "bias"]])
def test_layer_norm_computes_only_wanted_gradients(needs):
    check_gradient("layer_norm", randn(9, 33), randn(33), randn(33), 1e-5, needs=needs)


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
def test_layer_norm_of_padded_and_strided_rows():
    w, b = randn(100), randn(100)
    padded = randn(7, 128)[:, :100]
    for x in (padded, randn(3, 4, 128)[:, ::2, :100], randn(4, 3, 100).transpose(0, 1), randn(100)):
        check_value("layer_norm", x, w, b, 1e-5)
        check_gradient("layer_norm", x, w, b, 1e-5)
    check_gradient("layer_norm", padded, w, b, 1e-5, dy=randn(1, 1).expand(7, 100))
    check_gradient("layer_norm", padded, w, b, 1e-5, dy=randn(100, 7).t())


@runs_kernels
@pytest.mark.parametrize("n", [1000, 20_000])
def test_layer_norm_far_from_zero(n):
    """Two passes, or Welford's: a mean of 1000 costs no more digits than it must."""
    x = randn(3, n) + 1000
    out = FUSION_RULES["layer_norm"].kernel_fn(x, None, None, 1e-5, False)[0]
    assert distance(out, FUSION_RULES["layer_norm"].reference(x.double(), None, None, 1e-5)) < 1e-4


@runs_kernels
def test_layer_norm_gradients_repeat():
    x, w, b, dy = randn(300, 64), randn(64), randn(64), randn(300, 64)
    _, mean, rstd = FUSION_RULES["layer_norm"].kernel_fn(x, w, b, 1e-5, True)
    needs = dict.fromkeys(("x", "weight", "bias"), True)
    saved = SimpleNamespace(x=x, weight=w, bias=b, eps=1e-5, mean=mean, rstd=rstd, needs=needs)
    first, second = (FUSION_RULES["layer_norm"].backward_fn(saved, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_layer_norm_refusals():
    guard = FUSION_RULES["layer_norm"].guard_fn
    x, w = randn(4, 6), randn(6)
    for args, sentence in [
        ((x.double(), w.double(), None, 1e-5), "float64"),
        ((x.half(), w, None, 1e-5), "x is torch.float16 and weight is torch.float32"),
        (
            (x, None, randn(12)[::2], 1e-5),
            "bias with shape (6,) and strides (2,) is not a plain vector",
        ),
        ((randn(6, 4).t(), w, None, 1e-5), "the elements of a row are 4 apart"),
        ((randn(1, 200_000), None, None, 1e-5), "a row of 200000 is not between 1 and 131072"),
    ]:
        answer = guard(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason


# gated_linear


def linear_pair(k, n, dtype, transposed):
    w1, w2 = (
        randn(n, k, dtype=dtype).t() if transposed else randn(k, n, dtype=dtype) for _ in range(2)
    )
    return w1 * 0.3, w2 * 0.3


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "m, k, n", [(1, 1, 1), (5, 33, 17), (130, 100, 136), (64, 128, 256), (0, 32, 16)]
)
def test_gated_linear(m, k, n, transposed, dtype):
    (w1, w2), x = linear_pair(k, n, dtype, transposed), randn(m, k, dtype=dtype)
    b1, b2 = randn(n, dtype=dtype), randn(n, dtype=dtype)
    check_value("gated_linear", x, w1, b1, w2, b2, "sigmoid")
    if m:
        check_gradient("gated_linear", x, w1, b1, w2, b2, "sigmoid")


@runs_kernels
@pytest.mark.parametrize("biases", list(itertools.product([True, False], repeat=2)))
def test_gated_linear_without_biases(biases):
    (w1, w2), (b1, b2) = (
        linear_pair(33, 17, torch.float32, True),
        (randn(17) if have else None for have in biases),
    )
    check_value("gated_linear", randn(2, 3, 33), w1, b1, w2, b2, "sigmoid")
    check_gradient("gated_linear", randn(2, 3, 33), w1, b1, w2, b2, "sigmoid")
    check_gradient("gated_linear", randn(2, 3, 33), w1, b1, w2, b2, "sigmoid", needs=["w2"])


@runs_kernels
def test_gated_linear_layouts():
    w1, w2 = randn(40, 24), randn(24, 40).t()  # one of each
    for x in (
        randn(7, 64)[:, :40],
        randn(40, 7).t(),
        randn(3, 2, 40).transpose(0, 1),
        randn(1, 40).expand(5, 40),
    ):
        out = FUSION_RULES["gated_linear"].kernel_fn(x, w1, None, w2, None, "sigmoid", False)[0]
        want = FUSION_RULES["gated_linear"].reference(
            *map(exact, (x, w1, None, w2, None, "sigmoid"))
        )
        assert_close(out, want, torch.float32)
        check_gradient("gated_linear", x, w1, None, w2, None, "sigmoid")


@runs_kernels
def test_gated_linear_gradients_lie_in_memory_like_the_weights():
    x, (w1, w2) = randn(5, 8), linear_pair(8, 6, torch.float32, True)
    out, gate = FUSION_RULES["gated_linear"].kernel_fn(x, w1, None, w2, None, "sigmoid", True)
    needs = dict.fromkeys(("x", "w1", "b1", "w2", "b2"), True)
    saved = SimpleNamespace(
        x=x, w1=w1, b1=None, w2=w2, b2=None, gate=gate, act="sigmoid", result=out, needs=needs
    )
    _, d1, _, d2, _ = FUSION_RULES["gated_linear"].backward_fn(saved, randn(5, 6))
    assert d1.stride() == w1.stride() and d2.stride() == w2.stride()


def test_gated_linear_refusals():
    guard, worthwhile = (
        FUSION_RULES["gated_linear"].guard_fn,
        FUSION_RULES["gated_linear"].worthwhile_fn,
    )
    x, w = randn(256, 32, dtype=torch.half), randn(32, 16, dtype=torch.half)
    for args, sentence in [
        ((x, w, None, w[:, :8], None, "sigmoid"), "w1 has shape (32, 16) and w2 (32, 8)"),
        ((x[0], w, None, w, None, "sigmoid"), "x has 1 dimensions"),
        ((x, w, None, w.float(), None, "sigmoid"), "x is torch.float16 and w2 is torch.float32"),
        ((x, w, w[:, 0], w, None, "sigmoid"), "b1 with shape (32,)"),
    ]:
        answer = guard(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason
    assert worthwhile(x, w, None, w, None, "sigmoid", False) is None
    assert "16 rows" in worthwhile(x[:16], w, None, w, None, "sigmoid", False).reason
    assert "not aligned" in worthwhile(x, w[:31], None, w[:31], None, "sigmoid", False).reason
    assert (
        "TF32" in worthwhile(x.float(), w.float(), None, w.float(), None, "sigmoid", False).reason
    )


# All rooms


def symbolic(*tensors: Tensor):
    """Fake tensors whose sizes are symbols, 1-D ones excepted."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    return env, [mode.from_tensor(t, static_shapes=t.dim() == 1) for t in tensors]


def test_guards_and_launchers_leave_symbolic_sizes_alone():
    """The number of rows may be a symbol: no guard is added, and the grid is an
    expression of it.
    """
    env, (x, row) = symbolic(torch.empty(48, 5, 64), torch.empty(64))
    with x.fake_mode:
        flat = x.new_empty((x.shape[0] * x.shape[1], 64))
        weight = x.new_empty((64, 32))
        sites = {
            "add_mul": (x, x, 2.0),
            "add_mul_exp": (x, x, 2.0),
            "quantize_int8": (x, 2.0, None),
            "layer_norm": (flat, row, row, 1e-5),
            "gated_linear": (flat, weight, None, weight, None, "sigmoid"),
            "dropout_add": (flat, flat, 0.1),
            "dropout_add_layer_norm": (flat, flat, row, row, 0.1, 1e-5),
        }
        for name, args in sites.items():
            pattern, grids = FUSION_RULES[name], []
            assert not isinstance(pattern.guard_fn(*args), Reject), pattern.guard_fn(*args)
            if pattern.worthwhile_fn:
                pattern.worthwhile_fn(*args, True)
            with trial(lambda kernel, grid, values, options, grids=grids: grids.append(grid)):
                seed = {k: x.new_empty(1, dtype=torch.int64) for k in pattern.seed_arguments}
                out = pattern.kernel_fn(*args, *seed.values(), *([True] if pattern.saves else []))
                out = out if isinstance(out, tuple) else (out,)
                outs = out[: pattern.outputs]
                if pattern.backward_fn:
                    inputs = dict(zip((p.name for p in pattern.params), args, strict=True))
                    kept = dict(zip(pattern.saves, out[pattern.outputs :], strict=True))
                    result, needs = (
                        outs if pattern.outputs > 1 else outs[0],
                        dict.fromkeys(inputs, True),
                    )
                    saved = SimpleNamespace(**inputs, **seed, **kept, result=result, needs=needs)
                    pattern.backward_fn(saved, *map(torch.empty_like, outs))
            assert isinstance(grids[0][0], torch.SymInt), name
    assert not env.guards, [str(g.expr) for g in env.guards]


def test_guards_refuse_symbolic_rows_and_scalars():
    env, (x,) = symbolic(torch.empty(48, 64))
    assert (
        "the row length is dynamic"
        in FUSION_RULES["layer_norm"].guard_fn(x, None, None, 1e-5).reason
    )
    assert "dynamic" in FUSION_RULES["gated_linear"].guard_fn(x, x, None, x, None, "sigmoid").reason
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource("s")
    s = env.create_symbol(0.5, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    s = env.create_symfloatnode(s, hint=0.5, source=source)
    assert "s is dynamic" in FUSION_RULES["add_mul_exp"].guard_fn(x, x, s).reason
    assert not env.guards


def test_as_rows_copies_only_what_it_must():
    x = torch.randn(4, 6, 8)
    assert as_rows(x)[0] is x and as_rows(x)[1:] == (24, 8)
    assert as_rows(x[..., :5])[1:] == (24, 8)  # padded rows
    assert as_rows(x[:, ::2])[1:] == (12, 16)
    assert as_rows(x[:, :3])[0].is_contiguous()  # uneven distances
    assert as_rows(x.mT)[0].is_contiguous()
    assert as_rows(x[0, 0])[1:] == (1, 8)


def compile_kernels(*options: str) -> None:
    command = [sys.executable, "-m", "benchmarks.compile_kernels", *options]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kernel_compiles_without_a_gpu(tmp_path):
    """For sm_90, without spilling; what other versions of Triton made of them stays in the file."""
    other = dict(kernel="add_mul_kernel", triton="3.0.0", registers=7)
    Run("compile_kernels", dict(torch="2.5.0", triton="3.0.0"), [other]).save(
        tmp_path / "compiled.json"
    )
    compile_kernels("--each-kernel", "--out", str(tmp_path / "compiled.json"))
    run = Run.load(tmp_path / "compiled.json")
    assert run.rows[0] == other and run.about["triton"] == f"3.0.0, {triton.__version__}"
    assert {"flash_kernel", "norm_backward_shared_kernel"} < {row["kernel"] for row in run.rows[1:]}


@pytest.mark.full
def test_torch_sees_what_every_kernel_writes():
    compile_kernels("--mutations")
