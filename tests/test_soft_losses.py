"""Losses of rows against probabilities and against a teacher's logits: the kernels against fp64 and
eager. tests/test_soft_loss_spellings.py has what is found.
"""

import math

import pytest
import torch

from fusion_backend.kernels.loss import soft_targets as kernels
from fusion_backend.kernels.loss.soft_targets import Target
from fusion_backend.ops.registry import FUSION_RULES
from tests.kernel_checks import DEVICE, FLOATS, check, distance, randn, runs_kernels, symbolic
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
GIVEN, TEACHER = (FUSION_RULES[name] for name in ("soft_cross_entropy", "distillation_loss"))
GRADIENTS = ["logits", "target", "teacher"]
REDUCTIONS = ["rows", "sum", "mean"]
# a row that ends within a step; several steps; more dimensions; one
SHAPES = [(5, 7), (7, 100), (3, 2049), (2, 5000), (2, 3, 5, 33), (100,)]


def probabilities(*shape, dtype=torch.float32):
    return torch.softmax(randn(*shape), -1).to(dtype)


def given(shape, dtype=torch.float32, loss="cross_entropy", reduction="mean", more=False):
    """Arguments of soft_cross_entropy; `more`: with weights and smoothing."""
    weight = torch.rand(shape[-1], device=DEVICE).to(dtype) + 0.1 if more else None
    p = probabilities(*shape, dtype=dtype)
    numbers = 0.5, 0.1 if more else None
    return [randn(*shape, dtype=dtype), p, weight, *numbers, loss, reduction, "none"]


def taught(shape, dtype=torch.float32, loss="kl_div", reduction="sum"):
    """Arguments of distillation_loss."""
    return [*(randn(*shape, dtype=dtype) for _ in range(2)), 0.5, 0.75, loss, reduction, "none"]


def wanted(shape, dtype, reduction) -> list | None:
    """Of fp16 no gradients that are smaller than its numbers of full precision."""
    return [] if dtype == torch.float16 and (reduction == "mean" or shape[-1] > 4000) else GRADIENTS


@runs_kernels
@product(
    shape=SHAPES,
    dtype=FLOATS,
    loss=["cross_entropy", "weighted", "negated", "kl_div"],
    reduction=REDUCTIONS,
)
def test_given_probabilities(shape, dtype, loss, reduction):
    torch.manual_seed(1)
    more = loss == "weighted"
    args = given(shape, dtype, "cross_entropy" if more else loss, reduction, more)
    check(GIVEN.name, *args, needs=wanted(shape, dtype, reduction))


@runs_kernels
@product(
    shape=SHAPES,
    dtype=FLOATS,
    loss=["kl_div", "log_target", "cross_entropy", "negated"],
    reduction=REDUCTIONS,
)
def test_a_teacher(shape, dtype, loss, reduction):
    torch.manual_seed(1)
    check(
        TEACHER.name, *taught(shape, dtype, loss, reduction), needs=wanted(shape, dtype, reduction)
    )


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_cast_before_it_is_computed_inside(dtype, reduction):
    logits, p, *rest = given((3, 2049), dtype, reduction=reduction)
    needs = wanted((2049,), dtype, reduction) and ["logits"]
    loss, _ = check(GIVEN.name, logits, p.float(), *rest[:-1], "fp32", needs=needs)
    assert loss.dtype == torch.float32
    args = taught((3, 2049), dtype, reduction=reduction)[:-1]
    loss, _ = check(TEACHER.name, *args, "fp32", needs=wanted((2049,), dtype, reduction))
    assert loss.dtype == torch.float32


@runs_kernels
def test_targets_of_more_bits_than_the_logits():
    logits, p, *rest = given((3, 100), torch.bfloat16)
    loss, _ = GIVEN.launched((logits, p.float(), *rest), save=True)
    assert loss.dtype == GIVEN.reference(logits, p.float(), *rest).dtype == torch.float32


