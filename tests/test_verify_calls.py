"""fusion.verify: the first call is as if nothing had been decided; some calls decide nothing."""

# ruff: noqa: F401, F811 (fixtures are imported, and then arguments)

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.frontends import runs, verify
from fusion_backend.frontends.twins import Twins, writes, written_places
from fusion_backend.options import Options, parse
from tests.verify_cases import OPTIONS, VERIFY, norm, stubs, told, undecided, xw

# The first call is as it would be without.


class Model(nn.Module):
    """Writes to an input, to a part of it that is another input, to statistics and to a counter
    that is an index.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.weight = nn.Parameter(torch.rand(8))
        self.register_buffer("cache", torch.zeros(2, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y, noise):
        y.add_(1)
        h = F.layer_norm(self.norm(x + y), (8,), self.weight)
        if noise:
            h = F.dropout(h, 0.5)
        self.cache.index_copy_(0, self.position, h.detach()[:1])
        self.position.add_(1)
        return h * 2, x


def state_after(options: dict, noise: bool, grad: bool):
    """Of one call: all that it computes and writes, and the random state."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, base = Model(), torch.randn(6, 8)
    compiled = torch.compile(model, backend="fusion", options=options)
    with torch.set_grad_enabled(grad):
        h, x = compiled(base[:4], base[2:], noise)
        assert x is not base and x.data_ptr() == base.data_ptr()
    if grad:
        h.sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    state = [h.detach(), base, *model.state_dict().values(), *grads, torch.get_rng_state()]
    return [t.clone() for t in state]


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_call_is_as_without(eager_kernels, noise, grad):
    """Both graphs ran several times: the counter would be past the end of the cache."""
    plain = state_after(OPTIONS, noise, grad)
    mine = state_after(VERIFY, noise, grad)
    assert len(mine) == len(plain) == (14 if grad else 11)
    for a, b in zip(mine, plain, strict=True):
        assert torch.equal(a, b)
    found = fusion_backend.report().graphs[-1]
    assert found.verified.startswith("verified") and fusion_backend.report().fused
    assert found.verified.endswith("random and were not compared") == noise


