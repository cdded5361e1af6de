"""Graphs whose images Inductor lays out channels-last: they are decided as such, compute the same,
and return tensors that lie in memory as before. What could tell the difference stays as it is.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.compat.torch import inductor_config
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.options import Options
from fusion_backend.pipeline import fuse_graph
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.rewrite.channels_last import RESULTS_DIFFER, RESULTS_DIFFER_ON_CPU, layout_of
from tests.kernel_checks import distance

pytestmark = pytest.mark.usefixtures("eager_kernels")

LAST = torch.channels_last
CONV, WIDE = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 128, 3, padding=1)
UP = nn.ConvTranspose2d(3, 64, 2, 2)
X = torch.randn(4, 3, 12, 10)


class Block(nn.Module):
    """In-place code, a residual, windows, a view of what is pooled; images are returned, too."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.norm2 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(64, 5)

    def forward(self, x):
        x = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        y += x
        y = F.max_pool2d(self.relu(y), 2)
        return self.head(y.mean((2, 3)).view(len(x), -1)), y


def copied(fn, *inputs, dynamic=None):
    """For each graph of a function: is there a copy of it (True), or none, although Inductor lays
    out its images channels-last (None)?
    """
    found = []

    def backend(gm, example_inputs):
        graph, hidden, work = layout_of(gm)
        assert not (hidden and graph is not None)
        if work is not None:  # Inductor would not; tests/test_image_layout.py is about these
            graph = None
        found.append(None if hidden else graph is not None)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)
    return found


def agrees(fn, x, used=True, grad=True):
    """Results, their strides, memory and flags, what is written to the input, and gradients,
    against eager. `used`: the sites were written into a copy that is channels-last.
    """
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    found = []
    for run in (compiled, fn):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_(grad)
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # which fn may change
            results = run(given)
        results = (results,) if isinstance(results, torch.Tensor) else tuple(results)
        leaves = [given, CONV.weight, WIDE.weight, UP.weight] if grad else [CONV.weight]
        outs = [r for r in results if r.requires_grad and r.is_floating_point()]
        sums = [(r * torch.arange(r.numel()).view(r.shape).cos()).sum() for r in outs]
        gradients = torch.autograd.grad(sums, leaves, allow_unused=True) if outs else ()
        found.append(((*results, given), gradients))
    (got, mine), (want, theirs) = found
    memory = [[a.untyped_storage()._cdata for a in tensors] for tensors in (got, want)]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)
        assert (g.stride(), g.storage_offset()) == (w.stride(), w.storage_offset())
        assert g.requires_grad == w.requires_grad
        for j in range(i):
            assert (memory[0][i] == memory[0][j]) is (memory[1][i] == memory[1][j])
    for g, w in zip(mine, theirs, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-3)
    record = fusion_backend.report().graphs[-1]
    assert not record.faults and not record.error
    assert any(s.fused for s in record.sites)
    assert record.channels_last is used, record.sites


def pooled(x):
    """With a site of max_pool."""
    return F.max_pool2d(x, 2)


# It computes the same