@runs_kernels
@pytest.mark.parametrize("name", [GIVEN.name, TEACHER.name])
@pytest.mark.parametrize("how", [(32, 1, 1), (256, 4, 1), (512, 8, 2), (2048, 1, 4)])
def test_steps(name, how):
    x, y = randn(3, 2049), randn(3, 2049)
    p = torch.softmax(y, -1)
    target = Target(p, 0.5) if name == GIVEN.name else Target(y, 0.5, True, 0.7, True)
    mine, other = kernels.forward(x, target, how), kernels.forward(x, target)
    for got, want in zip(mine, other, strict=True):
        torch.testing.assert_close(got, want)
    dloss, needs = torch.rand(3, device=DEVICE), (True, True)
    found = [
        kernels.backward(x, target, got, dloss, needs, way)
        for way in (how, (256, 4, 2), (16384, 16, 1))
    ]
    for one, *others in zip(*found, strict=True):
        for another in others:
            torch.testing.assert_close(one, another)


def computed(run, leaves, rest):
    """Value and gradients of the two tensors, each row times another number."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = run(*leaves, *rest)
    dy = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return out.detach(), *torch.autograd.grad(out, leaves, dy)


def by_kernels(pattern, *args):
    """The same by the kernels, once with what they keep and once with what eager keeps."""
    out, kept = pattern.launched(args, save=True)
    dy = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    names = [p.name for p in pattern.params]
    for saved in (kept, pattern.saved_fn(*args)):
        inputs = dict(zip(names, args, strict=True), kept=saved)
        needs = dict.fromkeys(names[:2], True)
        yield out, *pattern.backward_fn(type("Saved", (), inputs | dict(needs=needs)), dy)[:2]


@runs_kernels
@pytest.mark.parametrize("offset", [10, -300, 3000])
@pytest.mark.parametrize("form", ["cross_entropy", "kl_div", "log_target", "given", "weighted"])
def test_logits_far_from_0_lose_no_more_than_in_eager(form, offset):
    torch.manual_seed(2)
    if form in ("given", "weighted"):
        pattern, args = GIVEN, given((4, 300), reduction="rows", more=form == "weighted")
    else:
        pattern, args = TEACHER, taught((4, 300), loss=form, reduction="rows")
        args[1] = args[1] - offset
    args[0] = args[0] + offset
    exact = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    want = computed(pattern.reference, exact[:2], exact[2:])
    eager = computed(pattern.reference, args[:2], args[2:])
    for found in by_kernels(pattern, *args):
        for mine, its, right in zip(found, eager, want, strict=True):
            assert distance(mine, right) <= 1.5 * distance(its, right) + 2e-7


@runs_kernels
@pytest.mark.parametrize("apart", [1e-1, 1e-2])
@pytest.mark.parametrize("loss", ["kl_div", "log_target"])
def test_a_small_divergence_is_as_exact_as_in_eager(loss, apart):
    """Of two distributions that are nearly the same it is small beside what is added up."""
    torch.manual_seed(3)
    args = taught((64, 1000), loss=loss, reduction="rows")
    args[1], args[3] = args[0] + apart * randn(64, 1000), args[2]
    exact = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    want, eager = TEACHER.reference(*exact), TEACHER.reference(*args)
    got, _ = TEACHER.launched(args, save=True)
    assert distance(got, want) <= 1.5 * distance(eager, want) + 1e-6


ODD = {
    "-inf in the logits": (-math.inf, 0.3),
    "-inf in both": (-math.inf, -math.inf),
    "-inf in the teacher": (0.3, -math.inf),
    "inf in the logits": (math.inf, 0.3),
    "inf in the teacher": (0.3, math.inf),
    "NaN in the logits": (math.nan, 0.3),
    "NaN in the teacher": (0.3, math.nan),
}


@runs_kernels
@pytest.mark.parametrize("where", [0, 600, 1299])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("loss", ["kl_div", "log_target", "cross_entropy"])
def test_infinities_and_nan_of_a_teacher_are_those_of_torch(loss, odd, where):
    torch.manual_seed(4)
    args = taught((3, 1300), loss=loss, reduction="rows")
    args[0][1, where], args[1][1, where] = odd
    got, _ = TEACHER.launched(args, save=True)
    torch.testing.assert_close(got, TEACHER.reference(*args), equal_nan=True, atol=2e-5, rtol=2e-5)


@runs_kernels
@pytest.mark.parametrize("odd", [(-math.inf, 0.2), (-math.inf, 0.0), (0.1, 0.0), (math.nan, 0.2)])
@pytest.mark.parametrize("loss", ["cross_entropy", "kl_div"])
def test_infinities_and_nan_beside_probabilities_are_those_of_torch(loss, odd):
    args = given((3, 1300), loss=loss, reduction="rows")
    args[0][1, 7], args[1][1, 7] = odd
    want = computed(GIVEN.reference, args[:1], args[1:])
    for got, dx, _ in by_kernels(GIVEN, *args):
        torch.testing.assert_close(got, want[0], equal_nan=True)
        torch.testing.assert_close(dx[::2], want[1][::2])


@runs_kernels
def test_a_teacher_that_excludes_a_class_gives_its_logit_no_gradient():
    args = taught((3, 70), reduction="rows")
    args[1][1, 5], args[1][2, 6] = -math.inf, -400.0
    for _, dx, dy in by_kernels(TEACHER, *args):
        assert dx.isfinite().all() and dy.isfinite().all()
        assert dy[1, 5] == dy[2, 6] == 0


@runs_kernels
def test_rows_of_minus_infinity_alone_are_nan():
    for pattern, args in (
        (GIVEN, given((3, 70), reduction="rows")),
        (TEACHER, taught((3, 70), reduction="rows")),
    ):
        args[0][1] = -math.inf
        got, _ = pattern.launched(args, save=True)
        assert got.isnan().tolist() == [False, True, False]


@runs_kernels
@pytest.mark.parametrize("loss", ["kl_div", "cross_entropy"])
def test_rows_where_they_lie(loss):
    """Without their last token, as language models shift them, and with another order in memory."""
    x, y = randn(2, 6, 40), randn(6, 2, 40).transpose(0, 1)
    check(TEACHER.name, x[:, :-1], y[:, 1:], 1.0, 1.0, loss, "rows", "none")
    x, y = randn(3, 4, 5, 40)[:, ::2, ::2], randn(3, 2, 3, 40)
    check(TEACHER.name, x, y, 1.0, 1.0, loss, "rows", "none")


@runs_kernels
@pytest.mark.parametrize("pattern", [GIVEN, TEACHER], ids=lambda p: p.name)
def test_no_rows(pattern):
    args = taught((0, 6)) if pattern is TEACHER else given((0, 6))
    got, kept = pattern.launched(args, save=True)
    torch.testing.assert_close(got, pattern.reference(*args), equal_nan=True)
    assert kept.shape == (5, 0)


@runs_kernels
def test_one_class_has_no_loss():
    for pattern, args in ((GIVEN, given((4, 1))), (TEACHER, taught((4, 1)))):
        for loss, dx, _ in by_kernels(pattern, *args):
            assert loss.abs() < 1e-6 and dx.abs().max() < 1e-6


def test_what_the_kernels_refuse():
    x, p, weight, *rest = given((4, 6), more=True)
    refused = {
        "columns": (x.t().contiguous().t(), p, weight),
        "shape": (x, p[:1], weight),
        "weight": (x, p, torch.rand(12, device=DEVICE)[::2]),
        "one weight": (x, p, weight[:1]),
        "fp64": (x.double(), p, weight),
        "targets of fp64": (x, p.double(), weight),
        "no classes": (x[:, :0], p[:, :0], None),
        "a number": (x[0, 0], p[0, 0], None),
    }
    for why, args in refused.items():
        assert GIVEN.guard_fn(*args, *rest) is not None, why
    assert GIVEN.guard_fn(x, p, weight, *rest) is None
    _, (fake, its) = symbolic(x, p)
    assert "dynamic" in str(GIVEN.guard_fn(fake, its, None, *rest))
    assert "dynamic" in str(TEACHER.guard_fn(fake, its, 1.0, 1.0, "kl_div", "sum", "none"))
    assert TEACHER.guard_fn(x, p.t(), 1.0, 1.0, "kl_div", "sum", "none") is not None
