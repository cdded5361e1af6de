"""token_log_probs: its kernels against fp64 and eager."""

import math
from types import SimpleNamespace

import pytest
import torch

from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.loss import token_log_probs as kernels
from fusion_backend.ops.registry import FUSION_RULES
from tests.kernel_checks import FLOATS, check, distance, randn, runs_kernels
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties")
NAME = "token_log_probs"
PATTERN = FUSION_RULES[NAME]
TAKES, TOTALS = ("gather", "take_along_dim", "index"), ("log_softmax", "logsumexp", "negated")
SHAPES = [(1, 1), (5, 1), (7, 100), (3, 2049), (2, 9001), (2, 3, 5, 33), (100,)]
B, S, V = 3, 6, 40


def tokens(*shape, v=V):
    return torch.randint(0, v, shape, device=randn(1).device)


def of(x, take="gather", total="log_softmax", upcast="none", column="dropped", scale=None):
    """The arguments of the pattern for logits."""
    return x, tokens(*x.shape[:-1], 1, v=x.shape[-1]), scale, take, total, upcast, column


def gradient(args, dout, sums):
    """What the backward kernel gives."""
    names = ("x", "index", "scale", "take", "total", "upcast", "column")
    saved = SimpleNamespace(**dict(zip(names, args, strict=True)), sums=sums)
    return PATTERN.backward_fn(saved, dout)[0]


def eager(args, dout=None):
    """The result of the reference and the gradient of x."""
    x = args[0].detach().requires_grad_()
    out = PATTERN.reference(x, *args[1:])
    return out.detach(), torch.autograd.grad(out, x, torch.ones_like(out) if dout is None else dout)


@runs_kernels
@product(shape=SHAPES, dtype=FLOATS, total=TOTALS, take=TAKES, column=["dropped", "kept"])
def test_shapes_and_dtypes(shape, dtype, total, take, column):
    for upcast in ("none", "fp32"):
        _, sums = check(NAME, *of(randn(*shape, dtype=dtype), take, total, upcast, column))
        assert sums.dtype == torch.float32 and sums.shape == (2, math.prod(shape[:-1]))


@runs_kernels
@pytest.mark.parametrize("how", [(32, 2, 1), (32, 4, 1), (64, 1, 1)])
def test_rows_that_are_walked_through(how):
    """Whole steps alone, whole steps and a rest, and values that grow or fall along the row."""
    for x in randn(3, 128), randn(3, 300), randn(3, 300).sort(-1)[0], -randn(3, 300).sort(-1)[0]:
        args = of(20 * x)
        out, sums = kernels.forward(*args[:2], torch.float32, False, math.nan, how=how)
        want, (dx,) = eager([args[0].double(), *args[1:]])
        assert distance(out, want) < 2e-6
        got = kernels.backward(torch.ones_like(out), *args[:2], sums, False, how=(64, 1, 2))
        assert distance(got, dx) < 1e-5


@runs_kernels
@product(dtype=FLOATS, total=TOTALS)
def test_as_near_to_fp64_as_eager(dtype, total):
    args = of(4 * randn(8, 33, 500, dtype=dtype), total=total, upcast="fp32")
    dout = randn(8, 33)
    want, (dx,) = eager([args[0].double(), *args[1:5], "none", "dropped"], dout.double())
    plain, (plain_dx,) = eager(args, dout)
    out, sums = PATTERN.launched(args, save=True)
    assert distance(out, want) <= 1.2 * distance(plain, want)
    if dtype != torch.bfloat16:  # to which the interpreter rounds by cutting off
        assert distance(gradient(args, dout, sums), dx) <= 1.2 * distance(plain_dx, dx)


@runs_kernels
@product(dtype=FLOATS, total=TOTALS, scale=[0.0, 1 / 0.7, -3.0])
def test_temperatures(dtype, total, scale):
    for upcast in ("none", "fp32"):
        check(NAME, *of(randn(3, 5, 300, dtype=dtype), total=total, upcast=upcast, scale=scale))


@runs_kernels
@pytest.mark.parametrize("total", TOTALS)
def test_infinite_logits_at_a_temperature(total):
    x = randn(6, 40)
    x[0, 3], x[1, :5], x[2, 7] = math.inf, -math.inf, math.nan
    for scale in (0.5, -2.0):
        args = of(x, total=total, scale=scale)
        want, (dx,) = eager(args)
        out, sums = PATTERN.launched(args, save=True)
        torch.testing.assert_close(out, want, equal_nan=True)
        got = gradient(args, torch.ones_like(out), sums)
        torch.testing.assert_close(got, dx, equal_nan=True)


LAYOUTS = {
    "all but the last": lambda x: x[:, :-1],
    "all but the first": lambda x: x[:, 1:],
    "every other sample": lambda x: x[::2],
    "every other row": lambda x: x[:, ::2],
    "transposed": lambda x: x.transpose(0, 1),
    "padded": lambda x: x[..., :31],
    "padded slice": lambda x: x[:, 2:5, 3:34],
    "expanded rows": lambda x: x[:, :1].expand(-1, 5, -1),
    "expanded samples": lambda x: x[:1].expand(4, -1, -1),
    "overlapping rows": lambda x: x[0, 0].unfold(0, 31, 1),
    "overlapping rows of samples": lambda x: x[:, 0].unfold(1, 31, 1),
    "one row": lambda x: x[0, 0],
    "four dimensions": lambda x: x.view(B, 2, 3, V)[:, :, :2],
}


