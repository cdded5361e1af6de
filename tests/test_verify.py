"""fusion.verify: the first call decides between our graph and plain Inductor's, and is itself as if
it had not.
"""

import gc
import json
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend.frontends import dynamo as backend
from fusion_backend.frontends import runs, verify
from fusion_backend.frontends.twins import Twins, writes, written_places
from fusion_backend.measure import timing
from fusion_backend.measure.agreement import Value, disagreement
from fusion_backend.measure.timing import Race
from fusion_backend.options import Options, parse

OPTIONS = {"fusion.gate": "always"}
VERIFY = {**OPTIONS, "fusion.verify": True}
TIMED = verify.timed


def norm(x, w):
    return F.layer_norm(x.exp(), (8,), w)


@pytest.fixture
def xw():
    return torch.randn(4, 8), torch.rand(8)


def of_times(plain: float, ours: float, samples: int = 20) -> Race:
    """A race that is over."""
    found = Race()
    for _ in range(samples):
        found.add(plain, ours)
    return found


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """Both run once more, and nothing is certain. A test may add times, which decide."""
    races: list[Race] = []

    def timed(plain, ours, clock):
        clock(plain), clock(ours)
        return races.pop() if races else of_times(1.0, 1.0, 2)

    monkeypatch.setattr(verify, "timed", timed)
    return races


class Stubs:
    """Inductor's place, taken by the graph itself: what is called, and what it does instead."""

    def __init__(self):
        self.calls, self.compiled = [], []
        self.ours = self.plain = lambda run, *args: run(*args)

    def compiler(self, kind: str):
        def inductor(mode, options, *told):
            def compile(gm, inputs):
                self.compiled.append((kind, (options or {}).get("triton.cudagraphs")))

                def run(*args):
                    self.calls.append(kind)
                    return getattr(self, kind)(gm.forward, *args)

                return run

            compile.config = {k: v for k, v in (options or {}).items() if k.startswith("triton")}
            return compile

        return inductor


@pytest.fixture
def stubs(monkeypatch):
    found = Stubs()
    monkeypatch.setattr(backend, "inductor", found.compiler("plain"))
    monkeypatch.setattr(backend, "inductor_of_ours", found.compiler("ours"))
    return found


def told() -> str:
    (record,) = fusion_backend.report().graphs
    return record.verified


# What is decided.


@pytest.mark.parametrize(
    "plain, ours, samples, stays, said",
    [
        (3.6, 3.8, 20, "plain", "slower, 0.95 times as fast as plain Inductor, 3.8 against 3.6 ms"),
        (3.8, 3.4, 20, "ours", "1.12 times as fast as plain Inductor, 3.4 against 3.8 ms"),
        (3.4, 3.4, 20, "ours", "as fast as plain Inductor, 3.4 against 3.4 ms"),
        (3.0, 4.0, 3, "ours", "no certain difference to plain Inductor, 4 against 3 ms"),
        (2000.4, 2100.2, 1, "ours", "timed once only, 2100 against 2000 ms"),
    ],
)
def test_the_times_decide(stubs, undecided, xw, plain, ours, samples, stays, said):
    undecided.append(of_times(plain, ours, samples))
    compiled = torch.compile(norm, backend="fusion", options=VERIFY)
    first = compiled(*xw)
    stubs.calls.clear()
    assert torch.equal(compiled(*xw), first) and stubs.calls == [stays]
    assert told().startswith(f"verified on the first inputs: {said}")
    (site,) = fusion_backend.report().sites
    assert site.fused == (stays == "ours")
    text = " ".join(str(fusion_backend.report()).split())
    assert f"against plain Inductor graph 0: {told()}" in text
    assert json.loads(fusion_backend.report().to_json())["graphs"][0]["verified"] == told()
    if stays == "plain":
        assert told().endswith(": plain Inductor stays")
        assert (site.cause, site.forward) == ("dropped", None)
        assert site.reason.startswith("fusion.verify: the graph was slower on the first inputs")


def test_without_the_option_nothing_runs_twice(stubs, xw):
    torch.compile(norm, backend="fusion", options=OPTIONS)(*xw)
    assert stubs.compiled == [("ours", None)] and stubs.calls == ["ours"] and told() == ""


def test_a_graph_without_sites_is_not_compiled_twice(stubs):
    torch.compile(lambda x: x.sin(), backend="fusion", options=VERIFY)(torch.ones(4))
    assert stubs.compiled == [("plain", None)] and stubs.calls == ["plain"] and told() == ""


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.1


