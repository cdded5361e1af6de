"""The pattern gated_linear for many rows and any layout, against fp64. Few rows, and other
activations than sigmoid: tests/test_linear_kernels.py.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import fusion_backend
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from tests.kernel_checks import (
    FLOATS,
    assert_close,
    check_gradient,
    check_value,
    exact,
    randn,
    runs_kernels,
)

pytestmark = pytest.mark.usefixtures("poisoned_empties", "tf32")


@pytest.fixture
def tf32():
    """fp32 may be multiplied as TF32, which the interpreter does not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def linear_pair(k, n, dtype, transposed):
    w1, w2 = (
        randn(n, k, dtype=dtype).t() if transposed else randn(k, n, dtype=dtype) for _ in range(2)
    )
    return w1 * 0.3, w2 * 0.3


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, k, n", [(65, 8, 8), (70, 40, 24), (130, 104, 136), (66, 128, 256)])
def test_gated_linear(m, k, n, transposed, dtype):
    (w1, w2), x = linear_pair(k, n, dtype, transposed), randn(m, k, dtype=dtype)
    b1, b2 = randn(n, dtype=dtype), randn(n, dtype=dtype)
    check_value("gated_linear", x, w1, b1, w2, b2, "sigmoid")
    check_gradient("gated_linear", x, w1, b1, w2, b2, "sigmoid")


@runs_kernels
@pytest.mark.parametrize("biases", list(itertools.product([True, False], repeat=2)))
def test_gated_linear_without_biases(biases):
    (w1, w2), (b1, b2) = (
        linear_pair(32, 20, torch.float32, True),
        (randn(20) if have else None for have in biases),
    )
    check_value("gated_linear", randn(2, 35, 32), w1, b1, w2, b2, "sigmoid")
    check_gradient("gated_linear", randn(2, 35, 32), w1, b1, w2, b2, "sigmoid")
    check_gradient("gated_linear", randn(2, 35, 32), w1, b1, w2, b2, "sigmoid", needs=["w2"])


@runs_kernels
def test_gated_linear_layouts():
    w1, w2 = randn(40, 24), randn(24, 40).t()  # one of each
    for x in (
        randn(70, 64)[:, :40],
        randn(40, 70).t(),
        randn(33, 2, 40).transpose(0, 1),
        randn(1, 40).expand(65, 40),
    ):
        out = FUSION_RULES["gated_linear"].kernel_fn(x, w1, None, w2, None, "sigmoid", False)[0]
        want = FUSION_RULES["gated_linear"].reference(
            *map(exact, (x, w1, None, w2, None, "sigmoid"))
        )
        assert_close(out, want, torch.float32)
        check_gradient("gated_linear", x, w1, None, w2, None, "sigmoid")


@runs_kernels
def test_gated_linear_gradients_lie_in_memory_like_the_weights():
    x, (w1, w2) = randn(65, 8), linear_pair(8, 12, torch.float32, True)
    out, gate, up = FUSION_RULES["gated_linear"].kernel_fn(x, w1, None, w2, None, "sigmoid", True)
    needs = dict.fromkeys(("x", "w1", "b1", "w2", "b2"), True)
    saved = SimpleNamespace(
        x=x, w1=w1, b1=None, w2=w2, b2=None, gate=gate, up=up, act="sigmoid", result=out,
        needs=needs,
    )  # fmt: skip
    _, d1, _, d2, _ = FUSION_RULES["gated_linear"].backward_fn(saved, randn(65, 12))
    assert d1.stride() == w1.stride() and d2.stride() == w2.stride()


@pytest.mark.parametrize("act", [F.silu, torch.sigmoid])
def test_gradients_of_a_gate_are_written_in_its_dtype_alone(act):
    """In fp32 they would be twice as large, for the sums of the biases."""
    shapes = (48, 64), (96, 64), (96,), (96, 64), (96,)
    tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    def gate(x, w, b, w2, b2):
        return act(F.linear(x, w, b)) * F.linear(x, w2, b2)

    options = {"fusion.gate": "always", "fusion.only": "gated_linear"}
    compiled = torch.compile(gate, backend="fusion", options=options)
    _, (_, backward) = run_and_get_code(lambda: compiled(*tensors).sum().backward())
    assert [site.pattern for site in fusion_backend.report().fused] == ["gated_linear"]
    assert "empty_strided_cpu((48, 96), (96, 1), torch.bfloat16)" in backward
    assert "empty_strided_cpu((48, 96), (96, 1), torch.float32)" not in backward


def test_gated_linear_refusals():
    pattern = FUSION_RULES["gated_linear"]
    x, w = randn(2048, 32, dtype=torch.half), randn(32, 16, dtype=torch.half)
    narrow = randn(32, 12, dtype=torch.half)
    for args, sentence in [
        ((x, w, None, w[:, :8], None, "sigmoid"), "the weights have shapes (32, 16) and (32, 8)"),
        ((x[0], w, None, w, None, "silu"), "x has 1 dimensions"),
        ((x, w, None, w.float(), None, "sigmoid"), "x is torch.float16 and w2 is torch.float32"),
        ((x, w, w[:, 0], w, None, "sigmoid"), "b1 with shape (32,)"),
        ((x, narrow, None, narrow, None, "sigmoid"), "12 elements apart, are not aligned"),
    ]:
        answer = pattern.guard_fn(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason
    torch.set_float32_matmul_precision("highest")
    refused = pattern.guard_fn(x.float(), w.float(), None, w.float(), None, "sigmoid")
    assert "TF32" in refused.reason
    large = randn(2048, 16, dtype=torch.half)
    for args, sentence in [
        ((x, w, None, w, None, "sigmoid", False), None),
        ((x, w, None, w, None, "silu", False), None),
        ((x[:16], w, None, w, None, "sigmoid", False), "not been timed"),
        ((x, w, None, w, None, "gelu", False), "not been timed"),
        ((x, w, None, w, None, "silu", True), "training step is as fast"),
        ((x, large, None, large, None, "silu", False), "the library's product wins"),
    ]:
        answer = pattern.worthwhile_fn(*args)
        assert answer is None if sentence is None else sentence in answer.reason