@pytest.mark.parametrize("cast", [False, True])
def test_a_network_is_trained_the_same(cast):
    """Its sites of batch norm are those of channels-last images."""
    torch.manual_seed(0)
    model, want = Block(), Block()
    want.load_state_dict(model.state_dict())
    want = want.double()
    compiled = torch.compile(model, backend="fusion", options={"fusion.gate": "always"})
    torch._dynamo.reset()
    close = 0.2 if cast else 1e-4
    for _ in range(2):
        x = torch.randn(4, 3, 16, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y, image = compiled(x)
        exact, other = want(x.double())
        (y.square().mean() + image.mean()).backward()
        (exact.square().mean() + other.mean()).backward()
        assert image.stride() == other.stride()
        with torch.no_grad():
            for p, q in zip(model.parameters(), want.parameters(), strict=True):
                assert distance(p.grad, q.grad) < close
                assert p.grad.stride() == q.grad.stride()
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
                p.grad = q.grad = None
    record = fusion_backend.report().graphs[-1]
    fused = 3 + cast  # in 16 bits the first convolution, too
    assert record.channels_last and sum(s.fused for s in record.sites if s.counted) == fused
    assert [s.pattern for s in record.sites if s.fused].count("batch_norm_training") == 2
    assert distance(y, exact) < close
    for p, q in zip(model.buffers(), want.buffers(), strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=close, atol=close)


def part_twice_read(y):
    """Of a part of the channels, which is no channels-last image by itself."""
    return pooled(F.conv2d(y, WIDE.weight[:, :32])), y.sum()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: pooled(CONV(x)),
        lambda x: pooled(UP(x)).flatten(1),
        lambda x: (lambda y: y.view(len(y), -1))(pooled(CONV(x))),
        lambda x: (lambda y: y.view((len(y), 64, -1)).sum(-1))(pooled(CONV(x))),
        lambda x: (lambda y: (y, y.sum()))(pooled(CONV(x)).relu_()),
        lambda x: (lambda y: (pooled(y), y.view(torch.int32).sum()))(CONV(x).detach() + CONV(x)),
        lambda x: (x, pooled(CONV(x))),
        lambda x: (x[0], pooled(CONV(x)).chunk(2, 1)[1] + 1),
        lambda x: (x.view(4, -1), pooled(CONV(x))),
        lambda x: pooled(WIDE(CONV(x))),
        lambda x: pooled(WIDE(CONV(x).contiguous())),
        lambda x: pooled(WIDE(F.instance_norm(CONV(x)).relu())),  # which is contiguous
        lambda x: pooled(CONV(CONV(x)[:, :3].contiguous())),
        lambda x: pooled(F.hardtanh(CONV(x), 0.0, 6.0, True)),
        lambda x: part_twice_read(CONV(x)[:, :32]),
        lambda x: pooled(CONV(torch.cat((CONV(x), x), 1)[:, 62:65])),
        lambda x: pooled(WIDE(torch.cat((CONV(x)[:, :32], UP(x)[:, 32:, ::2, ::2]), 1))),
        lambda x: pooled(CONV(x)).permute(0, 2, 3, 1) @ CONV.weight.new_ones(64, 2),
        lambda x: pooled(CONV(x * 2).mul_(2)),
        lambda x: F.adaptive_avg_pool2d(pooled(CONV(x)), 1),
        lambda x: pooled(CONV(x)).roll(1, 2) + 1,
        lambda x: pooled(CONV(x)).index_select(1, torch.arange(32)),
        lambda x: F.group_norm(pooled(CONV(x)).double(), 4).relu(),
    ],
)
def test_results_inputs_and_strides_are_as_before(fn):
    agrees(fn, X)


