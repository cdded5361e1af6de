"""Cross entropy over channels: what is found, what is left alone, and the kernels against fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.kernels.loss import channel_cross_entropy as kernels
from fusion_backend.kernels.loss.channel_cross_entropy import Loss, Steps
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import assert_fuses, collect, value_and_gradients
from tests.kernel_checks import (
    DEVICE,
    FLOATS,
    Kernels,
    check,
    distance,
    exact,
    randn,
    runs_kernels,
    symbolic,
)
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "channel_cross_entropy"
PATTERN = FUSION_RULES[NAME]
REDUCTIONS = ["mean", "sum", "none"]
# one position; one class; three dimensions and five; 1000 classes; planes that end within a program
SHAPES = [(1, 96, 1), (3, 1, 5, 5), (2, 3, 2049), (3, 19, 7, 7), (2, 1000, 3, 3), (2, 6, 3, 4, 5)]
IGNORED = 255


def targets(*shape, classes, ignored=0.2):
    t = torch.randint(0, classes, shape, device=DEVICE)
    return torch.where(torch.rand(shape, device=DEVICE) < ignored, IGNORED, t)


def arguments(shape, dtype=torch.float32, weighted=True, smoothing=0.0, reduction="mean"):
    n, c, *plane = shape
    weight = torch.rand(c, device=DEVICE).to(dtype) + 0.1 if weighted else None
    target = targets(n, *plane, classes=c)
    target.view(-1)[0] = 0  # one that counts
    return randn(*shape, dtype=dtype), target, weight, IGNORED, smoothing, reduction, "none"


# The kernels


@runs_kernels
@product(
    shape=SHAPES, dtype=FLOATS, weighted=[False, True], smoothing=[0.0, 0.1], reduction=REDUCTIONS
)
def test_shapes_dtypes_and_forms(shape, dtype, weighted, smoothing, reduction):
    torch.manual_seed(1)
    args = arguments(shape, dtype, weighted, smoothing, reduction)
    # with one class loss and gradient are 0, and a distance says nothing
    if shape[1] == 1:
        loss, scale = Loss(args[2], IGNORED, smoothing), torch.ones((), device=DEVICE)
        losses, _, kept = kernels.forward(*args[:2], loss, True, True)
        dx = kernels.backward(*args[:2], kept, scale, loss)
        assert losses.abs().max() < 1e-6 and dx.abs().max() < 1e-6
        return
    check(NAME, *args, needs=["logits"])


@runs_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_before_it_is_computed_inside(dtype, reduction):
    logits, target, weight, *rest, _ = arguments((2, 19, 6, 7), dtype, reduction=reduction)
    loss, *_ = check(NAME, logits, target, weight.float(), *rest, "fp32", needs=["logits"])
    assert loss.dtype == torch.float32


@runs_kernels
@pytest.mark.parametrize("how", [Steps(32, 1, 1, 5), Steps(64, 8, 2, 0), Steps(256, 16, 1, 3)])
def test_steps(how):
    logits, target, weight, *_ = arguments((3, 19, 70))
    loss = Loss(weight, IGNORED, 0.1)
    mine, other = (
        kernels.forward(logits, target, loss, True, True, *steps) for steps in ((how,), ())
    )
    for got, want in zip(mine, other, strict=True):
        torch.testing.assert_close(got, want)
    kept, scale = got, torch.rand(target.shape, device=DEVICE)
    torch.testing.assert_close(
        kernels.backward(logits, target, kept, scale, loss, how),
        kernels.backward(logits, target, kept, scale, loss),
    )


@runs_kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("offset", [10, -300, 3000])
def test_logits_far_from_0_lose_no_more_than_in_eager(offset, smoothing):
    logits, target, *rest = arguments((2, 19, 6, 5), smoothing=smoothing, reduction="none")
    leaves = [(logits + offset).to(kind).requires_grad_() for kind in FLOATS[:1] + [torch.float64]]
    rest = [rest, [rest[0].double(), *rest[1:]]]
    eager, want = (PATTERN.reference(x, target, *r) for x, r in zip(leaves, rest, strict=True))
    eager.sum().backward()
    want.sum().backward()
    args = (leaves[0].detach(), target, *rest[0])
    loss, *saves = PATTERN.launched(args, save=True)
    assert distance(loss, want) <= 1.5 * distance(eager, want) + 1e-7
    for kept in (saves[1], PATTERN.saved_fn(*args)[1]):
        scale = torch.ones((), device=DEVICE)
        dx = kernels.backward(*args[:2], kept, scale, Loss(args[2], IGNORED, smoothing))
        near = distance(leaves[0].grad, leaves[1].grad)
        assert distance(dx, leaves[1].grad) <= 1.5 * near + 2e-7


@runs_kernels
def test_without_a_gradient_nothing_is_kept():
    *_, kept = PATTERN.launched(arguments((2, 5, 3, 4)), save=False)
    assert not kept.numel()


@pytest.mark.parametrize(
    "count, positions", [(64, 64), (1 << 14, 64), (1 << 15, 128), (1 << 16, 256)]
)
def test_a_few_positions_are_spread_over_more_programs(count, positions):
    few, many = (torch.empty(1, c, count, device="meta") for c in (3, 150))
    assert kernels.forward_steps(few) == kernels.forward_steps(many) == (positions, 4, 1, 5)
    assert kernels.backward_steps(few) == (positions, 4, 1, 0)
    assert kernels.backward_steps(many) == (positions, 16, 2, 0)


@runs_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_where_no_position_counts(reduction):
    logits, target, weight, *rest = arguments((2, 5, 3, 4), reduction=reduction)
    args = (logits, torch.full_like(target, IGNORED), weight, *rest)
    loss, weights, kept = PATTERN.launched(args, save=True)
    torch.testing.assert_close(loss, PATTERN.reference(*args), equal_nan=True)
    scale = torch.ones((), device=DEVICE) / weights
    dx = kernels.backward(*args[:2], kept, scale, Loss(weight, IGNORED, 0.0))
    assert not dx.any()


@runs_kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_infinities_and_nan_are_those_of_torch(smoothing):
    logits, target, weight, *_ = arguments((2, 9, 6))
    target[0] = torch.tensor([1, 0, 2, 3, 0, 7])
    logits[0, 1, 0], logits[0, :, 1], logits[0, 2, 2] = -math.inf, -math.inf, math.inf
    logits[0, 3, 3], logits[0, 2, 4], logits[0, :5, 5] = math.nan, -math.inf, -math.inf
    args = (logits, target, weight, IGNORED, smoothing, "none", "none")
    loss, _, kept = PATTERN.launched(args, save=True)
    leaf = logits.clone().requires_grad_()
    want = PATTERN.reference(leaf, *args[1:])
    torch.testing.assert_close(loss, want, equal_nan=True)
    want.sum().backward()
    there = ~torch.isinf(want)[:, None].expand_as(logits)
    scale = torch.ones((), device=DEVICE)
    for saved in (kept, PATTERN.saved_fn(*args)[1]):
        dx = kernels.backward(logits, target, saved, scale, Loss(weight, IGNORED, smoothing))
        torch.testing.assert_close(dx[there], leaf.grad[there], equal_nan=True)


@runs_kernels
@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_class_out_of_bounds_is_an_assertion(wrong):
    if DEVICE == "cuda":
        pytest.skip("an assertion on a GPU ends the process")
    logits, target, *rest = arguments((2, 4, 6))
    target[1, 2] = wrong
    with pytest.raises(RuntimeError, match="a target is out of bounds"):
        PATTERN.launched((logits, target, *rest), save=True)


def test_what_the_kernel_refuses():
    logits, target, weight, *rest = arguments((2, 6, 4, 5))
    refused = {
        "channels-last": (logits.to(memory_format=torch.channels_last), target, weight),
        "not dense": (logits, target.mT.contiguous().mT, weight),
        "weight": (logits, target, torch.rand(12, device=DEVICE)[::2]),
        "fp64": (logits.double(), target, weight),
    }
    for why, args in refused.items():
        assert PATTERN.guard_fn(*args, *rest) is not None, why
    _, (fake, classes) = symbolic(logits, target)
    assert "dynamic" in str(PATTERN.guard_fn(fake, classes, weight, *rest))


# What is found

T = torch.randint(0, 6, (2, 4, 5))
FOUND = {
    "function": lambda x, w: F.cross_entropy(x, T),
    "weighted": lambda x, w: F.cross_entropy(x, T, w, ignore_index=2),
    "weights of more bits": lambda x, w: F.cross_entropy(x.float(), T, w.float()),
    "detached weights": lambda x, w: F.cross_entropy(x, T, w.detach()),
    "smoothed": lambda x, w: F.cross_entropy(x, T, label_smoothing=0.1),
    "smoothed and weighted": lambda x, w: F.cross_entropy(x, T, w, label_smoothing=0.1),
    "a sum": lambda x, w: F.cross_entropy(x, T, reduction="sum") / 7,
    "each": lambda x, w: F.cross_entropy(x, T, w, reduction="none"),
    "module": lambda x, w: nn.CrossEntropyLoss(w)(x, T),
    "of log-probabilities": lambda x, w: F.nll_loss(F.log_softmax(x, 1), T, w),
    "of log-probabilities, module": lambda x, w: nn.NLLLoss()(nn.LogSoftmax(1)(x), T),
    "of log-probabilities in fp32": lambda x, w: F.nll_loss(F.log_softmax(x, 1).float(), T),
    "three dimensions": lambda x, w: F.cross_entropy(x.flatten(2), T.flatten(1), w),
    "five dimensions": lambda x, w: F.cross_entropy(x[..., None], T[..., None], w),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", FOUND.values(), ids=FOUND)
def test_spellings(fn, dtype):
    x = torch.randn(2, 6, 4, 5, dtype=dtype, requires_grad=True)
    report = assert_fuses(fn, x, torch.rand(6, dtype=dtype) + 0.1, pattern=NAME)
    assert [s.pattern for s in report.fused] == [NAME]


P = torch.rand(2, 6, 4, 5)
LEFT_ALONE = {
    "of probabilities": lambda x: F.nll_loss(x.softmax(1), T),
    "with probabilities for targets": lambda x: F.cross_entropy(x, P),
    "normalised over another dimension": lambda x: F.nll_loss(F.log_softmax(x, 2), T),
    "of another value": lambda x: F.nll_loss(F.log_softmax(x, 1) * 2, T),
    "of rows": lambda x: F.cross_entropy(x.permute(0, 2, 3, 1).reshape(-1, 6), T.view(-1)),
}


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_near_misses(fn):
    collector = collect(fn, torch.randn(2, 6, 4, 5), options={"fusion.only": NAME})
    assert not collector.report.fused, collector.report


def test_log_probabilities_that_are_read_elsewhere_stay():
    def fn(x):
        logp = F.log_softmax(x, 1)
        return F.nll_loss(logp, T) + logp.exp().sum()

    report = assert_fuses(fn, torch.randn(2, 6, 4, 5), pattern="channel_softmax")
    assert [s.pattern for s in report.fused] == ["channel_softmax"]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_that_are_detached_have_the_gradient_of_their_other_readers(smoothing):
    weight = (torch.rand(6) + 0.1).requires_grad_()

    def fn(x):
        return F.cross_entropy(x, T, weight.detach(), label_smoothing=smoothing) + weight.sum()

    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    x = torch.randn(2, 6, 4, 5, requires_grad=True)
    torch.compile(fn, backend=collector)(x).backward()
    assert [s.pattern for s in collector.report.fused] == [NAME]
    assert torch.equal(weight.grad, torch.ones(6)) and x.grad.any()


def test_weights_that_want_a_gradient_are_the_error_of_eager():
    weight = torch.rand(6, requires_grad=True)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        collect(lambda x: F.cross_entropy(x, T, weight), torch.randn(2, 6, 4, 5))


# In whole functions


class Head(nn.Module):
    """The loss of torchvision's segmentation models: an auxiliary head beside the other."""

    def __init__(self):
        super().__init__()
        self.out, self.aux = nn.Conv2d(6, 9, 1), nn.Conv2d(6, 9, 1)
        self.register_buffer("weight", torch.rand(9) + 0.1)

    def forward(self, x, target):
        losses = [
            F.cross_entropy(head(x), target, self.weight.to(x.dtype), ignore_index=IGNORED)
            for head in (self.out, self.aux)
        ]
        return losses[0] + 0.5 * losses[1]


