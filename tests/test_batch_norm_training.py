"""batch_norm_training: its kernels against fp64, and the models in which it is found."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm.batch_norm import Columns, forward
from fusion_backend.kernels.norm.batch_norm_backward import backward
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import assert_fuses, collect, fused_nodes
from tests.kernel_checks import (
    DEVICE,
    FLOATS,
    Kernels,
    check,
    distance,
    randn,
    runs_kernels,
)
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME = "batch_norm_training"
PATTERN = FUSION_RULES[NAME]
LAST = torch.channels_last
ACTS = ["identity", "relu", "relu6", "silu", "hardswish"]


def last(*shape, dtype=torch.float32):
    return randn(*shape, dtype=dtype).to(memory_format=LAST)


# The kernels


@runs_kernels
@product(
    shape=[(2, 3, 1, 5), (3, 6, 5, 5), (1, 130, 7, 1), (4, 64, 9, 8), (2, 300, 3, 2)],
    dtype=FLOATS, act=ACTS, residual=[False, True],
)  # fmt: skip
def test_shapes_and_dtypes(shape, dtype, act, residual):
    if residual and act not in ("identity", "relu"):
        pytest.skip("refused")
    x, r = last(*shape, dtype=dtype), last(*shape, dtype=dtype) if residual else None
    c = shape[1]
    check(NAME, x, r, randn(c, dtype=dtype), randn(c, dtype=dtype), 1e-3, act)


@runs_kernels
@pytest.mark.parametrize("weight, bias", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize(
    "act, residual", [("silu", False), ("relu", True), ("relu", False), ("hardswish", False)]
)
def test_missing_vectors(weight, bias, act, residual):
    x, r = last(3, 20, 6, 5), last(3, 20, 6, 5) if residual else None
    w, b = randn(20) if weight else None, randn(20) if bias else None
    check(NAME, x, r, w, b, 1e-3, act)


@runs_kernels
@pytest.mark.parametrize("needs", [["x"], ["residual"], ["weight"], ["bias"], ["x", "bias"]])
@pytest.mark.parametrize("act", ["identity", "relu"])
def test_only_what_is_needed(needs, act):
    args = last(3, 20, 6, 5), last(3, 20, 6, 5), randn(20), randn(20)
    check(NAME, *args, 1e-3, act, needs=needs)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [False, True])
def test_vectors_in_fp32(dtype, residual):
    """As autocast leaves them."""
    x, r = last(4, 20, 6, 5, dtype=dtype), last(4, 20, 6, 5, dtype=dtype) if residual else None
    check(NAME, x, r, randn(20), randn(20), 1e-3, "relu")


@runs_kernels
@pytest.mark.parametrize("rows, pieces", [(1, 1), (4, 3), (8, 2), (2, 60), (16, 7)])
def test_pieces(rows, pieces):
    """Pieces of unequal length, some with one tile or none, and a last tile that is not full."""
    x, w, b, dy = last(3, 70, 6, 5), randn(70), randn(70), last(3, 70, 6, 5)
    columns = Columns(64, rows, 2, pieces, 4)
    y, mean, var = forward(x, None, w, b, 1e-3, "silu", columns)
    x64 = x.double().requires_grad_()
    want, exact_mean, exact_var = PATTERN.reference(x64, None, w.double(), b.double(), 1e-3, "silu")
    for got, exact in ((y, want), (mean, exact_mean), (var, exact_var)):
        assert distance(got, exact.detach()) < 1e-6
    found = backward(
        dy, None, None, x, None, w, b, mean, var, 1e-3, "silu", (True, False, True, True), columns
    )
    (dx,) = torch.autograd.grad(want, x64, dy.double())
    assert distance(found[0], dx) < 1e-5


@runs_kernels
@pytest.mark.parametrize("residual", [False, True])
def test_features(residual):
    """Of two dimensions, and of three in space."""
    x = randn(70, 20)
    check(NAME, x, randn(70, 20) if residual else None, randn(20), randn(20), 1e-3, "relu")
    x, r = (randn(2, 4, 3, 4, 5).to(memory_format=torch.channels_last_3d) for _ in range(2))
    check(NAME, x, r if residual else None, randn(4), randn(4), 1e-3, "relu")


@runs_kernels
def test_far_from_zero():
    """A mean that is large beside the deviation keeps the variance."""
    x = (1000 + last(4, 20, 6, 5)).contiguous(memory_format=LAST)
    _, mean, var = forward(x, None, None, None, 1e-5, "identity")
    assert distance(var, x.double().var((0, 2, 3), correction=0)) < 1e-5
    assert distance(mean, x.double().mean((0, 2, 3))) < 1e-7


@runs_kernels
@pytest.mark.parametrize("act", ["relu6", "hardswish"])
def test_far_from_zero_behind_the_norm(act):
    """Both edges of the activation have values on both sides."""
    x, w, b = last(3, 8, 9, 9), 4 + randn(8), randn(8)
    assert 0.01 < (PATTERN.reference(x, None, w, b, 1e-3, "identity")[0] > 6).float().mean()
    check(NAME, x, None, w, b, 1e-3, act)


@runs_kernels
@pytest.mark.parametrize("name", [NAME, "batch_norm_sum"])
def test_expanded_gradients_of_the_statistics(name):
    """As of their sum: all of them are one element in memory."""
    pattern, x, vectors = FUSION_RULES[name], last(2, 40, 5, 5), [randn(40) for _ in range(4)]
    rest = (vectors[:2], [1e-3]) if name == NAME else (vectors, [1e-3, 1e-3])
    inputs = [x, *([None] if name == NAME else [last(2, 40, 5, 5)]), *rest[0], *rest[1], "relu"]
    result = pattern.launched(tuple(inputs), save=False)
    named = dict(zip((p.name for p in pattern.params), inputs, strict=True))
    needs = {k: k == "x" for k, v in named.items() if v is None or isinstance(v, torch.Tensor)}
    saved = SimpleNamespace(**named, result=result[: pattern.outputs], needs=needs)
    one = torch.ones((), device=DEVICE)
    gradients = [(one * (i + 1)).expand(r.shape) for i, r in enumerate(saved.result)]
    dx, *_ = pattern.backward_fn(saved, *gradients)
    exact = [v.double() if isinstance(v, torch.Tensor) else v for v in inputs]
    for v in exact[:2]:
        if v is not None:
            v.requires_grad_()
    want = pattern.reference(*exact)
    (wanted,) = torch.autograd.grad(want, exact[0], [g.double() for g in gradients])
    assert distance(dx, wanted) < 1e-5


@runs_kernels
def test_hardswish_at_its_edges():
    """All of a channel is exactly 3 or -3."""
    x, zero, b = last(2, 4, 3, 3), torch.zeros(4, device=DEVICE), randn(4).sign() * 3
    _, mean, var = forward(x, None, zero, b, 1e-3, "hardswish")
    needs = True, False, False, True
    dy = torch.ones_like(x)
    found = backward(dy, None, None, x, None, zero, b, mean, var, 1e-3, "hardswish", needs)
    b64 = b.double().requires_grad_()
    (want,) = torch.autograd.grad(18 * F.hardswish(b64).sum(), b64)
    assert torch.equal(found[3].double(), want) and {*want.tolist()} == {0.0, 18.0}


@runs_kernels
def test_six_in_16_bits():
    """What is rounded to six has no gradient, as in eager; in fp32 much of it would be below."""
    x, w, b = last(2, 8, 160, 160, dtype=torch.float16), 4 + randn(8), randn(8)
    _, mean, var = forward(x, None, w, b, 1e-3, "identity")
    dy = torch.ones_like(x)
    needs = True, False, False, True
    found = backward(dy, None, None, x, None, w, b, mean, var, 1e-3, "relu6", needs)
    z = PATTERN.reference(x.float(), None, w, b, 1e-3, "identity")[0]
    passed = [((0 < v) & (v < 6)).sum((0, 2, 3)) for v in (z.half(), z)]
    assert (found[3] - passed[0]).abs().sum() < (passed[1] - passed[0]).abs().sum() / 2


@runs_kernels
@pytest.mark.parametrize("act", ["relu", "relu6", "hardswish"])
def test_nan_is_passed_on(act):
    x = last(2, 4, 3, 3)
    x[0, 1, 0, 0] = float("nan")
    y, mean, _ = forward(x, None, None, None, 1e-5, act)
    assert y[:, 1].isnan().all() and mean[1].isnan() and not y[:, [0, 2, 3]].isnan().any()


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_launches_for_batches_of_any_size(act):
    """Nothing that the launchers compute fixes the size of the batch."""
    env = ShapeEnv()
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3]
    how = StatelessSymbolicContext(dynamic_sizes=sizes)
    x = FakeTensorMode(shape_env=env).from_tensor(last(3, 8, 6, 5), symbolic_context=how)
    launched = []
    with x.fake_mode, trial(lambda kernel, *rest: launched.append(kernel)):
        w = torch.empty(8, device=DEVICE)
        y, mean, var = forward(x, x if act == "relu" else None, w, w, 1e-5, act)
        masked = y if act == "relu" else None
        needs = (True, act == "relu", True, True)
        backward(y, None, None, x, masked, w, w, mean, var, 1e-5, act, needs)
    assert len(launched) == 6 and isinstance(x.shape[0], torch.SymInt) and not env.guards


# Where it is found


class Block(nn.Module):
    """A block of a residual network, with the in-place code of torchvision."""

    def __init__(self, c=8, act=nn.ReLU, momentum=0.1):
        super().__init__()
        self.first = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.second = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, momentum=momentum) for _ in range(2))
        self.act = act(inplace=True)

    def forward(self, x):
        y = self.act(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return self.act(y)


def images(*shape, dtype=torch.float32):
    return last(*shape, dtype=dtype).requires_grad_()


def trained(model, x, autocast=None):
    """The result, the gradients of x and of all parameters, and the buffers, after two steps."""
    for _ in range(2):
        with torch.autocast(DEVICE, autocast or torch.bfloat16, autocast is not None):
            y = model(x)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
        wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad((y * weight).float().sum(), wanted)
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())]


def check_model(model, x, sites, autocast=None):
    """About as close to fp64 as the model that runs as it is; `sites` of them fused, or sites of
    these names. The interpreter rounds to bf16 by cutting off.
    """
    model = model.to(DEVICE)
    if x.dim() == 4:
        model = model.to(memory_format=LAST)
    plain, reference = copy.deepcopy(model), copy.deepcopy(model).double()
    backend = Kernels({"fusion.gate": "always"})
    got = trained(torch.compile(model, backend=backend, dynamic=False), x, autocast)
    eager = trained(plain, x, autocast)
    want = trained(reference, x.detach().double().requires_grad_())
    for mine, its, right in zip(got, eager, want, strict=True):
        assert mine.dtype == its.dtype and mine.shape == its.shape
        assert distance(mine, right) <= (4 if autocast else 2) * distance(its, right) + 1e-5
    fused = [s.pattern for s in backend.report.fused]
    assert fused == ([NAME] * sites if isinstance(sites, int) else sites), backend.report
    return backend.report


@runs_kernels
@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.ReLU6, nn.Hardswish])
@pytest.mark.parametrize("momentum", [0.1, 0.5, 1])
def test_a_block(act, momentum):
    """All but relu stay behind the sum, whose gradient would need it."""
    check_model(Block(act=act, momentum=momentum), images(2, 8, 6, 6), 2)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_block_in_16_bits(dtype):
    """The running statistics are in 16 bits, too."""
    check_model(Block().to(dtype), images(2, 8, 6, 6, dtype=dtype), 2)


@runs_kernels
def test_autocast():
    """What a convolution gives is in 16 bits, weight, bias and running statistics in fp32."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1), Block())
    check_model(model, images(2, 8, 6, 6), 2, autocast=torch.bfloat16)