ON_IMAGES = {
    "roll": lambda y: y.roll(1, 2),
    "index_select": lambda y: y.index_select(1, torch.arange(3, device=y.device)),
    "pixel_shuffle": lambda y: F.pixel_shuffle(y, 2),
    "pixel_unshuffle": lambda y: F.pixel_unshuffle(y, 2),
    "channel_shuffle": lambda y: F.channel_shuffle(y, 4),
    "group_norm": lambda y: F.group_norm(y, 4),
    "instance_norm": lambda y: F.instance_norm(y),
    "batch_norm": lambda y: F.batch_norm(y, None, None, None, None, True),
    "softmax": lambda y: F.softmax(y, 1),
    "max_pool": lambda y: F.max_pool2d(y, 2, 1),
    "avg_pool": lambda y: F.avg_pool2d(y, 2, 1),
    "adaptive_avg_pool": lambda y: F.adaptive_avg_pool2d(y, 2),
    "bilinear": lambda y: F.interpolate(y, scale_factor=2, mode="bilinear"),
    "nearest": lambda y: F.interpolate(y, scale_factor=2),
    "bicubic": lambda y: F.interpolate(y, scale_factor=2, mode="bicubic"),
    "zeros around": lambda y: F.pad(y, (1, 1, 1, 1)),
    "circular": lambda y: F.pad(y, (1, 1, 1, 1), mode="circular"),
    "flip": lambda y: y.flip(1),
    "repeat": lambda y: y.repeat(1, 2, 1, 1),
    "gather": lambda y: y.gather(1, torch.zeros_like(y, dtype=torch.long)),
    "indexed": lambda y: y[:, torch.arange(3, device=y.device)],
    "where": lambda y: torch.where(y > 0, y, 0.0),
    "masked_fill": lambda y: y.masked_fill(y > 0, 0.0),
    "cumsum": lambda y: y.cumsum(1),
    "glu": lambda y: F.glu(y, 1),
    "normalize": lambda y: F.normalize(y, dim=1),
    "prelu": lambda y: F.prelu(y, torch.ones(64, device=y.device)),
    "sums of channels": lambda y: y.sum(1, keepdim=True),
    "product": lambda y: y @ y.transpose(2, 3),
    "loss": lambda y: F.mse_loss(y, y * 2, reduction="none"),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_which_results_are_contiguous_by_fake_kernels_alone(device):
    """The strides of a Dynamo graph come from fake kernels, those of the compiled code from what
    Inductor decomposes an operator into.
    """
    differ = set()
    for name, fn in ON_IMAGES.items():
        with FakeTensorMode():
            x = torch.empty(2, 64, 4, 6, device=device).contiguous(memory_format=LAST)
            traced = make_fx(fn, select_decomp_table())(x).graph.output_node().args[0]
            fake, decomposed = fn(x), traced.meta["val"]
        if fake.is_contiguous() and not decomposed.is_contiguous():
            differ.add(name)
    # of later versions of torch more; operands that need not be contiguous do no harm
    assert differ <= (RESULTS_DIFFER_ON_CPU if device == "cpu" else RESULTS_DIFFER)
    assert device == "cpu" or "pixel_shuffle" in differ


@pytest.mark.parametrize(
    "between", [lambda y: y.roll(1, 2), lambda y: F.group_norm(y, 4)], ids=["roll", "group_norm"]
)
def test_images_that_only_fake_kernels_make_contiguous_are_not_laid_out(between):
    """The network is channels-last already, and Dynamo's strides of its second convolution, whose
    image it takes for contiguous, are not those of the result. Some versions of torch tell the
    right ones of group norm.
    """
    x = X.contiguous(memory_format=LAST)

    def fn(x):
        return pooled(WIDE(between(CONV(x))))

    assert copied(fn, x) in ([None], [False])


def test_an_image_that_is_written_to():
    agrees(lambda x: pooled(CONV(x.mul_(2))), X, grad=False)


def test_the_report_says_so():
    agrees(lambda x: pooled(CONV(x)), X)
    told = "images channels-last, as Inductor lays them out for the convolutions\n  graph"
    assert told in fusion_backend.report().text()


# What stays as it is


def nudged(x):
    """Writes to an image through another view of it, which in channels-last would be a copy."""
    y = CONV(x)
    y.view(len(y), -1).mul_(2)
    return pooled(y)


def nudged_later(x):
    y = CONV(x)
    flat = y.flatten(1)
    y.mul_(2)
    return pooled(y), flat.sum()


def unnamed(x):
    """Writes to a view by a name that does not say so."""
    y = CONV(x)
    torch.ops.aten.mul_.Tensor(y.view(len(y), -1), 2)
    return pooled(y)


def by_position(x):
    y = CONV(x) * 1
    flat = y.flatten(1)
    F.elu(y, 1.0, True)
    return pooled(y), flat.sum()


def data_of_it(x):
    """Writes to an image by a name that autograd does not count."""
    y = CONV(x)
    flat = y.flatten(1)
    y.data.mul_(2)
    return pooled(y), flat.sum()


def two_names(x):
    """Returns an image and a view of it."""
    y = pooled(CONV(x))
    return y, y.view(len(y), -1)


def views(y):
    """Two names for the memory of an image that is not returned itself."""
    return y.flatten(1), y.view(len(y), -1)


def permuted(x):
    return pooled(CONV(x)).permute(0, 2, 3, 1)


def strided(x):
    y = CONV(x)
    return pooled(y), torch.as_strided(y, (4, 7), (7680, 1)).sum()


@torch.library.custom_op("test_channels_last::of_strides", mutates_args=())
def of_strides(x: torch.Tensor) -> torch.Tensor:
    return x.new_full((), x.stride(1))


@of_strides.register_fake
def _(x):
    return x.new_empty(())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy


def joined(x):
    """Returns a copy that in channels-last would be a view, and what is computed from the image."""
    y = pooled(CONV(x))
    return y.permute(0, 2, 3, 1).contiguous(), (y * y).sum()


def without_gradients(x):
    """A function in an enclosing region without gradients returns an image."""
    y = pooled(CONV(x))
    torch.set_grad_enabled(False)
    return y, y * 2


def half_cast(x):
    """What may depend on the layout is in a region of autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        z = torch.as_strided(x * 2, (4,), (1,)).sum()
    return pooled(CONV(x)), z


def of_each(x):
    return pooled(torch.vmap(lambda t: F.conv2d(t, CONV.weight))(x[None])[0])


def twice_read(x):
    """An image in the middle of a network that is contiguous, and that something else reads, too:
    a copy would be one more, not another layout of the image.
    """
    y = F.instance_norm(CONV(x))
    return pooled(WIDE(y)).sum() + pooled(y).sum()


def wide_cast(x):
    """An image of many channels is found in a region of autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        y = WIDE(x.repeat(1, 22, 1, 1)[:, :64].relu())
    return pooled(y.float() * 0)


STAY = {
    "an image that is written to by another name": nudged,
    "a view that is read after its image was written to": nudged_later,
    "an image that is returned by two names": two_names,
    "views that would be copies": lambda x: views(pooled(CONV(x))),
    "a result that is permuted": permuted,
    "a write that no name tells": unnamed,
    "a write that autograd does not count": data_of_it,
    "a write by an argument without a name": by_position,
    "a copy that would be a view": joined,
    "results without gradients": without_gradients,
    "code with strides under autocast": half_cast,
    "an image that others read, too, and that is contiguous": twice_read,
    "many channels under autocast": wide_cast,
    "a vmap": of_each,
    "a product with contiguous ones": lambda x: torch.ones(4, 64, 6, 5) * pooled(CONV(x)) + 0,
    "a part of a sum with zeros": lambda x: (torch.zeros(4, 64, 6, 5) + pooled(CONV(x)))[:, :8],
    "edges that are repeated": lambda x: F.pad(pooled(CONV(x)), (1, 2, 1, 1), mode="replicate"),
    "code with strides": strided,
    "an operator of the user's": lambda x: (pooled(CONV(x)), of_strides(CONV(x).detach())),
    "a function with a gradient of its own": lambda x: pooled(Twice.apply(CONV(x))),
    "a checkpoint": lambda x: pooled(checkpoint(lambda y: CONV(y).relu(), x, use_reentrant=False)),
}


OTHER = {"a checkpoint": False}  # whose convolution is in a body


@pytest.mark.parametrize("name", STAY)
def test_what_could_tell_the_difference_stays(name):
    grad = torch.is_grad_enabled()
    try:
        assert copied(STAY[name], X) == [OTHER.get(name)]
        nested = torch.autocast_decrement_nesting()
        torch.autocast_increment_nesting()
        assert nested == -1  # what was entered has been left
    finally:
        torch.set_grad_enabled(grad)


def test_in_the_middle_of_a_network_and_in_inference():
    """There is a copy of neither, but it is known how the images will lie."""
    x = torch.randn(4, 64, 12, 10)
    for fn in (lambda x: pooled(WIDE(x)), lambda x: pooled(WIDE(x.relu())) + 1):
        assert copied(fn, x) == [None]
        agrees(fn, x, used=False)
    norm = nn.BatchNorm2d(64).eval()
    with torch.no_grad():
        assert copied(lambda x: norm(CONV(x)), X) == [None]
        agrees(lambda x: norm(CONV(x)), X, used=False)


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (lambda x: pooled(x), X),
        (lambda x: F.max_pool1d(F.conv1d(x, CONV.weight[..., 0]), 2), X[..., 0]),
        (lambda x: pooled(CONV(x)), X.to(memory_format=LAST)),
        (lambda x: pooled(F.conv2d(x, CONV.weight[:, :1])), X[:, :1].contiguous()),
    ],
    ids=["no convolution", "of signals", "channels-last", "of one channel"],
)
def test_nothing_to_lay_out(fn, x):
    assert copied(fn, x) == [False]


