"""Under DistributedDataParallel a graph is cut in front of layers, so that all sites of the whole
graph are found in its parts.
"""

import functools
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusion_backend
from benchmarks.subjects.model_zoo import ENTRIES, build
from fusion_backend import remembered
from fusion_backend.capture.bucket_cuts import best_place, first_nodes
from fusion_backend.frontends import dynamo

from ..eager_kernels import eager_kernels
from ..selection import product

WIDTH, BLOCKS = 128, 3


pytestmark = pytest.mark.usefixtures("alone")


class Block(nn.Module):
    """A weight of the feed-forward part is 0.5 MB: a bucket of 1 MB ends within it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 8 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.first(x)
        q, k, v = (p(y).unflatten(-1, (-1, 32)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Flattened(nn.Module):
    """A layer that flattens its input to rows, as GPT-2's do."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(WIDTH, 8 * WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(8 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.above, self.below = (
            nn.Parameter(torch.randn(8 * WIDTH)),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x):
        y = self.norm(x)
        y = torch.addmm(self.above, y.view(-1, WIDTH), self.up).view(*x.shape[:-1], -1)
        y = F.gelu(y)
        return x + torch.addmm(self.below, y.view(-1, 8 * WIDTH), self.down).view(x.shape)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 2500)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(block):
    torch.manual_seed(0)
    return Model(block)


