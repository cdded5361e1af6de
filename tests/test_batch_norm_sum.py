"""batch_norm_sum: its kernels against fp64, and the models in which it is found."""

import copy
import operator

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

from fusion_backend import remembered
from fusion_backend.capture import norms_of_sums
from fusion_backend.compat.torch import pytree
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm.batch_norm import Columns
from fusion_backend.kernels.norm.batch_norm_sum import backward, forward
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.options import Options
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.testing import assert_fuses, collect
from tests.kernel_checks import DEVICE, FLOATS, Kernels, check, distance, randn, runs_kernels
from tests.selection import product
from tests.test_batch_norm_training import LAST, check_batches, check_model, images, last

pytestmark = pytest.mark.usefixtures("poisoned_empties", "scalar_code")
NAME, SINGLE = "batch_norm_sum", "batch_norm_training"
PATTERN = FUSION_RULES[NAME]
ALL = "x", "z", "weight", "bias", "z_weight", "z_bias"


def vectors(c, dtype=torch.float32):
    return [randn(c, dtype=dtype) for _ in range(4)]


# The kernels


@runs_kernels
@product(
    shape=[(2, 3, 1, 5), (3, 6, 5, 5), (1, 130, 7, 1), (4, 64, 9, 8), (2, 300, 3, 2)],
    dtype=FLOATS, act=["identity", "relu"],
)  # fmt: skip
def test_shapes_and_dtypes(shape, dtype, act):
    x, z = last(*shape, dtype=dtype), last(*shape, dtype=dtype)
    check(NAME, x, z, *vectors(shape[1], dtype), 1e-3, 1e-2, act)


@runs_kernels
@pytest.mark.parametrize("needs", [[name] for name in ALL] + [["x", "z_bias"]])
@pytest.mark.parametrize("act", ["identity", "relu"])
def test_only_what_is_needed(needs, act):
    x, z = last(3, 20, 6, 5), last(3, 20, 6, 5)
    check(NAME, x, z, *vectors(20), 1e-3, 1e-3, act, needs=needs)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_in_fp32(dtype):
    """As autocast leaves them."""
    x, z = last(4, 20, 6, 5, dtype=dtype), last(4, 20, 6, 5, dtype=dtype)
    check(NAME, x, z, *vectors(20), 1e-3, 1e-3, "relu")


@runs_kernels
def test_other_ranks():
    check(NAME, randn(70, 20), randn(70, 20), *vectors(20), 1e-3, 1e-3, "relu")
    x, z = (randn(2, 4, 3, 4, 5).to(memory_format=torch.channels_last_3d) for _ in range(2))
    check(NAME, x, z, *vectors(4), 1e-3, 1e-3, "relu")


@runs_kernels
@pytest.mark.parametrize("rows, pieces", [(1, 1), (4, 3), (8, 2), (2, 60), (16, 7)])
def test_pieces(rows, pieces):
    """Pieces of unequal length, some with one tile or none, and a last tile that is not full; and
    gradients of all results.
    """
    columns, given = Columns(64, rows, 2, pieces, 4), vectors(70)
    x, z, dy = (last(3, 70, 6, 5) for _ in range(3))
    y, *moments = forward(x, z, *given, 1e-3, 1e-2, "relu", columns)
    x64, z64 = (t.double().requires_grad_() for t in (x, z))
    want = PATTERN.reference(x64, z64, *(v.double() for v in given), 1e-3, 1e-2, "relu")
    for got, exact in zip((y, *moments), want, strict=True):
        assert distance(got, exact.detach()) < 1e-6
    dmoments = vectors(70)
    found = backward(
        dy, tuple(dmoments), x, z, y, *given, tuple(moments), 1e-3, 1e-2,
        (True, True, False, False, False, False), columns,
    )  # fmt: skip
    tangents = [dy.double(), *(d.double() for d in dmoments)]
    for got, exact in zip(found[:2], torch.autograd.grad(want, [x64, z64], tangents), strict=True):
        assert distance(got, exact) < 1e-5
    assert found[2:] == (None,) * 4