def hooks_and_gradients(options: dict):
    """Of one training step: how often each hook is called, and the gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    w, x, counts = nn.Parameter(torch.rand(8)), torch.randn(4, 8, requires_grad=True), []
    w.register_hook(lambda g: counts.append("gradient"))
    w.register_post_accumulate_grad_hook(lambda p: counts.append("accumulated"))
    x.register_hook(lambda g: counts.append("input"))

    def pack(t):
        counts.append("saved")
        return t

    compiled = torch.compile(norm, backend="fusion", options=options)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = compiled(x, w)
    assert w.grad is None and x.grad is None
    y.sin().sum().backward()
    return sorted(counts), [y.detach(), w.grad, x.grad]


def test_training_sees_one_step(eager_kernels):
    mine, plain = hooks_and_gradients(VERIFY), hooks_and_gradients(OPTIONS)
    assert mine[0] == plain[0]
    assert all(map(torch.equal, mine[1], plain[1]))
    assert fusion_backend.report().graphs[0].verified.startswith("verified")


def test_where_nobody_may_have_hooks(stubs, xw):
    compiled = torch.compile(norm, backend="fusion", options=VERIFY)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        compiled(xw[0].requires_grad_(), xw[1])
    assert told().startswith("verified")


def test_inside_a_checkpoint_of_eager_code(eager_kernels):
    """It counts what is saved, and would miss what is computed again."""
    w, x = nn.Parameter(torch.rand(8)), torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(norm, backend="fusion", options=VERIFY)
    checkpoint(compiled, x, w, use_reentrant=False).sum().backward()
    mine = x.grad.clone()
    x.grad = None
    norm(x, w).sum().backward()
    torch.testing.assert_close(mine, x.grad)


def test_a_sparse_gradient_is_compared(stubs):
    """Entries of an index that is used twice are added up."""
    weight = torch.randn(5, 8, requires_grad=True)

    def lookup(i, weight):
        return F.layer_norm(F.embedding(i, weight, sparse=True).exp(), (8,))

    compiled = torch.compile(lookup, backend="fusion", options=VERIFY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled(torch.tensor([1, 3, 1]), weight)
    assert told().startswith("verified")


def test_each_graph_is_verified_once(eager_kernels):
    compiled = torch.compile(norm, backend="fusion", options=VERIFY, dynamic=False)
    for rows in (4, 5, 4, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x, torch.ones(8)), norm(x, torch.ones(8)))
    assert len(fusion_backend.report().graphs) == 2
    assert all(g.verified.startswith("verified") for g in fusion_backend.report().graphs)


def test_under_dynamic_shapes(eager_kernels):
    compiled = torch.compile(norm, backend="fusion", options=VERIFY, dynamic=True)
    for rows in (4, 5, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        compiled(x, torch.ones(8)).sum().backward()
    assert told().startswith("verified")


# Inputs, and graphs, for which it is not done.


def test_twins_have_the_memory_of_the_inputs():
    base = torch.arange(24.0).reshape(4, 6)
    wide, part = base.t(), base[1:, ::2]
    weight, row = nn.Parameter(torch.ones(3)), torch.ones(1, 3).expand(4, 3)
    twins = Twins((wide, part, weight, row, 3, None), set(), trains=False)
    a, b, w, r, three, none = twins.arguments()
    assert [t.stride() for t in (a, b, r)] == [t.stride() for t in (wide, part, row)]
    assert b.storage_offset() == part.storage_offset()
    assert a._base is not None and a._base is b._base
    assert w is weight and three == 3 and none is None
    b.zero_()
    assert (a == 0).sum() == 10 and (base == 0).sum() == 1
    changed = twins.content()
    twins.put_back()
    assert torch.equal(a, wide) and (changed[0] == 0).sum() == 10
    weight.data.zero_()
    assert not twins.written_unseen()
    with torch.no_grad():
        weight.add_(1)
    assert twins.written_unseen()


def written_by(fn, *args) -> set[int]:
    places = []

    def look(gm, inputs):
        places.append(written_places(gm))
        return gm.forward

    torch.compile(fn, backend=look)(*args)
    return places[0]


def test_what_may_be_written_to():
    x, w = torch.randn(4, 8), nn.Parameter(torch.randn(4, 8))
    assert written_by(lambda w, x: norm(x, w[0]) + w, w, x) == set()
    body = (lambda w, x: checkpoint(lambda w, x: norm(x, w[0]), w, x, use_reentrant=False), w, x)
    assert written_by(*body) == set()
    with torch.no_grad():
        assert written_by(lambda w, x: w.mul_(x), w, x) >= {0}
        assert written_by(lambda w, x: w[0].mul_(x[0]), w, x) >= {0}
        assert written_by(lambda i, w: F.embedding(i, w, max_norm=1.0), torch.arange(2), w) >= {1}
        assert written_by(lambda i, w: F.embedding(i, w), torch.arange(2), w) == set()
    helper = of_one_call(torch.ops.aten._fused_moving_avg_obs_fq_helper.default)
    call = next(n for n in helper.graph.nodes if n.op == "call_function")
    call.meta["example_value"] = ()
    assert writes(call, helper)


def of_one_call(target) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(target, (graph.placeholder("x"),)))
    return fx.GraphModule({}, graph)


def test_graphs_that_are_not_run_more_often(monkeypatch):
    assert not verify.unsuitable(of_one_call(torch.sin))
    reduce = torch.ops._c10d_functional.all_reduce.default
    assert "may communicate" in verify.unsuitable(of_one_call(reduce))
    outer = of_one_call(torch.sin)
    outer.add_module("body", of_one_call(reduce))
    assert "may communicate" in verify.unsuitable(outer)
    custom = torch.ops.profiler._record_function_enter_new.default
    assert not verify.unsuitable(of_one_call(custom))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert "may communicate" in verify.unsuitable(of_one_call(custom))
    assert not verify.unsuitable(of_one_call(torch.ops.aten.sin.default))
    held = of_one_call(torch.sin)
    held.register_buffer("state", torch.ones(2))
    assert verify.unsuitable(held) == "it holds tensors of its own"


@pytest.mark.parametrize(
    "made",
    [lambda: torch.ones(2, device="meta"), torch.Generator, lambda: torch.ones(2).to_sparse()],
)
def test_inputs_that_cannot_be_had_twice(made):
    with pytest.raises(runs.NotVerified, match="input 1 "):
        runs.check((torch.ones(2), made()))


def test_the_option():
    ours, theirs = parse({"fusion.verify": True, "max_autotune": True}, [])
    assert ours.verify and theirs == {"max_autotune": True}
    # no other code is compiled: the caches are those of a process without
    assert str(ours) == str(Options())
    with pytest.raises(ValueError, match="fusion.verify is 'yes'; it must be True or False"):
        parse({"fusion.verify": "yes"}, [])
