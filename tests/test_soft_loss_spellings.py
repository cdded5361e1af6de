"""Losses of rows against probabilities and a teacher's logits: what is found, what is left alone,
and training. tests/test_soft_losses.py has the kernels.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.testing import assert_fuses, collect, fused_nodes, rewritten
from tests.kernel_checks import DEVICE, Kernels, distance, randn, runs_kernels
from tests.spelled import check_spelling

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
GIVEN, TEACHER, LABELS = "soft_cross_entropy", "distillation_loss", "cross_entropy"
P = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), -1)
W = torch.linspace(0.5, 1.5, 6)
T = torch.tensor([0, 3, 5, 1])


def log_q(x):
    return F.log_softmax(x, -1)


BESIDE_PROBABILITIES = {
    "function": lambda x, p: F.cross_entropy(x, p),
    "weighted and smoothed": lambda x, p: F.cross_entropy(x, p, W, label_smoothing=0.1),
    "a sum of cold logits": lambda x, p: F.cross_entropy(x / 2, p, reduction="sum"),
    "each row": lambda x, p: F.cross_entropy(x, p, reduction="none"),
    "module": lambda x, p: nn.CrossEntropyLoss(weight=W)(x * 3, p),
    "by hand": lambda x, p: (-p * log_q(x)).sum(-1).mean(),
    "by hand, negated later": lambda x, p: -torch.sum(p * log_q(x), dim=1).mean(),
    "by hand, of everything": lambda x, p: -(log_q(x / 0.7) * p).sum() / 4,
    "by hand, with logsumexp": lambda x, p: ((x - x.logsumexp(-1, True)) * p).sum(-1),
    "a divergence": lambda x, p: F.kl_div(log_q(x), p, reduction="batchmean"),
    "a divergence, mean": lambda x, p: nn.KLDivLoss(reduction="sum")(log_q(x), p) / 24,
    "a divergence, rows": lambda x, p: F.kl_div(log_q(x), p, reduction="none").sum(-1),
    "three dimensions": lambda x, p: -(p[None] * log_q(x[None])).sum(-1).mean(),
}
BESIDE_A_TEACHER = {
    "distilled": lambda x, t: F.kl_div(log_q(x / 2), F.softmax(t / 2, -1), reduction="batchmean"),
    "from logarithms": lambda x, t: F.kl_div(
        log_q(x / 2), F.log_softmax(t / 2, 1), reduction="sum", log_target=True
    ),
    "two temperatures": lambda x, t: F.kl_div(log_q(x), (t * 3).softmax(1), reduction="none").sum(
        1
    ),
    "by hand": lambda x, t: (t.softmax(-1) * (log_q(t) - log_q(x))).sum(-1).mean(),
    "by hand, of logarithms": lambda x, t: (log_q(t).exp() * (log_q(t) - log_q(x))).sum(),
    "by hand, with logsumexp": lambda x, t: (
        (t - t.logsumexp(-1, True)).exp() * (t - t.logsumexp(-1, True) - x + x.logsumexp(-1, True))
    ).sum(-1),
    "a cross entropy": lambda x, t: -(t.softmax(-1) * log_q(x)).sum(-1),
    "a cross entropy, function": lambda x, t: F.cross_entropy(x, t.softmax(-1)),
    "of products": lambda x, t: F.kl_div(
        log_q(x @ P.mT), F.softmax(t @ P.mT, -1), reduction="batchmean"
    ),
    "of rows": lambda x, t: F.cross_entropy(
        (x.view(2, 2, 6) * 2).view(-1, 6), t.view(2, 2, 6).softmax(-1).view(-1, 6), reduction="sum"
    ),
    "all dimensions": lambda x, t: F.kl_div(
        log_q(x.view(2, 2, 6)), t.view(2, 2, 6).softmax(-1), reduction="batchmean"
    ),
}
BY_HAND = "by hand, with logsumexp"  # of a teacher it is not found: a sum of four values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", BESIDE_PROBABILITIES.values(), ids=BESIDE_PROBABILITIES)
def test_beside_probabilities(fn, dtype):
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    fitting = fn if dtype == torch.float32 else lambda x, p: fn(x.float(), p.float())
    report = assert_fuses(fitting, x, P.to(dtype), pattern=GIVEN)
    assert [s.pattern for s in report.fused] == [GIVEN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BESIDE_A_TEACHER)
def test_beside_a_teacher(name, dtype):
    x, t = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    fn = BESIDE_A_TEACHER[name]
    if dtype == torch.bfloat16:
        fn = lambda x, t: BESIDE_A_TEACHER[name](x.bfloat16().float(), t.bfloat16().float())  # noqa: E731
    report = collect(fn, x, t).report
    found = [s.pattern for s in report.fused]
    assert found == [TEACHER] if name != BY_HAND else TEACHER not in found, report


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_with_class_weights(smoothing, reduction):
    def fn(x, w):
        return F.cross_entropy(x, T, w, label_smoothing=smoothing, reduction=reduction)

    x = torch.randn(4, 6, requires_grad=True)
    assert_fuses(fn, x, W, pattern=LABELS)
    assert_fuses(lambda x, w: fn(x, w.detach()), x, W, pattern=LABELS)


def test_rows_of_logits_with_class_weights():
    def fn(x):
        return F.nll_loss(F.log_softmax(x.view(-1, 6), -1), T, W, ignore_index=3)

    assert_fuses(fn, torch.randn(2, 2, 6, requires_grad=True), pattern=LABELS)


def without_gradients(fn, *args):
    with torch.no_grad():
        return fn(*args)


LEFT_ALONE = {
    "of the probabilities": lambda x, p: (p * x.softmax(-1)).sum(-1),
    "of the logits": lambda x, p: (p * x).sum(-1),
    "over the rows": lambda x, p: (p * log_q(x)).sum(0),
    "not added up": lambda x, p: F.kl_div(log_q(x), p, reduction="none"),
    "over another dimension": lambda x, p: (p * F.log_softmax(x, 0)).sum(-1),
    "one for all classes": lambda x, p: (p[:, :1] * log_q(x)).sum(-1),
    "of a sigmoid": lambda x, p: (p * F.logsigmoid(x)).sum(-1),
    "logarithms that are no log-softmax": lambda x, p: F.kl_div(
        log_q(x), p, reduction="sum", log_target=True
    ),
    "the other way round": lambda x, p: (x.softmax(-1) * (log_q(p) - log_q(x))).sum(-1),
    "another softmax": lambda x, p: (
        (p * 2).softmax(-1) * (log_q(p) - log_q(x))
    ).sum(-1),
    "a sum of logarithms": lambda x, p: (p.softmax(-1) * (log_q(p) + log_q(x))).sum(-1),
    "channels": lambda x, p: F.cross_entropy(x[..., None], p[..., None]),
    "one number": lambda x, p: (0.5 * log_q(x)).sum(-1),
    "a teacher of the rows": lambda x, p: (p.softmax(0) * (log_q(p) - log_q(x))).sum(-1),
    "a larger target": lambda x, p: (p[None].expand(2, 4, 6) * log_q(x)).sum(-1),
    "probabilities without gradient mode": lambda x, p: (
        without_gradients(p.softmax, -1) * (log_q(p) - log_q(x))
    ).sum(-1),
    "a difference without gradient mode": lambda x, p: (
        p.softmax(-1) * without_gradients(lambda: log_q(p) - log_q(x))
    ).sum(-1),
    "an exponential without gradient mode": lambda x, p: (
        without_gradients(log_q(p).exp) * (log_q(p) - log_q(x))
    ).sum(-1),
    "log-probabilities without gradient mode": lambda x, p: (
        p * without_gradients(log_q, x)
    ).sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_near_misses(fn):
    options = {"fusion.only": f"{GIVEN}, {TEACHER}"}
    x, p = torch.randn(4, 6, requires_grad=True), P.clone().requires_grad_()
    report = collect(fn, x, p, options=options).report
    assert [g.error for g in report.graphs] == [None] and not report.fused, report


def test_class_weights_of_soft_targets_that_want_a_gradient_stay():
    """Beside labels eager refuses them; here it has their gradient."""
    x, w = torch.randn(4, 6, requires_grad=True), W.clone().requires_grad_()
    for fn in (
        lambda x, p, w: F.cross_entropy(x, p, w),
        lambda x, p, w: F.cross_entropy(x, p, w.softmax(0), label_smoothing=0.1),
        lambda x, p, w: F.cross_entropy(x, p, x[0].exp()),
    ):
        report = collect(fn, x, P, w).report
        assert [g.error for g in report.graphs] == [None]
        assert GIVEN not in {s.pattern for s in report.fused}, report
    assert_fuses(lambda x, p, w: F.cross_entropy(x, p, w.detach()), x, P, w, pattern=GIVEN)
    with torch.no_grad():
        assert_fuses(F.cross_entropy, x, P, w, pattern=GIVEN)
    assert_fuses(F.cross_entropy, x, P, W, pattern=GIVEN)


def test_log_probabilities_that_are_read_elsewhere_stay():
    def fn(x, p):
        logs = log_q(x)
        return F.kl_div(logs, p, reduction="sum") + logs.square().sum()

    report = collect(fn, torch.randn(4, 6), P).report
    assert not [s for s in report.fused if s.pattern in (GIVEN, TEACHER)], report


def test_a_teacher_without_gradient_mode_gives_probabilities():
    """Its softmax belongs to another region; what it gives is read as a tensor."""

    def fn(x, t):
        with torch.no_grad():
            p = t.softmax(-1)
        return F.kl_div(log_q(x), p, reduction="batchmean")

    x, t = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    assert_fuses(fn, x, t, pattern=GIVEN)


@runs_kernels
@pytest.mark.parametrize(
    "fn, pattern",
    [
        (lambda x, t: F.cross_entropy(x, t.softmax(-1)), TEACHER),
        (lambda x, t: F.kl_div(log_q(x / 2), (t / 3).softmax(-1), reduction="sum"), TEACHER),
        (lambda x, t: F.kl_div(log_q(x), log_q(t), reduction="mean", log_target=True), TEACHER),
        (lambda x, t: (t * log_q(x)).sum(-1), GIVEN),
        (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2), GIVEN),
    ],
)
def test_values_and_gradients(fn, pattern):
    check_spelling(pattern, fn, randn(5, 70).requires_grad_(), randn(5, 70).requires_grad_())


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_around_a_temperature(dtype):
    def fn(x, t):
        log_p, p = (
            f(z / 2, -1, dtype=torch.float32) for f, z in ((F.log_softmax, x), (F.softmax, t))
        )
        return F.kl_div(log_p, p, reduction="sum")

    inputs = [randn(5, 70, dtype=dtype).requires_grad_() for _ in range(2)]
    check_spelling(TEACHER, fn, *inputs)


def test_the_scale_of_a_cast_product():
    """Autocast casts the quotient; the site reads what was divided."""

    def fn(x, t):
        return F.kl_div(
            F.log_softmax((x / 2).float(), -1), F.softmax((t / 2).float(), -1), reduction="sum"
        )

    inputs = [torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    gm = rewritten(fn, *inputs)
    (node,) = fused_nodes(gm)
    assert node.args[2:4] == (0.5, 0.5) and not [n for n in gm.graph.nodes if "div" in n.name]


@runs_kernels
def test_a_divergence_with_itself_has_both_gradients():
    """As the entropy of a policy: logits are the teacher's too."""

    def fn(x):
        return (x.softmax(-1) * log_q(x)).sum(-1)

    check_spelling(TEACHER, fn, randn(5, 70).requires_grad_())


