"""Group norm of channels-last tensors: values, gradients, layouts, and who reads the result."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_backend.kernels.common.launch import trial
from fusion_backend.kernels.norm import group_norm_rows as rows
from fusion_backend.kernels.norm import group_norm_rows_backward as rows_backward
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import collect
from tests.kernel_checks import FLOATS, check, distance, randn, runs_kernels, steps
from tests.selection import product

pytestmark = pytest.mark.usefixtures("poisoned_empties")
LAST = torch.channels_last
# samples, channels, height, width; groups
SHAPES = [
    ((2, 6, 3, 5), 2),
    ((1, 12, 1, 40), 3),
    ((3, 64, 4, 5), 32),
    ((2, 192, 3, 3), 1),
    ((2, 30, 9, 11), 30),
    ((1, 5, 2, 2), 1),
]
# elements of a tile, of a few rows or of more than there are, and programs a multiprocessor, which
# decide how many pieces a sample has
TILES = {"many pieces": (64, 4, 1000), "few pieces": (64, 4, 1), "one tile": (1 << 16, 4, 1000)}


def last(x):
    return x.to(memory_format=LAST)


@pytest.fixture(params=TILES.values(), ids=TILES)
def tiles(request, monkeypatch):
    of = rows.tiles_of
    for module, name in ((rows, "tiles_of"), (rows_backward, "backward_tiles")):
        monkeypatch.setattr(module, name, lambda x: of(x, *request.param))


@runs_kernels
@pytest.mark.usefixtures("tiles")
@product(shape=SHAPES, act=["identity", "silu"], dtype=FLOATS)
def test_values_and_gradients(shape, act, dtype):
    (size, groups), c = shape, shape[0][1]
    x, w, b = last(randn(*size, dtype=dtype) + 1), randn(c, dtype=dtype), randn(c, dtype=dtype)
    assert rows.channels_last(x)
    check("group_norm", x, groups, w, b, 1e-5, act, like=x)


@runs_kernels
@pytest.mark.usefixtures("tiles")
def test_what_is_missing_or_not_wanted():
    x, w, b, dy = last(randn(3, 6, 5, 3)), randn(6), randn(6), randn(3, 6, 5, 3)
    for weight, bias in ((None, b), (w, None), (None, None)):
        check("group_norm", x, 3, weight, bias, 1e-5, "silu", like=x)
    args = x, 2, w, b, *rows.forward(x, 2, w, b, 1e-5, "silu", True)[1:], "silu"
    every = rows_backward.backward(dy, *args, [True] * 3)
    for needs in itertools.product([False, True], repeat=3):
        found = rows_backward.backward(dy, *args, needs)
        for got, want, need in zip(found, every, needs, strict=True):
            assert torch.equal(got, want) if need else got is None


@runs_kernels
@pytest.mark.usefixtures("tiles")
def test_far_from_zero_and_not_finite():
    far = last(randn(2, 64, 24, 24) + 1000)
    found = FUSION_RULES["group_norm"].kernel_fn(far, 4, None, None, 1e-5, "identity", False, None)
    assert distance(found[0], F.group_norm(far.double(), 4)) < 4.5e-5
    assert found[1].numel() == found[2].numel() == 0
    x = last(randn(3, 4, 4, 5))
    x[0, 1, 3], x[1, 2, 1], x[2, :2] = math.nan, math.inf, 0.0
    got = FUSION_RULES["group_norm"].kernel_fn(x, 2, None, None, 1e-5, "identity", False, None)[0]
    torch.testing.assert_close(got, F.group_norm(x, 2), equal_nan=True, check_stride=False)


def test_which_layouts_are_taken():
    def kernels(x):
        launched, found = [], FUSION_RULES["group_norm"]
        args = x, 2, None, None, 1e-5, "identity"
        if isinstance(found.guard_fn(*args), Reject):
            return None
        with trial(lambda kernel, *_: launched.append(kernel)):
            y = found.kernel_fn(*args, False, None)[0]
        assert steps(y) == steps(x)
        return rows.apply_to_rows_kernel in launched

    plain = torch.empty(2, 8, 4, 4, device="meta")
    assert kernels(plain) is False
    assert kernels(last(plain)) is True
    assert kernels(last(torch.empty(2, 8, 1, 1, device="meta"))) is False  # both
    assert kernels(torch.empty(2, 4, 8, device="meta").mT) is True
    volume = torch.empty(2, 8, 2, 2, 2, device="meta").to(memory_format=torch.channels_last_3d)
    assert kernels(volume) is True
    assert kernels(last(plain)[:, :4]) is None
    assert kernels(plain.transpose(2, 3)) is None
    large = torch.empty(1, 4096, 1024, 1024, device="meta")  # groups of 2^20 elements
    args = None, None, 1e-5, "identity"
    guard = FUSION_RULES["group_norm"].guard_fn
    assert (
        guard(large, 4096, *args) is None
        and "a sample of" in guard(last(large), 4096, *args).reason
    )


def test_tiles_leave_no_multiprocessor_without_work():
    """On a GPU of 132 multiprocessors."""
    for shape in ((64, 320, 64, 64), (1, 512, 128, 128), (2, 1280, 16, 16), (8, 3, 512, 512)):
        x = last(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
        for t in (rows.tiles_of(x), rows_backward.backward_tiles(x)):
            assert t.block * t.across >= shape[1] and t.block * t.rows <= 4096
            assert t.pieces * t.length >= shape[2] * shape[3] > (t.pieces - 1) * t.length
            assert shape[0] * t.across * t.pieces >= 132 or t.length == t.rows


def resnet(x, v, w):
    """A block of a diffusion model."""
    y = F.conv2d(F.silu(F.group_norm(x, 4)), v, padding=1)
    return x + F.conv2d(F.dropout(F.silu(F.group_norm(y, 4)), 0.1, False), w, padding=1)


@pytest.fixture
def cuda(monkeypatch):
    """Fakes stand for tensors of a GPU, on which group_norm of a channels-last tensor is
    contiguous before torch 2.15.
    """
    monkeypatch.setattr(rows, "multiprocessors", lambda device: 132)
    with FakeTensorMode(allow_non_fake_inputs=True), trial(lambda *launch: None):
        yield torch.device("cuda")


def taken(fn, *inputs):
    """The rewritten graph, in which group_norm has its kernel."""
    torch.compiler.reset()
    collector = collect(fn, *inputs, options={"fusion.gate": "always"})
    assert {s.forward for s in collector.report.fused} == {"kernel"}, str(collector.report)
    return collector.graphs[0].graph


def copied(graph):
    return any("clone" in str(n.target) for n in graph.nodes)


def test_convolutions_read_the_result_as_it_is(cuda):
    """A convolution whose result lies in memory as before takes its input in any layout, through
    elementwise code too; nothing is copied.
    """
    x, weight = (last(torch.empty(*size, device=cuda)) for size in ((2, 32, 6, 6), (32, 32, 3, 3)))
    graph = taken(resnet, x, weight, weight.clone())
    assert [str(n.target) for n in graph.nodes].count("fusion.group_norm.default") == 2
    assert not copied(graph)


COPIED = {
    "returned": lambda y, w: y,
    "elementwise code that is returned": lambda y, w: y * 2,
    "a convolution whose weight does not decide": lambda y, w: F.conv2d(y, w),
    "a view": lambda y, w: y.view(2, -1).sum(1),
    "a view of elementwise code": lambda y, w: (y + 1).flatten(2).transpose(1, 2).contiguous(),
}
AS_IT_IS = {
    "a convolution": lambda y, w: F.conv2d(y * 2, last(w)),
    "cast": lambda y, w: F.conv2d(y.double(), last(w).double()),
    "both operands": lambda y, w: F.conv2d(w[0, 0, 0, 0] + y * y.sigmoid(), last(w)),
    "made channels-last": lambda y, w: (y * 2).contiguous(memory_format=LAST),
    "written to": lambda y, w: F.conv2d(y.add_(1), last(w)),
}
READERS = [(f, True) for f in COPIED.values()] + [(f, False) for f in AS_IT_IS.values()]


@pytest.mark.parametrize("read, copies", READERS, ids=[*COPIED, *AS_IT_IS])
def test_who_sees_the_layout_gets_a_copy(cuda, read, copies):
    x, w = last(torch.empty(2, 32, 6, 6, device=cuda)), torch.empty(8, 32, 1, 1, device=cuda)
    if not F.group_norm(x, 4).is_contiguous():
        pytest.skip("since torch 2.15 the result is channels-last in eager, too")
    assert copied(taken(lambda x: read(F.group_norm(x, 4), w), x)) is copies