@runs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_segmentation_model_trains(dtype, dynamic):
    torch.manual_seed(0)
    head, x = Head().to(DEVICE, dtype), randn(2, 6, 5, 7, dtype=dtype)
    target = targets(2, 5, 7, classes=9)
    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    compiled = torch.compile(head, backend=collector, dynamic=dynamic)
    if dynamic:  # the batch alone
        torch._dynamo.mark_static(x, [2, 3])
        torch._dynamo.mark_static(target, [1, 2])

    def gradients(run, of, x):
        return torch.autograd.grad(run(x, target), list(of.parameters()))

    got, eager = gradients(compiled, head, x), gradients(head, head, x)
    head.double()
    want = gradients(head, head, x.double())
    assert [s.pattern for s in collector.report.fused] == [NAME, NAME]
    for mine, its, right in zip(got, eager, want, strict=True):
        assert distance(mine, right) <= 1.5 * distance(its, right) + 1e-6


@runs_kernels
def test_a_loss_of_each_position_with_a_mask():
    """The gradient that comes back differs from position to position."""
    x, target, weight, *_ = arguments((2, 6, 4, 5))
    mask = torch.rand(target.shape, device=DEVICE)

    def fn(x):
        losses = F.cross_entropy(x, target, weight, ignore_index=IGNORED, reduction="none")
        return (losses * mask.to(x.dtype)).sum() / 3

    collector = Kernels({"fusion.gate": "always", "fusion.only": NAME})
    compiled = torch.compile(fn, backend=collector)
    x = x.requires_grad_()
    got = value_and_gradients(compiled, [x])
    leaf = exact(x).requires_grad_()
    weight = weight.double()
    for mine, right in zip(got, value_and_gradients(fn, [leaf]), strict=True):
        assert distance(mine, right) < 1e-5
