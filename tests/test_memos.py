"""What the pass remembers within a process: two questions with different answers never
share one.
"""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.frontends.explain as explain
from fusion_backend import Pattern
from fusion_backend.capture import autocast
from fusion_backend.capture.call_cache import key_of
from fusion_backend.compat.torch import FakeTensorMode, pytree
from fusion_backend.frontends.explain import Collector
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.testing import collect

from .selection import only_full

aten = torch.ops.aten


def as_it_is(q: torch.Tensor) -> torch.Tensor:
    return torch.square(q * 0.5)


def cast(q: torch.Tensor) -> torch.Tensor:
    return torch.square((q * 0.5).float())


@pytest.fixture(params=[only_full(as_it_is), cast], ids=lambda fn: fn.__name__)
def of_integers(request):
    pattern = Pattern(request.param)
    pattern.inputs()(lambda tensor: (torch.ones(4, 4, dtype=torch.int8),))
    yield pattern
    del FUSION_RULES[pattern.name]


def norm(x):
    return F.layer_norm(x, x.shape[-1:])


def check(fn, *inputs, fused=("layer_norm",)):
    """The rewritten graph gives what the function gives, in its dtypes."""
    torch.compiler.reset()
    collector = Collector({"fusion.gate": "always"})
    got = torch.compile(fn, backend=collector)(*inputs)
    torch.testing.assert_close(got, fn(*inputs))
    assert [s.pattern for s in collector.report.fused] == list(fused), str(collector.report)


# What autocast does to an operator


@pytest.mark.parametrize(
    "second, shapes",
    [("bij,bij->bij", ((2, 8, 8), (2, 8, 8))), ("bij,bjk->bik", ((2, 8, 1), (2, 1, 8)))],
    ids=["another equation", "a sum over one"],
)
def test_what_autocast_does_to_einsum(second, shapes):
    """A product of matrices is cast; a product element by element, which einsum may be as well, is
    not.
    """

    def f(a, b, c, d):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            p = torch.einsum("bij,bjk->bik", a, b)
            q = torch.einsum(second, c, d)
            q.mul_(2)  # which writes the einsum into the graph as autocast.py resolved it
            return p, norm(q)

    check(f, *(torch.randn(s) for s in ((2, 8, 8), (2, 8, 8), *shapes)))


@pytest.fixture
def asked(monkeypatch):
    """What `casts_of` is asked."""
    found = []
    ask = autocast.casts_of
    monkeypatch.setattr(
        autocast, "casts_of", lambda *question: found.append(question) or ask(*question)
    )
    return found


def resolved(memo, op, *args, device="cpu", dtype=torch.bfloat16):
    leaves, spec = pytree.tree_flatten((args, {}))
    return autocast.remembered_casts(op, leaves, spec, device, dtype, memo)


def test_autocast_is_asked_about_every_operator_that_differs(asked):
    with FakeTensorMode() as mode:
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        of = {
            "dtype": torch.randn(4, 4, dtype=torch.float16), "sizes": torch.randn(4, 5),
            "strides": x.t(),
            "device": torch.empty(4, 4, device="meta"),
            "gradient": torch.randn(4, 4, requires_grad=True),
        }  # fmt: skip
    memo: dict = {}
    with mode:
        for i, t in enumerate(of.values()):
            resolved(memo, aten.mm.default, x, t)
            assert len(asked) == i + 1, list(of)[i]
        for arguments in ((x, 1, False), (x, 1, True), (x, 1.0, True)):
            resolved(memo, aten.softmax.int, *arguments)
        resolved(memo, aten.mm.default, x, y)
        resolved(memo, aten.mm.default, x, x)  # one value
        resolved(memo, aten.mm.default, x, y, dtype=torch.float16)
        resolved(memo, aten.mm.default, x, y, device="cuda")
    assert len(asked) == len(of) + 7


def test_an_argument_without_a_hash_is_no_error(asked):
    with FakeTensorMode() as mode, mode:
        x = torch.randn(4, 4)
    memo: dict = {}
    for _ in range(2):
        leaves, spec = pytree.tree_flatten(((x,), {"odd": {1}}))
        assert (
            autocast.remembered_casts(aten.relu.default, leaves, spec, "cpu", torch.bfloat16, memo)
            is None
        )
    assert len(asked) == 2 and not memo


def test_layers_that_are_alike_are_asked_about_once(asked):
    def model(x, *weights):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for w in weights:
                x = norm(F.gelu(F.linear(x, w)) + x)
        return x

    counts = []
    for layers in (2, 6):
        asked.clear()
        collect(model, torch.randn(4, 8), *(torch.randn(8, 8) for _ in range(layers)))
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


# What a call of several operators became


def test_a_call_that_looks_at_a_lazy_conjugate():
    @torch.compiler.allow_in_graph
    def part(z):
        return norm((torch.real(z) if z.is_conj() else torch.imag(z)).mul(2.0))

    def f(z):
        return part(z), part(z.conj())

    check(f, torch.randn(4, 8, dtype=torch.complex64), fused=["layer_norm"] * 2)


def test_numbers_of_another_kind_are_another_call():
    x = torch.randn(2)
    keys = [key_of([x, number]) for number in (0, 0.0, -0.0, False, "0", None)]
    assert len(set(keys)) == len(keys) and key_of([x, {0}]) is None
    assert len({key_of([x, x]), key_of([x, x.clone()])}) == 2


# Which nodes hold one value


def test_zero_is_not_minus_zero():
    def f(x, y):
        plus, minus = (1 / (y * 0.0)).clamp(-1, 1), (1 / (y * -0.0)).clamp(-1, 1)
        return norm(plus * x), norm(minus * x)

    check(f, torch.randn(4, 8), torch.rand(4, 8) + 1, fused=["layer_norm"] * 2)


def test_an_integer_is_not_a_float():
    """2²⁴ + 1 is no fp32: the weight is 1 in integers, 0 in floats."""

    def f(x):
        one = torch.full((4, 8), (1 << 24) + 1) - (1 << 24)
        none = torch.full((4, 8), (1 << 24) + 1.0) - (1 << 24)
        return none, norm(one * x), norm(none * x)

    check(f, torch.randn(4, 8), fused=["layer_norm"] * 2)


def test_integers_do_not_hide_floats():
    """They are one expression but for their dtype, and only floats can be normalised."""

    def f(x):
        whole = torch.where(x > 0, 1, 0)
        return whole, norm(torch.where(x > 0, 1.0, 0.0))

    check(f, torch.randn(4, 8))


# What a reference gives


def test_the_default_dtype_counts(of_integers, monkeypatch):
    """Of which integers times a float are: the result is another, and under fp64 there
    is a cast.
    """
    name = of_integers.name
    monkeypatch.setattr(explain, "patterns", lambda: [of_integers])  # the others are not traced
    for dtype, kept in ((torch.float32, True), (torch.float64, True), (torch.float32, False)):
        if not kept:  # in this process; on disk are the templates of the other dtype
            of_integers.memo.clear()
        try:
            torch.set_default_dtype(dtype)
            given = torch.ones(4, 4, dtype=torch.int8)
            report = collect(lambda q: of_integers.reference(q), given).report
        finally:
            torch.set_default_dtype(torch.float32)
        assert name in [s.pattern for s in report.sites], str(report)
