"""The relative position bias: which indices are functions of i - j, and the gradient by
diagonals.
"""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.relative_bias import diagonal_bias, relative_bias
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.measure.distance import distance, joint_distance
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.view import View
from fusion_backend.compat.torch import FakeTensorMode, trace
from fusion_backend.decide.facts import Facts
from fusion_backend.frontends.explain import Collector
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.masks.relative_index import index_of
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.rule import Replacement
from fusion_backend.testing import close, collect, fused_nodes
from tests.oracle.harness import TORCH

N, M, H, ROWS = 24, 30, 4, 32
OPTIONS = {"fusion.only": "relative_bias"}


def places(n=N, m=M, start=0):
    return torch.arange(n)[:, None] + start, torch.arange(m)[None, :]


def apart(n=N, m=M, start=0):
    """j - i, from -31 to 31."""
    i, j = places(n, m, start)
    return j - i


def buckets(x, both=True, rows=ROWS, farthest=20):
    """As T5 has them."""
    found = torch.zeros_like(x)
    if both:
        rows //= 2
        found += (x > 0).to(torch.long) * rows
        x = torch.abs(x)
    else:
        x = -torch.min(x, torch.zeros_like(x))
    exact = rows // 2
    far = exact + (torch.log(x.float() / exact) / math.log(farthest / exact) * (rows - exact)).to(
        torch.long
    )
    found += torch.where(x < exact, x, torch.min(far, torch.full_like(far, rows - 1)))
    return found


def bias(index, weight, **options):
    return F.embedding(index, weight, **options).permute(2, 0, 1)


def by_values():
    """No rule reads a roll."""
    i, j = places()
    return torch.cat([(j - i).roll(3, 0)[3:], (j - i).roll(3, 0)[:3]]).clamp(-9, 9) + 9


def of_scores(w, x, q):
    """Attention's own use of it."""
    scores = q @ q.new_ones(M, 8).T + bias(buckets(apart()), w)[None].expand(2, -1, -1, -1)
    return scores.softmax(-1) @ torch.linspace(-1, 1, M, dtype=w.dtype)