def test_launches_for_batches_of_any_size():
    """Nothing that the launchers compute fixes the size of the batch."""
    env = ShapeEnv()
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3]
    how = StatelessSymbolicContext(dynamic_sizes=sizes)
    x = FakeTensorMode(shape_env=env).from_tensor(last(3, 8, 6, 5), symbolic_context=how)
    launched = []
    with x.fake_mode, trial(lambda kernel, *rest: launched.append(kernel)):
        given = [torch.empty(8, device=DEVICE)] * 4
        y, *moments = forward(x, x, *given, 1e-5, 1e-5, "relu")
        none, needs = (None,) * 4, (True,) * 6
        backward(y, none, x, x, y, *given, tuple(moments), 1e-5, 1e-5, needs)
    assert len(launched) == 9 and isinstance(x.shape[0], torch.SymInt) and not env.guards


# Where it is found


class Block(nn.Module):
    """The first block of a stage, with a projection beside it. late: it is computed at the end, as
    in torchvision; add: how the two are added up.
    """

    def __init__(self, late=True, add=operator.iadd, same=False):
        super().__init__()
        self.late, self.add = late, add
        self.first = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.project = nn.Conv2d(6, 8, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, eps=10.0**-i) for i in (3, 4, 5))
        if same:
            self.norms[2] = self.norms[1]

    def inner(self, x):
        return self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))

    def outer(self, x):
        return self.norms[2](self.project(x))

    def forward(self, x):
        y = self.inner(x) if self.late else self.outer(x)
        return torch.relu(self.add(y, self.outer(x) if self.late else self.inner(x)))


@runs_kernels
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("add", [operator.iadd, operator.add, torch.add, lambda y, z: y.add(z)])
def test_a_block(late, add):
    check_model(Block(late, add), images(2, 6, 6, 6), [NAME, SINGLE])


@runs_kernels
def test_autocast():
    """What a convolution gives is in 16 bits, weight, bias and running statistics in fp32."""
    check_model(Block(), images(2, 6, 6, 6), [NAME, SINGLE], autocast=torch.float16)


@runs_kernels
def test_frozen():
    """Without gradients of weights and biases."""
    block = Block()
    block.norms.requires_grad_(False)
    check_model(block, images(2, 6, 6, 6), [NAME, SINGLE])


@runs_kernels
@pytest.mark.parametrize("trained", [1, 2])
def test_one_bias_alone_is_trained(trained):
    """The gradients of both biases are computed as one."""
    block = Block()
    block.norms.requires_grad_(False)
    block.norms[trained].bias.requires_grad_(True)
    check_model(block, images(2, 6, 6, 6), [NAME, SINGLE])


@runs_kernels
def test_one_norm_for_both():
    """It writes its running statistics twice, in the order of the code."""
    check_model(Block(same=True), images(2, 6, 6, 6), [SINGLE] * 3)


class Between(Block):
    """A line of code between the two norms."""

    def __init__(self, line):
        super().__init__()
        self.line = line

    def forward(self, x):
        h = self.second(torch.relu(self.norms[0](self.first(x))))
        y = self.norms[1](h)
        other = self.line(self, h, x, y)
        return torch.relu(y + self.outer(x)) * (1.0 if other is None else other)


def overwrite(model, h, x, y):
    h.mul_(1)


def another_region(model, h, x, y):
    with torch.no_grad():
        return x.mean()


