"""Under DistributedDataParallel a graph is cut in front of layers, so that all sites of the whole
graph are found in its parts.
"""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

import fusion_backend
from benchmarks.subjects.model_zoo import ENTRIES, build
from fusion_backend import remembered
from fusion_backend.capture.bucket_cuts import best_place, first_nodes
from fusion_backend.frontends import dynamo

from ..eager_kernels import eager_kernels
from .starting import need_gloo

WIDTH, BLOCKS = 128, 3


@pytest.fixture(autouse=True)
def alone():
    need_gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


def trained(call, model):
    """The result of a call, and its gradients."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
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


def parts_of_dynamo(model):
    """The sizes of the parts as Dynamo cuts them for another backend."""
    torch._dynamo.reset()
    sizes = []

    def backend(gm, inputs):
        sizes.append(len(gm.graph.nodes))
        return gm

    trained(torch.compile(model, backend=backend), model)
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


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "t5"])
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
    wanted = parts_of_dynamo(spread(model))
    with mock.patch.object(dynamo, "first_nodes", side_effect=AssertionError):
        assert parts_of_dynamo(spread(model)) == wanted
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
    "last, more, place",
    [
        (5, 10, 3),  # the nearest of the two in front of which few bytes pass
        (5, 3, 4),  # too far: the best of those before
        (5, 1, 5),
        (2, 10, 1),
        (0, 10, None),
    ],
)
def test_a_part_begins_where_few_bytes_pass_if_that_is_near(last, more, place):
    weighty, passing = [1, 3, 4, 5], [9, 10, 5, 10, 20, 30]
    before = [0, 0, 1, 1, 3, 5, 7]  # of nodes with 0, 1, 0, 2, 2 and 2 bytes of parameters
    assert best_place(last, weighty, before, passing, more) == place


def test_frozen_weights_fill_no_bucket():
    model = model_of(Block).requires_grad_(False)
    assert not weights_of(graph_of(model, torch.randn(2, 16, WIDTH)), MEGABYTE)
    model.blocks[1].requires_grad_(True)
    found = weights_of(graph_of(model, torch.randn(2, 16, WIDTH)), MEGABYTE)
    assert found and all("_1_" in name for name in found)


@pytest.mark.parametrize("function", [torch.sin, lambda x: x])
def test_a_graph_without_layers_is_not_cut(function):
    with contextlib.suppress(ValueError):  # Dynamo has no graph of the identity
        assert not first_nodes(graph_of(function, torch.ones(2)), 1, 1)