# name -> fn(weight [32, 4], x [24, 30], q [2, 4, 24, 8])
FUSED = {
    "buckets of T5": lambda w, x, q: bias(buckets(apart()), w),
    "buckets of T5's decoder": lambda w, x,
    q: bias(buckets(apart(), both=False), w).unsqueeze(0).contiguous(),
    "queries further on": lambda w, x, q: bias(buckets(apart(start=5)), w),
    "the other way round": lambda w, x, q: bias(buckets(-apart()), w),
    "transposed": lambda w, x, q: bias(buckets(apart(M, N)).T, w),
    "clipped": lambda w, x, q: bias(apart().clamp(-16, 15) + 16, w),
    "by steps": lambda w, x, q: bias((apart() + 32) // 2 % 20, w),
    "by indexing": lambda w, x, q: w[buckets(apart())].permute(2, 0, 1),
    "by indexing from the end": lambda w, x, q: w[apart().clamp(-16, 15)].permute(2, 0, 1),
    "three dimensions": lambda w, x, q: F.embedding(buckets(apart())[None], w).permute(0, 3, 1, 2),
    "numbers of each distance from an input": lambda w, x,
    q: bias(((x[0, :1] > 0).long() * 5 + apart()).abs() % 8, w),
    "a table of the distances": lambda w, x,
    q: bias((q.flatten()[apart().abs()].abs() * 9).long() % ROWS, w),
    "by its values": lambda w, x, q: bias(by_values(), w),
    "for every batch": of_scores,
    "the weight is used elsewhere": lambda w, x, q: bias(buckets(apart()), w) * w.sin().sum(),
    "the index is a result": lambda w, x, q: bias(buckets(apart()), w) + buckets(apart()),
    "columns of a larger weight": lambda w, x,
    q: bias(buckets(apart()), torch.cat([w, w], 1)[:, 2:6]),
}  # fmt: skip


def spoilt(i, j):
    return torch.where((places()[0] == i) & (places()[1] == j), 3, buckets(apart()))


def written(w, x, q, copied=False):
    index = buckets(apart()).clone() if copied else buckets(apart())
    index[2, 3] = 7
    return bias(index, w)


def written_later(w, x, q):
    index = buckets(apart())
    out = bias(index, w)
    index[2, 3] = 7
    return out + index


READS, LEFT_ALONE = "its index is not known to be a function of i - j: it reads", ""
LEFT = {
    "one element off the diagonal": (lambda w, x, q: bias(spoilt(5, 9), w), READS),
    "the first element": (lambda w, x, q: bias(spoilt(0, 0), w), READS),
    "the last element": (lambda w, x, q: bias(spoilt(N - 1, M - 1), w), READS),
    "sums": (lambda w, x, q: bias((places()[0] + places()[1]) % ROWS, w), READS),
    "rows": (lambda w, x, q: bias(places()[0].expand(N, M) % ROWS, w), READS),
    "a difference of rounded numbers": (
        lambda w, x, q: bias((places()[1] / 3 - places()[0] / 3 + 16).long(), w), READS),
    "from an input": (lambda w, x, q: bias((x.abs() * 8).long() % ROWS, w), READS),
    "masked by an input": (lambda w, x, q: bias(torch.where(x > 0, buckets(apart()), 0), w), READS),
    "random": (lambda w, x, q: bias(torch.randint(ROWS, (N, M)), w), READS),
    "sorted": (lambda w, x, q: bias(apart().abs().sort(1)[0] % ROWS, w), READS),
    "written to": (written, READS),
    "a copy is written to": (lambda w, x, q: written(w, x, q, True), READS),
    "written to afterwards": (written_later,
    READS if TORCH < (2, 14) else "backward reads is written to afterwards"),
    "several batches": (
        lambda w, x, q: F.embedding(buckets(apart())[None].expand(2, N, M), w).permute(0, 3, 1, 2),
        "its index has the shape (2, 24, 30), not [n, m]"),
    "with padding": (lambda w, x, q: bias(buckets(apart()), w, padding_idx=3), LEFT_ALONE),
    "scaled by frequency": (lambda w, x, q: bias(buckets(apart()), w, scale_grad_by_freq=True),
    LEFT_ALONE),
    "sparse": (lambda w, x, q: bias(buckets(apart()), w, sparse=True), LEFT_ALONE),
    "heads last": (lambda w, x, q: F.embedding(buckets(apart()), w), LEFT_ALONE),
}  # fmt: skip


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    w, x, q = torch.randn(ROWS, H), torch.randn(N, M), torch.randn(2, H, N, 8)
    return [w.to(dtype).requires_grad_(), x.to(dtype), q.to(dtype)]


def gradients(fn, given):
    """The result, and the gradient of the weight."""
    w = given[0].detach().requires_grad_()
    out = fn(w, *given[1:])
    weights = (
        torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)
    )
    (found,) = torch.autograd.grad((out * weights).sum(), w)
    return [out.detach(), found.to_dense()]


def sites_of(collector):
    return [s for s in collector.report.sites if s.pattern == "relative_bias"]