@torch.library.custom_op("norms_of_sums_test::bump", mutates_args=["x"])
def bump(x: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    return x.sum()


@bump.register_fake
def _(x):
    return x.sum()


LINES = {
    "reads": lambda model, h, x, y: model.norms[1].running_mean.sum(),
    "writes": lambda model, h, x, y: model.norms[1].running_var.mul_(2).sum(),
    "overwrites": overwrite,
    "overwrites, in a module": lambda model, h, x, y: nn.ReLU6(inplace=True)(h).mean(),
    "overwrites, by an operator": lambda model, h, x, y: torch.ops.aten.mul_.Tensor(h, 3.0).mean(),
    "overwrites, by a custom operator": lambda model, h, x, y: bump(h.detach()),
    "overwrites its bias": lambda model, h, x, y: model.norms[1].bias.detach().add_(3.0).sum(),
    "reads the norm": lambda model, h, x, y: y.abs().mean(),
    "grad mode": another_region,
}


@pytest.mark.parametrize("name", LINES)
def test_code_between_that_could_tell(name):
    """The norm stays where it is. Without gradients eager refuses no write."""
    model = Between(LINES[name]).to(DEVICE).to(memory_format=LAST)
    x, plain = images(2, 6, 6, 6).detach(), copy.deepcopy(model)
    with torch.set_grad_enabled(name == "grad mode"):
        assert_fuses(model, x, pattern=NAME, count=0)
        compiled = torch.compile(copy.deepcopy(model), backend=Kernels({"fusion.gate": "always"}))
        assert distance(compiled(x).detach(), plain(x).detach()) < 1e-5
    for got, want in zip(compiled._orig_mod.buffers(), plain.buffers(), strict=True):
        assert distance(got, want) < 1e-5


@runs_kernels
def test_code_between_that_cannot_tell():
    """It writes to other memory, and reads other statistics."""

    def line(model, h, x, y):
        model.norms[2].running_mean.mul_(0.5)
        return model.norms[0].running_var.sum()

    check_model(Between(line), images(2, 6, 6, 6), [NAME, SINGLE])


@pytest.mark.parametrize(
    "end",
    [
        lambda y, z: torch.relu(y - z),
        lambda y, z: torch.relu(torch.add(y, z, alpha=2)),
        lambda y, z: torch.relu(y) + z,
        lambda y, z: torch.relu(y + z) + y,
    ],
)
def test_near_misses(end):
    class Model(Block):
        def forward(self, x):
            return end(self.inner(x), self.outer(x))

    model = Model().to(DEVICE).to(memory_format=LAST)
    assert_fuses(model, images(2, 6, 6, 6), pattern=NAME, count=0)


def test_where_it_is_not_found():
    """In inference. In training it is, also without gradients."""
    model = Block().to(DEVICE).to(memory_format=LAST)
    x = images(2, 6, 6, 6)
    assert_fuses(model.eval(), x.detach(), pattern=NAME, count=0)
    with torch.no_grad():
        assert_fuses(model.train(), x.detach(), pattern=NAME, count=1)


class Replaced(Block):
    """A tensor gets other memory afterwards: what shared it can no longer be told."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        view = self.norms[1].running_mean[:]
        y = self.inner(x)
        read = view.sum()
        out = torch.relu(y + self.outer(x)) * read
        if self.how == "data":
            self.norms[1].running_mean.data = torch.ones(8, device=x.device)
        else:
            self.norms[1].running_mean.set_(torch.ones(8, device=x.device))
        return out


@pytest.mark.parametrize("how", ["data", "set_"])
def test_memory_that_is_replaced(how):
    model = Replaced(how).to(DEVICE).to(memory_format=LAST)
    report = collect(model, images(2, 6, 6, 6)).report
    assert NAME not in [s.pattern for s in report.fused], report


class Three(nn.Module):
    """Another norm stands between those of the sum."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(6, 8, 1, bias=False) for _ in range(3))
        norms = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8, eps=10.0, momentum=0.9)
        self.norms = nn.ModuleList(norms)

    def forward(self, x):
        a, b, c = (conv(x) for conv in self.convs)
        y = F.batch_norm(a, *self.given(0))
        other = F.batch_norm(c, *self.given(2))
        return torch.relu(y + F.batch_norm(b, *self.given(1))), other

    def given(self, i):
        n = self.norms[i]
        vectors = n.running_mean, n.running_var, n.weight, n.bias
        return *vectors, True, n.momentum, n.eps