def test_where_inductor_does_not():
    fn = lambda x: pooled(CONV(x))  # noqa: E731
    assert copied(fn, X) == [True]
    assert copied(fn, X, dynamic=True) == [False]
    with inductor_config.patch(layout_optimization=False):
        assert copied(fn, X) == [False]
        agrees(fn, X, used=False)
    many = lambda x: [x := x + i for i in range(60)] and pooled(CONV(x))  # noqa: E731
    assert copied(many, X) == [False]


@pytest.mark.parametrize("cast", [False, True])
def test_inductor_is_asked_about_the_convolutions(cast, monkeypatch):
    """On a GPU not all graphs are laid out so: of those that are trained none whose convolutions
    all have few channels.
    """
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)

    def fn(x, *convolutions):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return pooled(nn.Sequential(*convolutions)(x.relu()))

    assert copied(lambda x: fn(x, CONV), X) == [False]
    assert copied(lambda x: fn(x, CONV, WIDE), X) == [True]
    with torch.no_grad():
        assert copied(lambda x: fn(x, CONV), X) == [None]


def test_a_result_of_dynamic_size_beside_static_images():
    index = torch.arange(3)
    torch._dynamo.mark_dynamic(index, 0)
    assert copied(lambda x, index: pooled(CONV(x))[index], X, index) == [True]