def trained(call, model, width=WIDTH, rows=16):
    """The result of a call, and its gradients."""
    x = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    out = call(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def compiled(model, **options):
    """What a call computes, the fused sites, and the sizes of the parts."""
    torch._dynamo.reset()
    fusion_backend.reset()
    options = {"fusion.gate": "always", "fusion.skip": ["norm_linear"]} | options
    call = torch.compile(model, backend="fusion", options=options)
    with eager_kernels():
        values = trained(call, model)
    report = fusion_backend.report()
    assert not any(g.error or g.faults for g in report.graphs)
    found = Counter(s.pattern for s in report.sites if s.fused)
    return values, found, [g.nodes for g in report.graphs]


def parts_of_dynamo(model, width=WIDTH):
    """The sizes of the parts as Dynamo cuts them for another backend."""
    torch._dynamo.reset()
    sizes = []

    def backend(gm, inputs):
        sizes.append(len(gm.graph.nodes))
        return gm

    trained(torch.compile(model, backend=backend), model, width)
    return sizes


def spread(model):
    return DistributedDataParallel(model, bucket_cap_mb=1)


@pytest.mark.parametrize("block", [Block, Flattened])
def test_the_sites_of_the_whole_graph_are_found_in_its_parts(block):
    model = model_of(block)
    _, whole, _ = compiled(model)
    values, found, parts = compiled(spread(model))
    assert found == whole
    assert found["gated_mlp" if block is Block else "mlp"] == BLOCKS
    assert len(parts) > BLOCKS  # one for each, and one for the layer at the end
    for have, want in zip(values, trained(model, model), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "t5"))]
)
def test_models_of_transformers(name, monkeypatch):
    """With buckets of a twelfth of the parameters."""
    pytest.importorskip("transformers")
    subject = build(name, "train", ENTRIES[name].tiny, "sdpa", torch.device("cpu"), torch.float32)
    size = sum(p.nbytes for p in subject.model.parameters())

    def small(gm, *_):
        return first_nodes(gm, size // 12, size // 100)

    def trained(model):
        torch._dynamo.reset()
        fusion_backend.reset()
        options = {"fusion.gate": "always", "fusion.skip": ["norm_linear"]}
        call = torch.compile(model, backend="fusion", options=options)
        with eager_kernels():
            call(**subject.kwargs).loss.backward()
        report = fusion_backend.report()
        return Counter(s.pattern for s in report.sites if s.fused), len(report.graphs)

    whole, _ = trained(subject.model)
    monkeypatch.setattr(dynamo, "first_nodes", small)
    found, parts = trained(DistributedDataParallel(subject.model))
    assert found == whole and parts > 5


def test_calls_of_methods_stay_calls_of_methods(monkeypatch):
    """Dynamo is shown the first node of a part as a call of a function."""
    fuse, called = remembered.fuse, Counter()

    def noted(gm, *others):
        called.update((n.op, n.target) for n in gm.graph.nodes if "view" in str(n.target))
        return fuse(gm, *others)

    monkeypatch.setattr(remembered, "fuse", noted)
    compiled(spread(model_of(Flattened)))
    assert called == {("call_method", "view"): 4 * BLOCKS}


def test_other_backends_are_given_the_parts_that_dynamo_cuts():
    model = model_of(Block)
    with mock.patch.object(dynamo, "first_nodes") as asked:
        wanted = parts_of_dynamo(spread(model))
    assert not asked.called
    _, found, parts = compiled(spread(model), **{"fusion.gate": "never"})
    assert parts == wanted and not found
    with fusion_backend.disable(), mock.patch.object(dynamo, "first_nodes") as asked:
        torch._dynamo.reset()
        with eager_kernels():
            trained(torch.compile(spread(model), backend="fusion"), model)
    assert not asked.called
    assert compiled(spread(model))[2] != wanted


def test_a_fault_leaves_the_parts_to_dynamo():
    model = model_of(Block)
    wanted = parts_of_dynamo(spread(model))
    told = pytest.warns(RuntimeWarning, match="cut where Dynamo cuts it: ValueError: lost")
    with mock.patch.object(dynamo, "first_nodes", side_effect=ValueError("lost")), told:
        values, _, parts = compiled(spread(model))
    assert parts == wanted
    for have, want in zip(values, trained(model, model), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_a_backend_with_its_options_bound(monkeypatch):
    backend = functools.partial(dynamo.fusion, options={"fusion.gate": "always"})
    asked = mock.Mock(return_value=None)
    monkeypatch.setattr(dynamo, "first_nodes", asked)
    torch._dynamo.reset()
    model = model_of(Block)
    with eager_kernels():
        trained(torch.compile(spread(model), backend=backend), model)
    assert asked.called
    asked.reset_mock()
    backend.keywords["options"]["fusion.gate"] = "never"
    torch._dynamo.reset()
    with eager_kernels():
        trained(torch.compile(spread(model), backend=backend), model)
    assert not asked.called


def weights_of_methods(layer, x):
    return torch.mm(x.flatten(0, 1), layer.weight.t()).view(x.shape)


def cast_weights(layer, x):
    return F.linear(x.bfloat16(), layer.weight.to(torch.bfloat16)).float()


def under_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x).float()


def in_place(layer, x):
    return layer(x).add_(1.0).mul_(0.5)


def checkpointed(layer, x):
    return checkpoint(lambda x: F.gelu(layer(x)), x, use_reentrant=False)


def weightless(layer, x):
    for _ in range(4):
        x = x * layer.weight[0] + layer.weight[1]
    return x


class Layers(nn.Module):
    """Residual layers, computed as `way` says; the first and the last share their weight."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(5)])
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(self.way(layer, x))
        return x


WAYS = [
    weightless, weights_of_methods, cast_weights, under_autocast, in_place, checkpointed,
]  # fmt: skip


@product(strength=1, way=WAYS, dynamic=[False, True])
def test_any_way_to_read_weights_is_cut_and_agrees(way, dynamic):
    torch.manual_seed(0)
    model = Layers(way)
    parts = parts_of_dynamo(spread(model), width=512)
    torch._dynamo.reset()
    fusion_backend.reset()
    options = {"fusion.gate": "always"}
    call = torch.compile(spread(model), backend="fusion", options=options, dynamic=dynamic)
    for rows in (16, 24):
        with eager_kernels():
            have = trained(call, model, 512, rows)
        want = trained(model, model, 512, rows)
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)
    found = [g.nodes for g in fusion_backend.report().graphs]
    assert len(parts) >= 3 and len(found) >= len(parts) - 1


def test_parameters_inside_the_graph_are_left_to_dynamo():
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=False):
        gm = graph_of(model_of(Block), torch.randn(2, 16, WIDTH))
    if any(n.op == "call_module" for n in gm.graph.nodes):  # not in torch 2.15
        assert first_nodes(gm, MEGABYTE, 1) is None
    # one weight is an input, and the other is not
    gm = graph_of(Layers(weights_of_methods), torch.randn(2, 16, 512))
    assert first_nodes(gm, MEGABYTE, 1)
    gm.weight = nn.Parameter(torch.randn(512, 512))
    last = next(n for n in reversed(gm.graph.nodes) if n.target == "t")
    with gm.graph.inserting_before(last):
        last.args = (gm.graph.get_attr("weight"),)
    assert first_nodes(gm, MEGABYTE, 1) is None


MEGABYTE = 1 << 20


def graph_of(model, *inputs, dynamic=None) -> fx.GraphModule:
    """Dynamo's graph of it."""
    torch._dynamo.reset()
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)
    (gm,) = graphs
    return gm