class Distilled(nn.Module):
    """DistilBERT's loss, and R-Drop's: a teacher without gradients, and two passes that have them,
    each compared with the other.
    """

    def __init__(self, v):
        super().__init__()
        self.student, self.teacher = nn.Linear(8, v), nn.Linear(8, v)

    def forward(self, x, z, target):
        with torch.no_grad():
            teacher = self.teacher(x)
        one, other = self.student(x), self.student(z)
        loss = F.kl_div(log_q(one / 2), F.softmax(teacher / 2, -1), reduction="batchmean") * 4
        for a, b in ((one, other), (other, one)):
            loss = loss + F.kl_div(log_q(a), F.softmax(b, -1), reduction="batchmean") / 2
        weight = torch.linspace(0.5, 1, one.shape[-1], device=x.device, dtype=one.dtype)
        return loss + F.cross_entropy(one.flatten(0, 1), target.flatten(), weight)


@runs_kernels
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distillation_trains(dtype, dynamic):
    torch.manual_seed(0)
    model = Distilled(70).to(DEVICE, dtype)
    collector = Kernels({"fusion.gate": "always", "fusion.only": f"{TEACHER}, {LABELS}"})
    compiled = torch.compile(model, backend=collector, dynamic=False)
    exact = copy.deepcopy(model).double()
    for b in (3, 5)[: 1 + dynamic]:
        x, z = randn(b, 4, 8, dtype=dtype), randn(b, 4, 8, dtype=dtype)
        target = torch.randint(0, 70, (b, 4), device=DEVICE)
        if dynamic:
            for t in (x, z, target):
                torch._dynamo.mark_dynamic(t, 0)

        def gradients(run, of, *inputs):
            return torch.autograd.grad(run(*inputs), list(of.student.parameters()))

        got, eager = (gradients(run, model, x, z, target) for run in (compiled, model))
        want = gradients(exact, exact, x.double(), z.double(), target)
        for mine, its, right in zip(got, eager, want, strict=True):
            assert distance(mine, right) <= 1.5 * distance(its, right) + 1e-6
    found = sorted(s.pattern for s in collector.report.fused)
    assert found == [LABELS, TEACHER, TEACHER, TEACHER], collector.report


@runs_kernels
def test_under_autocast():
    model, x = Distilled(70).to(DEVICE), randn(2, 4, 8)
    collector = Kernels({"fusion.gate": "always", "fusion.only": f"{TEACHER}, {LABELS}"})
    compiled = torch.compile(model, backend=collector, dynamic=False)
    target = torch.randint(0, 70, (2, 4), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        got, want = (run(x, x + 1, target) for run in (compiled, model))
    assert distance(got, want) < 1e-2
    assert len([s for s in collector.report.fused if s.pattern == TEACHER]) == 3