def operators(collector):
    return [str(n.target) for graph in collector.graphs for n in fused_nodes(graph)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("name", FUSED)
def test_gradient_by_diagonals(name, dtype):
    fn, given = FUSED[name], inputs(dtype)
    collector = collect(fn, *given, options=OPTIONS)
    (site,) = sites_of(collector)
    assert operators(collector) == ["fusion.diagonal_bias.default"], collector.report
    assert (site.forward, site.backward) == (
        "reference",
        "formula",
    ) and "a function of i - j" in site.reason
    torch.compiler.reset()
    got = gradients(torch.compile(fn, backend=collector), given)
    only_first = "table" in name or "input" in name
    in_fp64 = [t.double() if i == 0 or not only_first else t for i, t in enumerate(given)]
    plain, exact = gradients(fn, given), gradients(fn, in_fp64)
    for g, p, e in zip(got, plain, exact, strict=True):
        assert close(g, p, e) == ""
    if dtype != torch.float32:  # eager adds up in the weight's dtype
        assert distance(got[1], exact[1]) <= distance(plain[1], exact[1])


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_is_left_alone(name, monkeypatch):
    # on CPU the reference would be inlined
    monkeypatch.setattr("fusion_backend.decide.gate.on_gpu", lambda t: True)
    fn, reason = LEFT[name]
    collector = collect(fn, *inputs(), options=OPTIONS)
    assert "fusion.diagonal_bias.default" not in operators(collector), collector.report
    sites = sites_of(collector)
    assert bool(sites) == bool(reason) and all(reason in s.reason for s in sites), collector.report
    if name not in ("random", "written to afterwards"):  # torch 2.11: eager refuses it
        torch.compiler.reset()
        compiled = torch.compile(fn, backend=collector)
        for g, w in zip(gradients(compiled, inputs()), gradients(fn, inputs()), strict=True):
            assert distance(g, w) < 1e-6


def test_rows_of_limited_length():
    """The rows are shortened before; their gradient does not know."""

    def fn(w, x, q):
        return bias(buckets(apart()), w, max_norm=1.5)

    collector = collect(fn, *inputs(), options=OPTIONS)
    torch.compiler.reset()
    compiled = torch.compile(fn, backend=collector)
    mine, plain = inputs(), inputs()
    for g, w in zip(gradients(compiled, mine), gradients(fn, plain), strict=True):
        assert torch.allclose(g, w, atol=1e-5)
    assert torch.equal(mine[0], plain[0])


def test_compiled_by_inductor():
    given = inputs(torch.bfloat16)
    compiled = torch.compile(
        of_scores, backend="fusion", options={"fusion.gate": "always"} | OPTIONS
    )
    got, plain, exact = gradients(compiled, given), gradients(of_scores, given), gradients(
        of_scores, [t.double() for t in given])  # fmt: skip
    for g, p, e in zip(got, plain, exact, strict=True):
        assert close(g, p, e) == ""


def test_dynamic_sizes():
    """One graph for all lengths, and no guard of ours."""

    def fn(w, x):
        n, m = x.shape
        return bias(buckets(apart(n, m)), w) * x

    w = torch.randn(ROWS, H, requires_grad=True)
    collector = Collector({"fusion.gate": "always"} | OPTIONS)
    plain = Collector({"fusion.gate": "never"})
    for mine in (collector, plain):
        torch.compiler.reset()
        compiled = torch.compile(fn, backend=mine, dynamic=True)
        for n, m in ((12, 15), (18, 9), (7, 7), (40, 33), (2, 50)):
            x = torch.randn(n, m)
            for g, e in zip(
                gradients(compiled, [w, x]), gradients(fn, [w.double(), x]), strict=True
            ):
                assert distance(g, e) < 1e-6
    assert operators(collector) == ["fusion.diagonal_bias.default"] * len(plain.graphs)


def test_without_a_gradient_and_small():
    """What is reported by default, here and where it has been timed."""

    def reason(training, n=N, m=M):
        answer = diagonal_bias.worthwhile_fn(
            torch.zeros(n, m, dtype=torch.long), torch.zeros(ROWS, H), training
        )
        return answer.reason if answer else None

    assert "without a gradient" in reason(False) and "not been timed" in reason(True)
    assert reason(True, 512, 512) is None
    collector = collect(
        FUSED["buckets of T5"], *inputs(), options=OPTIONS | {"fusion.gate": "auto"}
    )
    (site,) = sites_of(collector)
    assert (
        not site.fused
        and "timed on CUDA only" in site.reason
        and site.reason.startswith("the gather stays: its")
    )


def test_taken_where_it_has_been_timed(monkeypatch):
    monkeypatch.setattr("fusion_backend.decide.gate.on_gpu", lambda t: True)

    def fn(w):
        return bias(buckets(apart(512, 512)), w)

    w = torch.randn(ROWS, H, requires_grad=True)
    (site,) = sites_of(collect(fn, w, options=OPTIONS | {"fusion.gate": "auto"}))
    assert site.fused and (site.forward, site.backward) == ("reference", "formula"), site
    (site,) = sites_of(collect(fn, w.detach(), options=OPTIONS | {"fusion.gate": "auto"}))
    assert not site.fused and "without a gradient" in site.reason
    (site,) = sites_of(
        collect(lambda w, x: bias(x, w), w, buckets(apart(512, 512)), options=OPTIONS)
    )
    assert not site.fused and site.reason.startswith(f"{READS} x"), site


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (5, 7), (1, 5, 7)])
def test_operator_whatever_the_index(shape):
    """It reads the first row and column, of any index: its gradient is that of what it computes,
    and so is the next.
    """
    torch.manual_seed(0)
    index, weight = (
        torch.randint(-9, 9, shape),
        torch.randn(9, 3, dtype=torch.float64, requires_grad=True),
    )

    def fn(w):
        return operator_of(diagonal_bias).overload(
            index, w, forward="reference", backward="formula", save=True
        )

    n, m = shape[-2:]
    first = torch.stack(
        [index.view(n, m)[max(i - j, 0), max(j - i, 0)] for i in range(n) for j in range(m)]
    )
    assert torch.equal(fn(weight).reshape(3, n, m), weight[first.view(n, m)].permute(2, 0, 1))
    assert torch.autograd.gradcheck(fn, weight) and torch.autograd.gradgradcheck(fn, weight)


