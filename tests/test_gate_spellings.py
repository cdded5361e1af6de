"""Gates whose halves, and whose products, are written in other words than those of the patterns;
and what comes close and is left alone.
"""

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.testing import assert_fuses
from tests.kernel_checks import randn, runs_kernels
from tests.spelled import check_spelling

pytestmark = pytest.mark.usefixtures("poisoned_empties")
N = 24

# The two halves of the last dimension
HALVES = {
    "chunk": lambda y: y.chunk(2, -1),
    "split": lambda y: y.split(N, dim=-1),
    "split by sizes": lambda y: torch.split(y, [N, N], -1),
    "tensor_split": lambda y: y.tensor_split(2, dim=-1),
    "tensor_split at an index": lambda y: torch.tensor_split(y, (N,), -1),
    "slices": lambda y: (y[..., :N], y[..., N:]),
    "narrow": lambda y: (y.narrow(-1, 0, N), y.narrow(-1, -N, N)),
    "view and unbind": lambda y: y.view(*y.shape[:-1], 2, N).unbind(-2),
    "unflatten and unbind": lambda y: y.unflatten(-1, (2, -1)).unbind(y.dim() - 1),
    "view and select": lambda y: (lambda v: (v[..., 0, :], v[..., -1, :]))(
        y.reshape(*y.shape[:-1], 2, -1)
    ),
}
# x [b, t, k] times w [k, n]
PRODUCTS = {
    "matmul": lambda x, w: x @ w,
    "ellipsis": lambda x, w: torch.einsum("...k,kn->...n", x, w),
    "letters": lambda x, w: torch.einsum("b t k, k n -> b t n", x, w),
    "the weight first": lambda x, w: torch.einsum("kn,btk->btn", w, x),
    "the weight transposed": lambda x, w: torch.einsum("btk,nk->btn", x, w.t()),
    "transposed, and first": lambda x, w: torch.einsum("nk,...k->...n", w.t(), x),
}


def gate(halves, product=torch.matmul):
    def fn(x, w):
        first, second = halves(product(x, w))
        return F.silu(first) * second

    return fn


def operands(dtype=torch.bfloat16, needs=True, b=2, t=5):
    x, w = randn(b, t, 48, dtype=dtype), randn(48, 2 * N, dtype=dtype) / 7
    return x.requires_grad_(needs), w.requires_grad_(needs)


@runs_kernels
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("product", ["matmul", "ellipsis"])
def test_gated_linear(product, halves, needs):
    fn = gate(HALVES[halves], PRODUCTS[product])
    check_spelling("gated_linear", fn, *operands(needs=needs), factor=2)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product, dtype):
    fn = gate(HALVES["view and unbind"], PRODUCTS[product])
    check_spelling("gated_linear", fn, *operands(dtype), factor=2)


@pytest.mark.parametrize("halves", HALVES)
def test_gated_act(halves):
    def fn(x):
        first, second = HALVES[halves](x.sin())
        return first * F.silu(second)

    assert_fuses(fn, torch.randn(3, 5, 2 * N, requires_grad=True), pattern="gated_act")


@pytest.mark.parametrize("halves", ["tensor_split", "unflatten and unbind", "view and select"])
def test_other_batches_need_no_other_graph(halves, eager_kernels):
    fn = gate(HALVES[halves], PRODUCTS["ellipsis"])
    compiled = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    for b, t in (2, 5), (3, 7), (5, 4):
        x, w = operands(needs=False, b=b, t=t)
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(x, dim)
        if b == 2:
            assert_fuses(fn, x, w, pattern="gated_linear")
            torch.compiler.reset()
        with torch._dynamo.config.patch(error_on_recompile=b != 2):
            torch.testing.assert_close(compiled(x, w), fn(x, w), rtol=2e-2, atol=2e-2)


OTHERS = {
    "neighbours": gate(lambda y: y.view(*y.shape[:-1], N, 2).unbind(-1)),
    "one half twice": gate(lambda y: y.unflatten(-1, (2, -1)).unbind(-2)[:1] * 2),
    "halves of all rows together": gate(lambda y: y.view(4, 2, 5 * N).unbind(-2)),
    "parts that overlap": gate(lambda y: y.tensor_split((N + 8, N - 8), -1)[::2]),
    "a part that begins before the last ends": gate(
        lambda y: y.tensor_split((N, N // 2, 3 * N // 2), -1)[:3:2]
    ),
    "rows": gate(lambda y: y.tensor_split(2, 0)),
    "halves of rows": gate(lambda y: y.view(2, -1, *y.shape[1:]).unbind(0)),
    "the product read too": lambda x, w: (
        lambda y: gate(HALVES["view and unbind"], lambda x, w: y)(x, w) + y.sum()
    )(x @ w),
    "an outer product": gate(
        HALVES["chunk"],
        lambda x, w: torch.einsum("btk,kn->btn", x.exp(), w.sum(0, True).expand_as(w)) * w.sum(),
    ),
    "no sum": gate(HALVES["chunk"], lambda x, w: torch.einsum("btk,kn->btkn", x, w)),
    "two sums": gate(HALVES["chunk"], lambda x, w: torch.einsum("btk,kn->bn", x, w)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_values_are_left_alone(what):
    assert_fuses(OTHERS[what], *operands(b=4), pattern="gated_linear", count=0)