def with_nan(run, x, w):
    (y,) = run(x, w)
    return (y.index_fill(0, torch.tensor([2]), float("nan")),)


def in_another_dtype(run, x, w):
    return (run(x, w)[0].double(),)


WRONG = {
    "value": (lambda run, x, w: (run(x, w)[0] * 1.01,), "result 0 differs by 0.01 of its norm"),
    "gradient": (lambda run, x, w: run(WrongBackward.apply(x), w), "the gradient of input 0"),
    "nan": (with_nan, "result 0 differs by inf of its norm"),
    "dtype": (in_another_dtype, "result 0 is torch.float64 (4, 8) instead of torch.float32"),
    "raises": (lambda run, x, w: run(x, w[:2]), "raised RuntimeError: "),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_is_dropped_with_a_warning(stubs, xw, how):
    stubs.ours, said = WRONG[how]
    x = xw[0].requires_grad_()
    compiled = torch.compile(norm, backend="fusion", options=VERIFY)
    with pytest.warns(RuntimeWarning, match="plain Inductor stays; please report this"):
        y = compiled(x, xw[1])
    assert torch.equal(y, norm(x, xw[1])) and stubs.calls[-1] == "plain"
    assert said in told() and not fusion_backend.report().fused


def test_rounding_is_not_wrong(stubs, xw):
    stubs.ours = lambda run, x, w: (run(x, w)[0] * (1 + 1e-6),)
    torch.compile(norm, backend="fusion", options=VERIFY)(*xw)
    assert stubs.calls[-1] == "ours" and fusion_backend.report().fused


def test_a_gradient_that_is_nothing_but_rounding():
    """It has no digits in common with another one, and neither has that of any other order."""
    noise = [Value("g", torch.randn(64) * 1e-9) for _ in range(3)]
    assert not disagreement(noise[:1], noise[1:2], lambda: noise[2:], 1e-7)
    far = [Value("g", torch.randn(64) * 1e-7)]
    assert "g differs" in disagreement(far, noise[1:2], lambda: noise[2:], 1e-7)


def test_a_row_among_many():
    right = torch.randn(4096, 64, dtype=torch.bfloat16)
    wrong = right.clone()
    wrong[7] = -wrong[7]
    args = [Value("y", wrong)], [Value("y", right)], lambda: [Value("y", right)]
    assert "y differs" in disagreement(*args, torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), IndexError("your index")])
def test_a_failure_that_is_not_ours_keeps_ours(stubs, xw, error):
    """Plain Inductor's graph runs first."""

    def fails(run, *args):
        raise error

    stubs.plain = fails
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        y = torch.compile(norm, backend="fusion", options=VERIFY)(*xw)
    assert torch.equal(y, norm(*xw)) and stubs.calls == ["plain", "ours"]
    memory = isinstance(error, torch.OutOfMemoryError)
    assert told() == "not verified: " + (
        "there is not enough memory to run both"
        if memory
        else "plain Inductor's graph raised IndexError: your index"
    )


def test_out_of_memory_in_ours_keeps_ours_and_nothing_else(stubs, xw):
    seen = []

    def fails(run, x, w):
        if not seen:
            seen.append(weakref.ref(x))
            raise torch.OutOfMemoryError("no memory")
        return run(x, w)

    stubs.ours = fails
    torch.compile(norm, backend="fusion", options=VERIFY)(*xw)
    assert "not enough memory" in told() and seen[0]() is None


def test_what_plain_inductor_cannot_compile_stays_ours(stubs, xw, monkeypatch):
    def refuses(mode, options):
        def compile(gm, inputs):
            raise NotImplementedError("a limit")

        compile.config = {}
        return compile

    monkeypatch.setattr(backend, "inductor", refuses)
    torch.compile(norm, backend="fusion", options=VERIFY)(*xw)
    assert stubs.calls == ["ours"] and "NotImplementedError: a limit" in told()