def test_gradient_stays_where_it_is():
    """An infinite or NaN gradient of one place reaches the row of that place alone."""
    index, weight = buckets(apart()), torch.zeros(ROWS, H, requires_grad=True)
    out = operator_of(diagonal_bias).overload(
        index, weight, forward="reference", backward="formula", save=True
    )
    grad = torch.zeros(H, N, M)
    grad[1, 5, 9], grad[2, 0, 0] = math.nan, math.inf
    (found,) = torch.autograd.grad(out, weight, grad)
    assert found.isnan().nonzero().tolist() == [[int(index[5, 9]), 1]]
    assert found.isinf().nonzero().tolist() == [[int(index[0, 0]), 2]]


# The proof.


def known(make, n, m, dynamic=False):
    """What is known of the index that `make(x, t)` builds, and its values."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    given = torch.arange(n * m).view(n, m) % 7, torch.arange(n + m) * 5 % 11
    if dynamic:
        for x in given:
            torch._dynamo.mark_dynamic(x, list(range(x.dim())))
    with mode:
        fakes = [mode.from_tensor(x, static_shapes=not dynamic) for x in given]
    with torch.no_grad():
        gm = trace(make, fakes, mode)
    view = View(gm, gm.graph, {}, {}, {}, set(), {}, {})
    functionalize_locals(view)
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    masks = Facts(view, Canon().run(gm.graph), False, {}).masks
    return index_of(output.args[0], masks), gm(*given)


def is_diagonal(values):
    return all(
        len(values.diagonal(k).unique()) == 1 for k in range(1 - values.shape[0], values.shape[1])
    )


class Author:
    """Writes index arithmetic over i, j, an input of their size and a table."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def index(self, depth):
        """A function of (i, j, x, t)."""
        if not depth or self.draw.random() < 0.15:
            leaves = (
                ["j - i"] * 6
                + ["i - j"] * 3
                + ["i", "j", "i + j", "x", "i + 0 * j", "t[(j - i).abs()]"]
            )
            return self.draw.choice(leaves)
        a, b = self.index(depth - 1), self.index(depth - 1)
        k = self.draw.randint(1, 4)
        forms = [
            f"({a} + {b})", f"({a} - {b})", f"({a} * {k})", f"({a}).abs()",
            f"({a}).clamp(-{k}, {k})",
            f"torch.where({a} > {k}, {b}, {a})", f"torch.minimum({a}, {b})", f"({a}) // {k + 1}",
            f"({a}) % {k + 1}",
            f"(torch.log(({a}).abs().float() + 1) * {k}).long()", f"(({a}) > ({b})).long()",
            f"t[({a}).abs() % 5]",
            f"({a}).flip(0)", f"({a}).T.T", f"({a}).unsqueeze(0).squeeze(0)", f"-({a})",
            f"torch.max({a}, {b})",
        ]  # fmt: skip
        return self.draw.choice(forms)