@runs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_read_where_they_lie(layout):
    x, found = LAYOUTS[layout](randn(B, S, V)), []
    args = of(x)
    if layout == "four dimensions":
        args = of(x.transpose(1, 2)[:, 0])
    check(NAME, *args)
    _, sums = PATTERN.launched(args, save=True)
    dout = randn(*args[0].shape[:-1])
    assert distance(gradient(args, dout, sums), eager(args, dout)[1][0]) < 2e-6
    with trial(lambda kernel, grid, args, options: found.append(args)):
        _, sums = PATTERN.launched(args, save=True)
        gradient(args, sums[0].view(args[1].shape[:-1]), sums)
    assert [a.data_ptr() for a in (found[0][0], found[1][1])] == [args[0].data_ptr()] * 2


@runs_kernels
def test_rows_that_lie_anyhow_are_copied():
    x = randn(3, 4, 5, 7, 33)[:, :3, :4, :6]
    check(NAME, *of(x))
    check(NAME, *of(x.permute(2, 0, 1, 3, 4)))


@runs_kernels
def test_tokens_and_gradients_in_other_layouts():
    x, ids = randn(B, S, V), tokens(B, S + 1)
    for index in (
        ids[:, 1:, None],
        tokens(S, B).t()[..., None],
        tokens(1, 1).expand(B, S)[..., None],
    ):
        check(NAME, x, index, *of(x)[2:])
    for dout in randn(S, B).t(), randn(1).expand(B, S):
        args = x, ids[:, 1:, None], *of(x)[2:]
        _, sums = PATTERN.launched(args, save=True)
        assert distance(gradient(args, dout, sums), eager(args, dout)[1][0]) < 2e-6


@runs_kernels
def test_the_gradient_lies_in_memory_as_the_logits():
    for x in randn(B, S, V), randn(S, B, V).transpose(0, 1):
        args = of(x)
        dx = gradient(args, randn(B, S), PATTERN.launched(args, save=True)[1])
        assert dx.stride() == x.stride()


@runs_kernels
@pytest.mark.parametrize("rows", [(0,), (0, 3), (3, 0)])
def test_no_rows(rows):
    args = of(randn(*rows, V))
    out, sums = PATTERN.launched(args, save=True)
    assert out.shape == rows and sums.shape == (2, 0)
    assert gradient(args, out, sums).shape == (*rows, V)


def unusual():
    """Rows with infinities and NaN, and the token of each that shows most."""
    inf, nan = math.inf, math.nan
    rows = [
        ([inf], 0), ([inf], 1), ([inf, nan], 3), ([-inf], 0), ([-inf], 1), ([nan], 3),
        ([-inf] * 8, 2), ([inf, -inf], 1), ([inf, inf], 1), ([nan] * 8, 0), ([-inf] * 7, 7),
    ]  # fmt: skip
    x = randn(len(rows), 8)
    for row, (values, _) in zip(x, rows, strict=True):
        row[: len(values)] = torch.tensor(values)
    return x, torch.tensor([[token] for _, token in rows], device=x.device)


@runs_kernels
@product(total=TOTALS, take=TAKES, how=[(8, 1, 1), (2, 2, 1), (2, 1, 1)])
def test_nan_and_infinity_as_eager_has_them(total, take, how):
    x, index = unusual()
    args = x, index, None, take, total, "none", "dropped"
    infinite = math.nan if total == "log_softmax" else math.inf
    out, sums = kernels.forward(x, index, x.dtype, take != "gather", infinite, how=how)
    out = -out if total == "negated" else out
    plain = PATTERN.saved_fn(*args)
    torch.testing.assert_close(sums.sum(0), plain.sum(0), equal_nan=True)
    for dout in torch.ones(len(x)), torch.zeros(len(x)), torch.full((len(x),), math.inf):
        want, (dx,) = eager(args, dout)
        torch.testing.assert_close(out, want, equal_nan=True)
        for kept in sums, plain:
            torch.testing.assert_close(gradient(args, dout, kept), dx, equal_nan=True)


@runs_kernels
def test_the_logits_of_a_token_without_a_gradient_are_not_read():
    args = of(randn(4, V))
    _, sums = PATTERN.launched(args, save=True)
    args[0][1] = math.nan  # what a masked token's row holds
    dx = gradient(args, torch.tensor([1.0, 0.0, 2.0, -0.0]), sums)
    assert dx[1].eq(0).all() and dx[3].eq(0).all() and dx[0].ne(0).all()


@runs_kernels
@pytest.mark.parametrize("token", [-1, -V, -V - 1, V, V + 3, -100])
def test_tokens_out_of_bounds(token):
    """gather has an assertion, as in eager, and so has an index, but for one that counts from the
    end; take_along_dim counts modulo the classes.
    """
    x, index, *rest = of(randn(4, V))
    index[2] = token
    with pytest.raises(RuntimeError, match="out of bounds"):
        PATTERN.reference(x, index, *rest)
    with pytest.raises(RuntimeError, match="an index is out of bounds"):
        PATTERN.launched((x, index, *rest), save=False)
    for total in TOTALS:
        check(NAME, x, index, None, "take_along_dim", total, "none", "kept")
    if -V <= token < V:
        check(NAME, x, index, None, "index", *rest[2:])
    else:
        with pytest.raises(RuntimeError, match="an index is out of bounds"):
            PATTERN.launched((x, index, None, "index", *rest[2:]), save=False)
