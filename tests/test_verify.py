"""fusion.verify: the first call decides between our graph and plain Inductor's."""

# ruff: noqa: F401, F811 (fixtures are imported, and then arguments)

import gc
import json
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_backend
from fusion_backend.frontends import dynamo as backend
from fusion_backend.frontends import runs, verify
from fusion_backend.frontends.twins import Twins
from fusion_backend.measure import timing
from fusion_backend.measure.agreement import Value, disagreement
from tests.verify_cases import OPTIONS, TIMED, VERIFY, norm, of_times, stubs, told, undecided, xw

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