def weights_of(gm: fx.GraphModule, bucket: int, first: int = 1) -> list[str]:
    """The weights that the first layers of the parts read."""
    starts = first_nodes(gm, bucket, first)
    read = [n for n in gm.graph.nodes if n in starts]
    for i, n in enumerate(read):
        while not any("weight" in m.name for m in n.all_input_nodes):
            (n,) = n.users
        read[i] = n
    names = [next(m.name for m in n.all_input_nodes if "weight" in m.name) for n in read]
    return [name.replace("parameters_weight_", "").replace("modules_", "") for name in names]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_part_begins_with_the_first_layer_of_a_block(dynamic):
    gm = graph_of(model_of(Block), torch.randn(2, 16, WIDTH), dynamic=dynamic)
    kinds = [name.split("_")[-2] for name in weights_of(gm, MEGABYTE)]
    assert kinds[-1] == "head" and set(kinds[:-1]) <= {"q", "o", "gate"} and len(kinds) >= BLOCKS


@pytest.mark.parametrize(
    "near, place",
    [
        ([5, 4, 3, 1], 3),  # the nearest of the two that few bytes pass
        ([5, 4], 4),  # the best of those in reach
        ([5], 5),
        ([], 7),
    ],
)
def test_the_nearest_good_place(near, place):
    passing = [9, 10, 5, 10, 20, 30]
    assert best_place(near, passing, few=10, otherwise=7) == place


class Narrow(nn.Module):
    """The third layer has most of the parameters, and few bytes pass the second."""

    def __init__(self):
        super().__init__()
        sizes = [(8, 8), (8, 2048), (2048, 64), (64, 64)]
        self.layers = nn.ModuleList([nn.Linear(*s, bias=False) for s in sizes])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_part_grows_by_no_more_than_a_quarter_of_the_parameters():
    gm = graph_of(Narrow(), torch.randn(4, 8))
    shapes = [
        m.meta["example_value"].shape
        for n in gm.graph.nodes
        if n in first_nodes(gm, 20_000, 1)
        for m in n.all_input_nodes
        if m.op == "placeholder"
    ]
    assert shapes == [(2048, 8), (64, 64)]  # and the one between in the first part


def test_a_reshape_of_something_else_stays_where_it_is():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.k, self.q = (nn.Linear(64, 64, bias=False) for _ in "kq")

        def forward(self, x):
            y = torch.tanh(x)
            k = self.k(y).view(-1, 64)
            return k @ self.q(y).view(-1, 64).T

    gm = graph_of(Beside(), torch.randn(2, 8, 64))
    starts = first_nodes(gm, 1, 1)
    assert len(starts) == 2 and all(n.target is F.linear for n in starts)


@pytest.mark.parametrize("way", [weights_of_methods, cast_weights])
def test_what_computes_the_weights_goes_with_them(way):
    gm = graph_of(Layers(way), torch.randn(2, 16, 512))
    starts = first_nodes(gm, MEGABYTE, 1)
    assert len(starts) >= 3 and all(n.target in ("t", "to", "flatten") for n in starts)


def test_a_sparse_value_counts_nothing():
    gm = graph_of(Layers(weights_of_methods), torch.randn(2, 16, 512))
    value = next(n for n in gm.graph.nodes if n.target is torch.tanh)
    value.meta["example_value"] = torch.eye(4).to_sparse_csr()
    assert first_nodes(gm, MEGABYTE, 1)


def test_frozen_weights_fill_no_bucket():
    model = model_of(Block).requires_grad_(False)
    assert not weights_of(graph_of(model, torch.randn(2, 16, WIDTH)), MEGABYTE)
    model.blocks[1].requires_grad_(True)
    found = weights_of(graph_of(model, torch.randn(2, 16, WIDTH)), MEGABYTE)
    assert found and all("_1_" in name for name in found)


@pytest.mark.parametrize("function", [torch.sin, lambda x: x * 2])
def test_a_graph_without_layers_is_left_to_dynamo(function):
    assert first_nodes(graph_of(function, torch.ones(2)), 1, 1) is None
    assert first_nodes(fx.symbolic_trace(lambda x: x), 1, 1) is None