def test_random_numbers_of_eager_code_stay():
    fn = lambda x: pooled(F.dropout(CONV(x), 0.5))  # noqa: E731
    assert copied(fn, X) == [True]
    with inductor_config.patch(fallback_random=True):
        assert copied(fn, X) == [None]


def test_a_convolution_of_an_image_lays_out_its_result():
    """The operator reads the image itself and returns its result channels-last, without a copy of
    either.
    """
    conv = nn.Conv2d(3, 64, 3, padding=1).bfloat16()
    for x in (X.bfloat16(), X.bfloat16().to(memory_format=LAST)):
        for fn in (conv, lambda x: conv(x.contiguous(memory_format=LAST))):
            record, graphs = GraphRecord(0), []

            def backend(gm, example_inputs, record=record, graphs=graphs):
                new, _ = fuse_graph(gm, Options(gate="always"), record, usable(patterns()))
                graphs.append([str(n.target) for n in new.graph.nodes])
                return new.forward

            torch._dynamo.reset()
            torch.compile(lambda x, fn=fn: pooled(fn(x).float()), backend=backend)(x)
            (names,) = graphs
            at = names.index("fusion.image_convolution.default")
            assert names[at + 1 : at + 3] == ["float", "fusion.max_pool.default"]
            assert "clone" not in str(names[:at])


# Around it


def test_nothing_accepted_leaves_the_graph_itself():
    def backend(gm, example_inputs):
        record = GraphRecord(0)
        new, _ = fuse_graph(gm, Options(), record, usable(patterns()))
        seen.append((new is gm, record.channels_last))
        return gm.forward

    seen: list = []
    torch._dynamo.reset()
    torch.compile(lambda x: CONV(x).relu(), backend=backend)(X)
    assert seen == [(True, False)]


def test_the_graph_and_its_values_are_not_changed():
    def text(gm):
        values = [(n.name, n.meta["example_value"].stride()) for n in gm.graph.nodes
                  if isinstance(n.meta.get("example_value"), torch.Tensor)]  # fmt: skip
        return str(gm.graph), values

    def backend(gm, example_inputs):
        before = text(gm)
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        assert layout_of(gm).graph is not None
        assert text(gm) == before
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == state
        return gm.forward

    torch._dynamo.reset()
    model = Block()

    def fn(x):
        with torch.no_grad(), torch.autocast("cpu"):
            y = CONV(x)
        return model(x), y

    torch.compile(fn, backend=backend)(X)
