"""explain and the test helpers run a model and leave everything that it writes to as it was."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fusion_backend import explain
from fusion_backend.frontends.run_unchanged import untouched
from fusion_backend.testing import assert_fuses, collect

OPTIONS = {"fusion.gate": "always"}
HELD = torch.zeros(4)
ITEMS: list = []


class Restless(nn.Module):
    """Writes wherever a model can."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(8))
        self.calls, self.cache, self.history, self.state = 0, None, [], {"mean": torch.zeros(())}

    def forward(self, x, y, noise=None):
        x.mul_(2)
        y[:, 1:].add_(1)
        self.seen += x.detach().sum(0)
        self.calls += 1
        self.cache = x.detach() + 1
        self.state["mean"] = x.detach().mean()
        h = self.last(self.norm(x + y)) + torch.rand_like(x)
        torch._dynamo.graph_break()
        self.history.append(self.calls)
        self.seen[0] = 7
        x.data[0, 0] = random.random()
        if noise is not None:
            h = h + torch.randn(h.shape, generator=noise)
        return F.dropout(h, 0.5)


def test_everything_is_put_back():
    model, noise = Restless(), torch.Generator().manual_seed(1)
    base = torch.randn(3, 4, 8)
    x, y = base[1], torch.randn(4, 8)
    need = y.sin()  # torch checks that y was not written to when it differentiates
    w = torch.randn(4, 8, requires_grad=True)
    product = w * y
    before = {k: v.clone() for k, v in model.state_dict().items()}
    values = [t.clone() for t in (base, y)]
    states = torch.get_rng_state(), noise.get_state(), random.getstate()
    attributes = (
        model.calls,
        model.cache,
        list(model.history),
        model.state["mean"],
        set(vars(model)),
    )
    report = explain(model, x, y, noise, options=OPTIONS)
    assert len(report.graphs) >= 2 and "layer_norm" in {s.pattern for s in report.fused}
    torch.testing.assert_close([base, y], values, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert attributes == (
        model.calls,
        model.cache,
        model.history,
        model.state["mean"],
        set(vars(model)),
    )
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(
        noise.get_state(), states[1]
    )
    assert random.getstate() == states[2]
    torch.testing.assert_close(torch.autograd.grad(product.sum(), w)[0], y)
    assert torch.equal(need, y.sin())


def into_globals(x):
    HELD.add_(x)
    ITEMS.append(1)
    return F.layer_norm(x, (4,))


def into_a_grown_cache(x, cache):
    cache.items.append(x + 1)
    cache.full[cache.used : cache.used + 1] = x
    cache.used += 1
    return F.layer_norm(x, (4,))


class Cache:
    def __init__(self):
        self.items, self.full, self.used = [], torch.zeros(8, 4), 0


def into_gradients(x):
    loss = F.layer_norm(x, (4,)).pow(3).sum()
    loss.backward()
    return loss


def in_a_checkpoint(x, seen):
    def body(x):
        seen.add_(1)
        return F.layer_norm(x, (4,))

    return checkpoint(body, x, use_reentrant=False)


def fails(x):
    x.mul_(2)
    torch._dynamo.graph_break()
    raise KeyError("the model's own")


def test_writes_besides_the_inputs_are_put_back():
    explain(into_globals, torch.ones(4))
    assert not HELD.any() and ITEMS == []
    cache = Cache()
    explain(into_a_grown_cache, torch.ones(4), cache)
    assert cache.items == [] and cache.used == 0 and not cache.full.any()
    for grad in (None, torch.ones(4)):
        x = torch.randn(4, requires_grad=True)
        x.grad = grad
        explain(into_gradients, x)
        assert x.grad is grad and (grad is None or grad.eq(1).all())
    seen = torch.zeros(4)
    report = explain(in_a_checkpoint, torch.randn(2, 4, requires_grad=True), seen, options=OPTIONS)
    assert not seen.any() and report.fused
    x = torch.ones(4)
    with pytest.raises(KeyError, match="the model's own"):
        explain(fails, x)
    assert x.eq(1).all()


def test_overlapping_views_and_inference_tensors():
    x = torch.arange(6.0)
    with torch.inference_mode():
        inference = torch.zeros(3)
    sparse = torch.eye(3).to_sparse()
    with untouched():
        x[:4].mul_(3)
        x[2:].add_(1)
        x.neg_()
        with torch.inference_mode():
            inference.add_(1)
        sparse.mul_(2)
        grown = torch.zeros(4)
        grown.add_(1)
    assert (
        x.tolist() == [0, 1, 2, 3, 4, 5]
        and not inference.any()
        and torch.equal(sparse.to_dense(), torch.eye(3))
    )
    assert grown.eq(1).all()  # made inside: nobody had it before


def test_only_what_is_written_is_copied():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    with untouched(model, ()) as writes:
        model(torch.randn(4, 64))
    assert sum(content.numel() for _, content, _ in writes.kept.values()) <= 2 * 64 + 1


def with_options(x, options=1, dynamic=1, kwargs=1, pattern=1):
    return F.layer_norm(x * options * dynamic * kwargs * pattern, (4,))


def test_a_models_own_keywords_reach_it():
    x, taken = torch.randn(2, 4), {"options": 2.0, "dynamic": 3.0, "kwargs": 5.0}
    for graphs in (
        explain(with_options, x, options=OPTIONS, kwargs=taken, pattern=7.0).graphs,
        collect(with_options, x, kwargs=taken, pattern=7.0).report.graphs,
        assert_fuses(
            with_options, x, pattern="layer_norm", kwargs={**taken, "pattern": 7.0}
        ).graphs,
    ):
        assert [len(g.sites) for g in graphs] == [1]

    def refuses(x, options):
        assert options == 2.0, options
        return x.sin()

    explain(refuses, x, kwargs={"options": 2.0})
    with pytest.raises(TypeError, match="options"):
        explain(refuses, x, options=OPTIONS)


def test_a_model_that_is_divided_over_ranks():
    """Its weights are DTensors, which hold a mesh beside the tensor."""
    if dist.is_initialized():
        pytest.skip("a job is running")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        model[1] = nn.LayerNorm(4)  # of this rank's columns
        (site,) = explain(model, torch.randn(3, 8), options=OPTIONS).sites
        assert site.pattern == "layer_norm" and site.fused
    finally:
        dist.destroy_process_group()


def test_writes_in_regions_are_put_back():
    def body(x):
        x.add_(1)
        return (x * 2,)

    x = torch.zeros(3)
    with untouched():
        invoke_subgraph(fx.symbolic_trace(body), "body", x)
        assert x.eq(1).all()
    assert not x.any()
