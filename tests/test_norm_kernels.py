"""Kernels of layer_norm, rms_norm and l2_norm, with a residual and with dropout, against fp64."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import backward as norms_backward
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.norm import forward_split as norms_split
from fusion_backend.kernels.norm import l2_norm
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from tests.kernel_checks import (
    FLOATS,
    PART,
    SHAPES,
    check,
    check_gradient,
    check_value,
    distance,
    randn,
    runs_kernels,
)
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties")


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
    out = FUSION_RULES["layer_norm"].kernel_fn(x, None, None, 1e-5, False, None)[0]
    assert distance(out, FUSION_RULES["layer_norm"].reference(x.double(), None, None, 1e-5)) < 1e-4


@runs_kernels
def test_layer_norm_gradients_repeat():
    x, w, b, dy = randn(300, 64), randn(64), randn(64), randn(300, 64)
    _, mean, rstd = FUSION_RULES["layer_norm"].kernel_fn(x, w, b, 1e-5, True, None)
    needs = dict.fromkeys(("x", "weight", "bias"), True)
    saved = SimpleNamespace(x=x, weight=w, bias=b, eps=1e-5, mean=mean, rstd=rstd, needs=needs)
    first, second = (FUSION_RULES["layer_norm"].backward_fn(saved, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_layer_norm_refusals():
    guard = FUSION_RULES["layer_norm"].guard_fn
    x, w = randn(4, 6), randn(6)
    for args, sentence in [
        ((x.double(), w.double(), None, 1e-5), "float64"),
        ((x, w.half(), None, 1e-5), "x is torch.float32 and weight is torch.float16"),
        ((x.half(), w, w.half(), 1e-5), "weight is torch.float32 and bias is torch.float16"),
        (
            (x, None, randn(12)[::2], 1e-5),
            "bias with shape (6,) and strides (2,) is not a plain vector",
        ),
        ((randn(6, 4).t(), w, None, 1e-5), "the elements of a row are 4 apart"),
        ((randn(1, 200_000), None, None, 1e-5), "a row of 200000 is not between 1 and 131072"),
    ]:
        answer = guard(*args)
        assert isinstance(answer, Reject) and sentence in answer.reason


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("eps", [None, 1e-12])
@pytest.mark.parametrize("shape", [(5, 2), *SHAPES[2:]])
def test_l2_norm(shape, eps, dtype):
    check("l2_norm", randn(*shape, dtype=dtype), eps)


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
def test_l2_norm_of_layouts_and_long_rows(walks, monkeypatch):
    if walks:
        monkeypatch.setattr(l2_norm, "row_config", lambda n, itemsize: (16, 1, 4))
    for x in (
        randn(7, 128)[:, :100],
        randn(4, 3, 100).transpose(0, 1),
        randn(1, 33).expand(5, 33),
        randn(1, 130),
    ):
        check("l2_norm", x, 1e-12)
    assert FUSION_RULES["l2_norm"].kernel_fn(randn(0, 5), None).shape == (0, 5)


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
def test_l2_norm_that_eps_holds_up(walks, monkeypatch):
    """Rows shorter than eps are divided by it, and their gradient too; zeros, NaN and infinity as
    in torch.
    """
    if walks:
        monkeypatch.setattr(l2_norm, "row_config", lambda n, itemsize: (16, 1, 4))
    x = randn(6, 40)
    x[0] *= 1e-3
    check("l2_norm", x, 0.5)
    check("l2_norm", torch.full_like(x, 1e-14), 1e-12)
    x[1], x[2, 3], x[3, 4] = 0.0, math.nan, math.inf
    for eps in (None, 1e-12):
        got, want = (
            FUSION_RULES["l2_norm"].kernel_fn(x, eps),
            FUSION_RULES["l2_norm"].reference(x, eps),
        )
        torch.testing.assert_close(got, want, equal_nan=True)
    leaf, dy = x[:2].clone().requires_grad_(), randn(2, 40)
    (want,) = torch.autograd.grad(FUSION_RULES["l2_norm"].reference(leaf, 1e-12), leaf, dy)
    torch.testing.assert_close(l2_norm.backward(dy, x[:2], 1e-12), want)


NORMS = {
    "rms_norm": lambda x, r, w, b: (x, w, None, 1e-5),
    "add_rms_norm": lambda x, r, w, b: (x, r, w, 1.0, 1e-5),
    "add_layer_norm": lambda x, r, w, b: (x, r, w, b, 1e-5),
}


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@product(name=NORMS, shape=[(7, 100), (3, 2049), (2, 3, 33), (100,)], dtype=FLOATS)
def test_norms(name, shape, dtype):
    x, r = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    check(name, *NORMS[name](x, r, randn(shape[-1], dtype=dtype), randn(shape[-1], dtype=dtype)))


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout(shape, dtype):
    x, r, w, b = (randn(*s, dtype=dtype) for s in (shape, shape, shape[-1:], shape[-1:]))
    for p in (0.1, 0.75, 1.0):
        check("dropout_add", x, r, p)
        if shape[-1] > 1:  # of one number the norm is 0, its gradient rounding alone
            check("dropout_add_layer_norm", x, r, w, b, p, 0.05)


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("needs", ["x", "residual", "weight", "bias"])
def test_dropout_computes_only_wanted_gradients(needs):
    x, r, w, b = randn(7, 100), randn(7, 100), randn(100), randn(100)
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5, needs=[needs])
    if needs in ("x", "residual"):
        check("dropout_add", x, r, 0.3, needs=[needs])


@runs_kernels
def test_dropout_of_long_and_padded_rows(monkeypatch):
    x, r, w, b = randn(5, 1011)[:, :1001], randn(5, 1001), randn(1001), randn(1001)
    check("dropout_add", x, r, 0.3)
    check("dropout_add", r, x, 0.3)
    check("dropout_add", r[:1].expand(5, 1001), r, 0.3)
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5)
    # walks through rows
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(1024, 1, 4, 1, 3, True))
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5)
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(*PART))
    monkeypatch.setattr(norms_backward, "MAX_HELD_BACKWARD", 128)
    check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5)


@runs_kernels
@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("needs", [["x"], ["weight"], ["residual"]])
def test_add_rms_norm_computes_only_wanted_gradients(needs):
    x, r, w = randn(7, 100), randn(7, 100), randn(100)
    pattern = FUSION_RULES["add_rms_norm"]
    # the op asks for x in its place
    wanted = {"x": needs[0] in ("x", "residual"), "weight": "weight" in needs}
    y, h, rstd = pattern.launched((x, r, w, None, 1e-5), save=True)
    saved = SimpleNamespace(
        x=x, residual=r, weight=w, offset=None, eps=1e-5, rstd=rstd, result=(y, h), needs=wanted
    )
    d, none, dw = pattern.backward_fn(saved, randn(7, 100), randn(7, 100))
    assert none is None and (d is not None) == wanted["x"] and (dw is not None) == wanted["weight"]


@runs_kernels
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_long_rows(name, monkeypatch):
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(*PART))
    monkeypatch.setattr(norms_backward, "MAX_HELD_BACKWARD", 128)
    x, r, w, b = randn(5, 1001), randn(5, 1001), randn(1001), randn(1001)
    check(name, *NORMS[name](x, r, w, b))


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*NORMS, "layer_norm", "dropout_add_layer_norm"])
@pytest.mark.parametrize("n", [300, 384])
def test_norms_of_rows_that_are_split(n, name, dtype, monkeypatch):
    """Few long rows: pieces of 128, the last of which may be shorter, padded rows, and far from
    zero.
    """
    monkeypatch.setattr(norms_split, "few_long_rows", lambda rows, n, device: True)
    monkeypatch.setattr(norms_split, "PIECE", 128)
    x, r, w, b = (
        randn(5, n + 8, dtype=dtype)[:, :n],
        randn(5, n, dtype=dtype),
        *randn(2, n, dtype=dtype),
    )
    others = {"layer_norm": (x, w, b, 1e-5), "dropout_add_layer_norm": (x, r, w, b, 0.3, 1e-5)}
    check(name, *(others[name] if name in others else NORMS[name](x, r, w, b)))
    if name == "layer_norm":
        check(name, x, None, None, 1e-5)
        far = randn(3, n) + 1000
        got = FUSION_RULES[name].kernel_fn(far, None, None, 1e-5, False, None)[0]
        assert distance(got, F.layer_norm(far.double(), (n,))) < 1e-4
        far[0, 1], far[1, 2] = math.nan, math.inf
        got = FUSION_RULES[name].kernel_fn(far, None, None, 1e-5, False, None)[0]
        torch.testing.assert_close(
            got, F.layer_norm(far, (n,)), equal_nan=True, rtol=1e-3, atol=1e-3
        )


def test_only_few_long_rows_are_split():
    few = norms_split.few_long_rows
    device = torch.device("cpu")  # of four multiprocessors
    assert few(3, 131072, device) and not few(4, 131072, device) and not few(3, 32768, device)


@runs_kernels
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_programs_that_walk_through_rows(name, early, monkeypatch):
    monkeypatch.setattr(norms, "forward_config", lambda *how: Config(128, 2, 4, 1, 2, early))
    x, r, w, b = randn(21, 100), randn(21, 100), randn(100), randn(100)  # 11 pairs for 4 programs
    check(name, *NORMS[name](x, r, w, b))


@runs_kernels
@pytest.mark.parametrize("name", [*NORMS, "dropout_add_layer_norm"])
def test_few_rows_have_the_gradients_of_many(name):
    """Rows and columns that do not fill their blocks: the gradients of one kernel are
    those of two.
    """
    x, r, w, b, dy = randn(70, 130), randn(70, 130), randn(130), randn(130), randn(70, 130)
    args = (x, r, w, b, 0.3, 1e-5) if name.startswith("dropout") else NORMS[name](x, r, w, b)
    check(name, *args)
    norm = norms.Norm(w, b, None, 1e-5, True)
    _, h, mean, rstd = norms.forward(x, r, norm, True)
    for needs in itertools.product([False, True], repeat=3):
        one, two = (norms_backward.backward(dy, r, h, mean, rstd, norm, needs, config=how)
                    for how in (None, Config(256, 2, 4, 1, 2)))  # fmt: skip
        for got, want, need in zip(one, two, needs, strict=True):
            assert (got is None) == (want is None) == (not need)
            if need:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@runs_kernels
def test_rms_norm_without_a_weight():
    check("rms_norm", randn(7, 100), None, None, 1e-5)


@runs_kernels
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
def test_a_result_that_nobody_uses_has_no_gradient(name, used, monkeypatch):
    """Zeros would be written and read, as much memory as the gradient that there is."""
    pattern, seen = FUSION_RULES[name], []
    own = pattern.backward_fn
    monkeypatch.setattr(
        pattern, "backward_fn", lambda saved, *grads: (seen.append(grads), own(saved, *grads))[1]
    )
    x, residual, w = (randn(*shape).requires_grad_() for shape in ((3, 40), (3, 40), (40,)))
    args = (x, residual, w, None, 1e-5) if name == "add_layer_norm" else (x, residual, w, 0.0, 1e-5)
    weights = [randn(3, 40) for _ in used]
    op = operator_of(pattern)
    mine = op.overload(*op.flatten(dict(zip((p.name for p in pattern.params), args, strict=True))))
    found, want = (
        torch.autograd.grad(
            [results[i] for i in used], (x, residual, w), weights, materialize_grads=True
        )
        for results in (mine, pattern.reference(*args))
    )
    torch.testing.assert_close(found, want)
    ((dy, dh),) = seen
    assert (dh is None) == (1 not in used) and dy is not None and (0 in used or not dy.any())