def written_out(text):
    fn = eval(f"lambda i, j, x, t: {text}", {"torch": torch})

    def make(x, t):
        i, j = places(*x.shape)
        return fn(i.expand(x.shape), j.expand(x.shape), x, t).broadcast_to(x.shape)

    return make


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_random_indices(dynamic):
    """What is called a function of i - j is one; most that are, are found."""
    proven = missed = 0
    for seed in range(100):
        text = Author(seed).index(1 + seed % 4)
        found, values = known(written_out(text), 6, 9, dynamic)
        assert not found.diagonal or is_diagonal(values), text
        proven += found.diagonal
        missed += not found.diagonal and is_diagonal(values)
    assert proven > 25 and missed < 10, (proven, missed)


def test_a_deep_chain():
    """As deep as somebody writes it."""

    def make(x, t):
        index = apart(*x.shape)
        for k in range(2000):
            index = (index + k).abs()
        return index

    assert known(make, 4, 5)[0].diagonal


# In a model.


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_t5(train, dynamic):
    pytest.importorskip(
        "transformers", reason="the models come from transformers: pip install -e '.[bench]'"
    )
    from benchmarks.subjects.tiny_models import MODELS, loss, result

    tiny = MODELS["t5"]
    torch.manual_seed(0)
    model = tiny.model().eval()  # without dropout
    exact = copy.deepcopy(model).double()
    collector = Collector({"fusion.gate": "always"} | OPTIONS)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=collector, dynamic=dynamic)

    def step(fn, example):
        with torch.set_grad_enabled(train):
            output = fn(**example)
        if not train:
            return result(output), {}
        model.zero_grad(), exact.zero_grad()
        loss(output).backward()
        of = exact if fn is exact else model
        return result(output).detach(), {n: p.grad for n, p in of.named_parameters()}

    for length in (16, 21):
        example = tiny.example(2, length)
        want = step(exact, example)
        want = want[0], {n: g.clone() for n, g in want[1].items()}
        plain = step(model, example)
        plain = plain[0], {n: g.clone() for n, g in plain[1].items()}
        have = step(compiled, example)
        assert distance(have[0], want[0]) <= 2 * distance(plain[0], want[0]) + 1.2e-7
        if train:
            assert (
                joint_distance(have[1], want[1]) <= 2 * joint_distance(plain[1], want[1]) + 1.2e-7
            )
            (name,) = [
                n for n in want[1] if n.startswith("encoder") and "relative_attention_bias" in n
            ]
            assert (
                distance(have[1][name], want[1][name])
                <= 2 * distance(plain[1][name], want[1][name]) + 1e-6
            )
    sites = sites_of(collector)
    assert len(sites) == 2 * len(collector.graphs) and all(
        s.fused and "modeling_t5.py" in s.reason for s in sites
    )
    assert operators(collector) == ["fusion.diagonal_bias.default"] * len(sites)


def test_the_library_answers_for_the_operator():
    index, weight = buckets(apart()), torch.zeros(ROWS, H)
    found = type("Found", (), dict(diagonal=True, text="yes"))
    answer = relative_bias.replacement_fn(index, weight, {"index": found}, True)
    assert isinstance(answer, Replacement) and answer.op is diagonal_bias
    torch.testing.assert_close(diagonal_bias(index, weight + 1), relative_bias(index, weight + 1))