@runs_kernels
def test_frozen():
    """Without gradients of weight and bias."""
    block = Block()
    block.norms.requires_grad_(False)
    check_model(block, images(2, 8, 6, 6), 2)


class Twice(nn.Module):
    """One norm for two inputs: the statistics run on in order."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(torch.relu(self.norm(self.conv(x))))))


class Reads(nn.Module):
    """The running statistics are read before and after they are written."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        before = self.norm.running_mean.sum()
        y = torch.relu(self.norm(self.conv(x)))
        return y * before + self.norm.running_mean[:, None, None] - self.norm.running_var.sum()


@runs_kernels
def test_one_norm_twice():
    check_model(Twice(), images(2, 8, 6, 6), 2)


@runs_kernels
def test_statistics_that_are_read():
    check_model(Reads(), images(2, 8, 6, 6), 1)


class Several(nn.Module):
    """Norms of one tensor: their statistics are equal, and each writes to its own."""

    def __init__(self, count=3):
        super().__init__()
        self.conv, self.norms = nn.Conv2d(8, 8, 1), nn.ModuleList(map(nn.BatchNorm2d, count * [8]))

    def forward(self, x):
        h = self.conv(x)
        return sum(torch.relu(norm(h)) for norm in self.norms)


@runs_kernels
def test_norms_of_one_tensor():
    model = Several()
    for i, norm in enumerate(model.norms):
        nn.init.constant_(norm.weight, i + 0.5)
    check_model(model, images(2, 8, 6, 6), 3)


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(4, 4, 1), nn.BatchNorm3d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


