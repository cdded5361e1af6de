"""Kernels of softmax and of cross entropy, against fp64."""

import itertools
import math
from types import SimpleNamespace

import fusion_backend.patterns.cross_entropy as cross_entropies
import pytest
import torch
import torch.nn.functional as F

from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.softmax import backward as softmax_backward
from fusion_backend.kernels.softmax import forward as softmax
from fusion_backend.ops.registry import FUSION_RULES
from tests.kernel_checks import (
    FLOATS,
    SHAPES,
    check,
    randn,
    runs_kernels,
)

pytestmark = pytest.mark.usefixtures("poisoned_empties")


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape, dtype):
    check("softmax", randn(*shape, dtype=dtype), None, None, None, None)
    check("softmax", randn(*shape, dtype=dtype), 0.125, randn(shape[-1], dtype=dtype), None, None)


MASKS = [
    (2, 3, 2, 17),
    (2, 1, 2, 17),
    (3, 1, 17),
    (2, 17),
    (17,),
    (2, 1, 1, 17),
    (2, 1),
    (1, 1, 1, 1),
]


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_softmax_of_masks_that_broadcast(mask, walks, monkeypatch):
    if walks:
        for module in (softmax, softmax_backward):
            monkeypatch.setattr(module, "row_config", lambda n, itemsize: (8, 1, 4))
    x = randn(2, 3, 2, 17)
    # a number added to a whole row changes nothing: its gradient is rounding alone
    constant = mask[-1] == 1
    check("softmax", x, 0.5, randn(*mask), None, None, needs=["x"] if constant else None)
    check("softmax", x, 0.5, randn(*mask), None, None, needs=[] if constant else ["mask"])
    check("softmax", x, None, None, randn(*mask) > 0.3, -1e9)
    # what is dropped has no gradient, whatever its weight
    check("softmax", x, 2.0, None, randn(*mask) > 0.3, 0.7)


@runs_kernels
@pytest.mark.parametrize("walks", [False, True])
def test_softmax_of_nan_and_infinity(walks, monkeypatch):
    if walks:
        for module in (softmax, softmax_backward):
            monkeypatch.setattr(module, "row_config", lambda n, itemsize: (8, 1, 4))
    x = randn(6, 20)
    x[0], x[1, 3], x[2, 5], x[3, 7], x[4, 2:] = -math.inf, -math.inf, math.nan, math.inf, -math.inf
    kernel = FUSION_RULES["softmax"].kernel_fn
    torch.testing.assert_close(
        kernel(x, None, None, None, None), torch.softmax(x, -1), equal_nan=True
    )
    every = torch.ones(6, 1, dtype=torch.bool, device=x.device)
    assert kernel(x, None, None, every, -math.inf).isnan().all()


@runs_kernels
def test_softmax_of_padded_rows_and_none():
    check("softmax", randn(7, 128)[:, :100], 0.5, None, None, None)
    check("softmax", randn(4, 3, 100).transpose(0, 1), None, None, None, None)
    assert FUSION_RULES["softmax"].kernel_fn(randn(0, 5), None, None, None, None).shape == (0, 5)


@runs_kernels
def test_softmax_of_programs_that_walk_through_rows():
    x, mask = randn(21, 100), randn(100)  # 11 pairs of rows for 4 programs
    got = softmax.forward(x, 0.5, mask, None, None, Config(128, 2, 4, 1, 2))
    torch.testing.assert_close(got, torch.softmax(x * 0.5 + mask, -1))


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "reduction, smoothing", list(itertools.product(("mean", "sum", "none"), (0.0, 0.1)))
)
@pytest.mark.parametrize("v", [1, 100, 9001])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(weighted, large, v, reduction, smoothing, dtype, monkeypatch):
    if large:  # the gradient of many logits
        monkeypatch.setattr(cross_entropies, "FEW", 0)
    target = torch.arange(5) * 7 % v
    target[1] = -100
    for upcast in ("none", "fp32"):
        if v > 1:  # of one class the loss is nothing but rounding
            check(
                "cross_entropy",
                randn(5, v, dtype=dtype),
                target,
                (torch.rand(v) + 0.1).to(dtype) if weighted else None,
                -100,
                smoothing,
                reduction,
                upcast,
                needs=["logits"],
            )


@runs_kernels
@pytest.mark.parametrize("large", [False, True])
def test_cross_entropy_as_torch_has_it(large, monkeypatch):
    if large:
        monkeypatch.setattr(cross_entropies, "FEW", 0)
    kernel = FUSION_RULES["cross_entropy"].kernel_fn
    x, none = randn(3, 10), torch.full((3,), -100)
    assert kernel(x, none, None, -100, 0.0, "mean", "none", True)[0].isnan()
    assert kernel(x, none, None, -100, 0.0, "sum", "none", True)[0] == 0
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.1)):
        numbers = dict(ignore_index=-100, smoothing=smoothing, reduction=reduction, upcast="none")
        loss, rows = kernel(x, none, None, *numbers.values(), True)
        saved = SimpleNamespace(logits=x, target=none, weight=None, rows=rows, **numbers)
        assert (
            FUSION_RULES["cross_entropy"].backward_fn(saved, torch.ones_like(loss))[0].eq(0).all()
        )
    some, numbers = (
        torch.tensor([1, -100, 2]),
        dict(ignore_index=-100, smoothing=0.0, reduction="none", upcast="none"),
    )
    loss, rows = kernel(x, some, None, *numbers.values(), True)
    saved = SimpleNamespace(logits=x, target=some, weight=None, rows=rows, **numbers)
    d = FUSION_RULES["cross_entropy"].backward_fn(saved, torch.tensor([1.0, math.inf, math.nan]))[0]
    assert d[0].isfinite().all() and d[1].eq(0).all() and d[2].isnan().all()
    x[0], x[1, 2], x[2, 3] = -math.inf, math.nan, math.inf
    target = torch.tensor([1, 2, 4])
    got = kernel(x, target, None, -100, 0.0, "none", "none", True)[0]
    torch.testing.assert_close(got, F.cross_entropy(x, target, reduction="none"), equal_nan=True)
    # a logit that is infinite makes the loss and the gradient of its row NaN, whoever computes it
    pattern, counted = FUSION_RULES["cross_entropy"], torch.tensor([1, -100, 4])
    x[0] = 0.0
    for rows in (
        kernel(x, counted, None, *numbers.values(), True)[1],
        pattern.saved_fn(x, counted, None, *numbers.values()),
    ):
        saved = SimpleNamespace(logits=x, target=counted, weight=None, rows=rows, **numbers)
        d = pattern.backward_fn(saved, torch.ones(3))[0]
        assert d[0].isfinite().all() and d[2].isnan().all()
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernel(x, torch.tensor([1, 2, 10]), None, -100, 0.0, "none", "none", True)