def test_a_fault_in_verifying_costs_nothing_but_the_answer(stubs, xw, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(verify, "timed", broken)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError: a bug; please report this"):
        y = torch.compile(norm, backend="fusion", options=VERIFY)(*xw)
    assert torch.equal(y, norm(*xw)) and fusion_backend.report().fused


def test_cuda_graphs_take_no_part(stubs, undecided, xw):
    undecided.append(of_times(2.0, 1.0))
    options = {**VERIFY, "triton.cudagraphs": True}
    torch.compile(norm, backend="fusion", options=options)(*xw)
    rivals = [("ours", False), ("plain", False)]
    assert stubs.compiled == [("ours", True), ("plain", True), *rivals]
    assert told().endswith("; timed without CUDA graphs")


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


# The first call, from inside.


def comparison_of(ours, plain) -> verify.Verified:
    gm = fx.symbolic_trace(lambda x: (x + 1,))
    pair = verify.Pair(ours, plain)
    record = fusion_backend.reporting.records.GraphRecord(3)
    return verify.Verified(verify.Comparison(pair, pair, gm, set(), 1e-7, record))


def test_a_second_thread_waits_for_the_verdict(undecided):
    undecided += [of_times(1.0, 2.0)] * 2
    out, waited = [], []
    second = threading.Thread(target=lambda: out.append(both(torch.ones(2))))

    def plain(x):
        if not waited:
            second.start()
            second.join(0.5)
            waited.append(second.is_alive())
        return (x + 1,)

    def ours(x):
        assert threading.current_thread() is not second
        return (x + 1,)

    both = comparison_of(ours, plain)
    out.append(both(torch.ones(2)))
    second.join(60)
    assert waited == [True] and both.chosen is plain and len(undecided) == 1
    assert len(out) == 2 and all(torch.equal(y, torch.full((2,), 2.0)) for (y,) in out)


def test_a_call_from_inside_a_run_is_ours():
    """From a hook of the user's, say, in the thread that decides."""
    inner = []

    def plain(x):
        if not inner:
            inner.append(both(x))
        return (x + 1,)

    both = comparison_of(lambda x: (x + 1,), plain)
    both(torch.ones(2))
    assert len(inner) == 1 and both.chosen is not None


def test_a_race_that_is_run(monkeypatch):
    """The input's content is the user's in every sample."""
    monkeypatch.setattr(verify, "timed", TIMED)
    seen = []

    def ours(x):
        time.sleep(0.002)
        return plain(x)

    def plain(x):
        seen.append(x.item())
        return (x.add_(1),)

    both, x = comparison_of(ours, plain), torch.zeros(1)
    both(x)
    assert both.chosen is plain and x == 1 and set(seen) == {0.0} and len(seen) > 16


@pytest.mark.parametrize(
    "ms, calls, verdict",
    [(2000.0, (1, 1), ""), (400.0, (10, 10), "slower"), (10.0, (10, 10), "slower")],
)
def test_long_calls_are_few(ms, calls, verdict, monkeypatch):
    """As many as a verdict needs, or one of each."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    ran = []

    def clock(call):
        took = call()
        now[0] += took / 1e3
        ran.append(took)
        return took

    found = TIMED(lambda: ms, lambda: ms * 1.1, clock)
    assert (ran.count(ms), ran.count(ms * 1.1)) == calls
    assert found.verdict == verdict


@pytest.mark.parametrize("ms, samples", [(2000.0, 1), (1.0, 5)])
def test_a_long_call_is_not_repeated_to_hide_the_host(ms, samples, monkeypatch):
    ran = []

    def once(self, call):
        ran.append(call)
        return ms, True

    monkeypatch.setattr(timing.Clock, "once", once)
    clock = runs.OnTwins(torch.device("cpu"), Twins((), set(), trains=False))
    clock.buffer = torch.ones(1)
    assert clock(lambda: None) == ms and len(ran) == samples


@pytest.mark.parametrize("ms", [1.0, 2.0])
def test_the_loser_is_freed(undecided, ms):
    undecided.append(of_times(1.5, ms))
    ours, plain = (lambda x: (x + 1,)), (lambda x: (x + 1,))
    refs = {"ours": weakref.ref(ours), "plain": weakref.ref(plain)}
    both = comparison_of(ours, plain)
    del ours, plain
    both(torch.ones(2))
    gc.collect()
    alive = {name for name, ref in refs.items() if ref() is not None}
    assert alive == {"ours" if ms == 1.0 else "plain"}


def test_a_traced_call_decides_nothing():
    both = comparison_of(lambda x: (x + 1,), lambda x: (x + 1,))
    with FakeTensorMode() as mode:
        both(mode.from_tensor(torch.ones(2)))
    torch.func.vmap(both)(torch.ones(2, 2))
    assert both.chosen is None
    both(torch.ones(2))
    assert both.chosen is not None


def test_a_shape_that_changes_is_not_verified():
    def resizes(x):
        x.resize_(1)
        return (x,)

    both, x = comparison_of(resizes, resizes), torch.ones(4)
    record = both.comparison.record
    both(x)
    assert record.verified == "not verified: it changes the shape or the memory of an input"
    assert both.comparison is None and x.shape == (1,)


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