@runs_kernels
def test_other_ranks():
    features = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    check_model(features, randn(5, 8).requires_grad_(), 1)
    x = randn(2, 4, 3, 4, 5).to(memory_format=torch.channels_last_3d).requires_grad_()
    check_model(Volumes().to(memory_format=torch.channels_last_3d), x, 1)


@pytest.mark.parametrize("apart", [4, 8])
def test_statistics_that_share_memory(apart):
    """Eager writes to the mean and the variance of one channel after the other; on a GPU it refuses
    statistics that overlap.
    """

    def model(x, w, both):
        return F.batch_norm(torch.sin(x), both[:8], both[apart : apart + 8], w, None, True)

    x, w, both = images(2, 8, 6, 6).cpu(), randn(8).cpu().requires_grad_(), torch.ones(16)
    assert_fuses(model, x, w, both, pattern=NAME, count=0)


@pytest.mark.parametrize("corrected, count", [(0, 1), (1, 0), (None, 0)])
def test_the_variance_of_the_norm(corrected, count):
    """It is divided by the number of terms; torch.var_mean by one less, unless told otherwise."""

    def model(x, w):
        var, mean = torch.var_mean(x, (0, 2, 3), correction=corrected)
        return F.batch_norm(x, None, None, w, None, True) + (var * mean)[:, None, None]

    x, w = images(2, 8, 6, 6), randn(8).requires_grad_()
    assert_fuses(model, x, w, pattern=NAME, count=count)