@pytest.mark.parametrize("model", [Three, Block])
def test_a_remembered_graph(model, monkeypatch, tmp_path):
    """It is written as the first one, though Dynamo's graph has its own order."""
    monkeypatch.setattr(remembered, "USED", True)
    monkeypatch.setattr(remembered, "cache_folder", lambda: str(tmp_path))
    model, x = model().to(DEVICE).to(memory_format=LAST), images(2, 6, 6, 6)
    options, plain = Options(gate="always", skip=(SINGLE,)), copy.deepcopy(model)
    want = pytree.tree_leaves(plain(x))
    for recalled in (False, True):
        record = GraphRecord(0)

        def backend(gm, inputs, record=record):
            return remembered.fuse(gm, options, record, patterns(), usable)[0].forward

        torch._dynamo.reset()
        mine = copy.deepcopy(model)
        got = pytree.tree_leaves(torch.compile(mine, backend=backend)(x))
        assert record.remembered == recalled
        assert [s.pattern for s in record.sites if s.fused] == [NAME]
        for a, b in zip([*got, *mine.buffers()], [*want, *plain.buffers()], strict=True):
            assert distance(a.detach(), b.detach()) < 1e-5


def test_an_error_while_norms_are_moved(monkeypatch):
    """The order is restored all the same."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            return self.blocks[0](x) + self.blocks[1](x)

    def backend(gm, inputs):
        before, asked = [n.name for n in gm.graph.nodes], []

        def once(norm, second):
            asked.append(norm)
            if len(asked) > 1:
                raise RuntimeError("planted")
            return True

        monkeypatch.setattr(norms_of_sums, "may_move", once)
        with pytest.raises(RuntimeError, match="planted"), norms_of_sums.norms_together(gm):
            pass
        assert [n.name for n in gm.graph.nodes] == before and len(asked) == 2
        return gm.forward

    torch.compile(Twice().to(DEVICE), backend=backend)(images(2, 6, 6, 6))


@pytest.mark.parametrize("accepted", [False, True])
def test_the_graph_keeps_its_order(accepted):
    """Dynamo's graph is as it was, whether or not a copy of it was written."""
    orders = []

    def backend(gm, inputs):
        before = [n.name for n in gm.graph.nodes]
        kernels = Kernels({"fusion.gate": "always" if accepted else "never"})
        compiled = kernels(gm, inputs)
        orders.append((before, [n.name for n in gm.graph.nodes]))
        return compiled

    model = Block().to(DEVICE).to(memory_format=LAST)
    torch.compile(model, backend=backend)(images(2, 6, 6, 6))
    ((before, after),) = orders
    assert before == after


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(x=randn(3, 8, 6, 5)), "the channels of x are not adjacent in memory"),
        (dict(z=randn(3, 8, 6, 5)), "z does not lie in memory as x does"),
        (dict(z=last(3, 8, 6, 5, dtype=torch.bfloat16)), "z is torch.bfloat16"),
        (dict(z_weight=randn(8).double()), "z_weight is torch.float64"),
        (dict(z_bias=randn(8).bfloat16()), "z_bias is torch.bfloat16"),
        (dict(z_bias=randn(16)[::2]), "z_bias"),
    ],
)
def test_what_is_refused(changed, reason):
    given = dict(x=last(3, 8, 6, 5), z=last(3, 8, 6, 5)) | dict(
        zip(ALL[2:], vectors(8), strict=True)
    )
    assert PATTERN.guard_fn(*given.values(), 1e-5, 1e-5, "relu") is None
    assert reason in PATTERN.guard_fn(*(given | changed).values(), 1e-5, 1e-5, "relu").reason


@runs_kernels
def test_dynamic_batches():
    check_batches(Block(), 6, [NAME, SINGLE])