class Late(nn.Module):
    """What was normalised is written to afterwards."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        h = self.conv(x).detach()
        y = self.norm(h)
        h.mul_(2)
        return torch.relu(y) + h


@runs_kernels
def test_an_argument_that_is_written_to():
    x = images(2, 8, 6, 6)
    model = Late().to(DEVICE).to(memory_format=LAST)
    plain = copy.deepcopy(model)
    got = torch.compile(model, backend=Kernels({"fusion.gate": "always"}))(x)
    assert distance(got.detach(), plain(x).detach()) < 1e-5


def test_where_it_is_not_found():
    """In inference, and without running statistics."""
    x, own = images(2, 8, 6, 6), nn.BatchNorm2d(8, track_running_stats=False)
    assert_fuses(Block().to(DEVICE).eval(), x.detach(), pattern=NAME, count=0)
    assert_fuses(own.to(DEVICE), x, pattern=NAME, count=0)


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(x=randn(3, 8, 6, 5)), "the channels of x are not adjacent in memory"),
        (dict(residual=randn(3, 8, 6, 5)), "the residual does not lie in memory as x does"),
        (dict(residual=last(3, 8, 6, 5, dtype=torch.bfloat16)), "residual is torch.bfloat16"),
        (dict(weight=randn(8).double()), "weight is torch.float64"),
        (dict(x=randn(8, 3).t(), residual=None), "the channels of x are not adjacent in memory"),
    ],
)
def test_what_is_refused(changed, reason):
    given = dict(x=last(3, 8, 6, 5), residual=last(3, 8, 6, 5), weight=randn(8), bias=randn(8))
    assert PATTERN.guard_fn(*given.values(), 1e-5, "relu") is None
    assert reason in PATTERN.guard_fn(*(given | changed).values(), 1e-5, "relu").reason


def test_a_second_use_of_the_norm():
    """The norm is read elsewhere, too: only the norm is fused."""

    class Model(Block):
        def forward(self, x):
            y = self.norms[0](self.first(x))
            return torch.relu(y) + y

    (call,) = fused_nodes(collect(Model().to(DEVICE), images(2, 8, 6, 6)).graphs[0])
    assert str(call.target) == f"fusion.{NAME}.default" and "identity" in call.args


@runs_kernels
def test_gradients_of_the_statistics():
    """A loss of the statistics by hand."""
    x, w = images(3, 8, 6, 5), randn(8)

    def model(x):
        y, mean, var = PATTERN.reference(x, None, w, None, 1e-5, "relu")
        return (y * y).sum() + (mean * var).sum() + (var.sqrt() * w).sum()

    backend = Kernels({"fusion.gate": "always"})
    (got,) = torch.autograd.grad(torch.compile(model, backend=backend)(x), x)
    x64 = x.detach().double().requires_grad_()
    w = w.double()
    (want,) = torch.autograd.grad(model(x64), x64)
    assert [s.pattern for s in backend.report.fused] == [NAME]
    assert distance(got, want) < 1e-5


def check_batches(model, channels, names):
    """One graph for batches of any size."""
    model = model.to(DEVICE).to(memory_format=LAST)
    plain, backend = copy.deepcopy(model), Kernels({"fusion.gate": "always"})
    compiled = torch.compile(model, backend=backend)
    for b in (3, 5, 9):
        x = images(b, channels, 6, 6)
        torch._dynamo.mark_dynamic(x, 0)
        for got, want in zip(trained(compiled, x), trained(plain, x), strict=True):
            assert distance(got, want) < 1e-4
    assert [s.pattern for s in backend.report.fused] == names


@runs_kernels
def test_dynamic_batches():
    check_batches(Block(), 8, [NAME] * 2)
