"""Whatever is below a rule, it is read in linear time and without recursion: doublings, of which
every level reads the one below twice, and chains of ten thousand.
"""

import contextlib
import functools
import inspect
import itertools
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from benchmarks.compiler.synthetic import decoder, graph
from fusion_backend.capture.view import View, embedded
from fusion_backend.compat.torch import FakeTensorMode
from fusion_backend.decide.facts import Facts
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.rules import RULES
from fusion_backend.masks.reader import ELEMENTS
from fusion_backend.masks.relative_index import index_of
from fusion_backend.testing import collect
from tests.canonical_cases import M, R
from tests.test_canonical import SAME, graph_of, rules_of
from tests.test_scale import passed

aten = torch.ops.aten
LEVELS, LONG = 64, 10_000
MODE = FakeTensorMode()


@contextlib.contextmanager
def within(seconds: float, frames: int = 150):
    """Fails after so many seconds of this process's time, whatever hangs, and where calls are
    nested deeper.
    """

    def late(*_):
        raise AssertionError(f"still running after {seconds} s")

    had, limit = signal.signal(signal.SIGVTALRM, late), sys.getrecursionlimit()
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    sys.setrecursionlimit(len(inspect.stack(0)) + frames)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, had)


@functools.cache
def fake(shape, dtype=torch.float32):
    with MODE:
        return torch.empty(shape, dtype=dtype)


class Tower:
    """A graph in the making. Nodes are added with the shape and dtype of their value; nothing is
    computed.
    """

    def __init__(self):
        self.graph, self.given = fx.Graph(), {}

    def value(self, shape, dtype=torch.float32) -> fx.Node:
        if (shape, dtype) not in self.given:
            n = self.given[shape, dtype] = self.graph.placeholder(f"x{len(self.given)}")
            n.meta["val"] = fake(shape, dtype)
        return self.given[shape, dtype]

    def call(self, target, *args, like: fx.Node, shape=None, dtype=None) -> fx.Node:
        n, val = self.graph.call_function(target, args), like.meta["val"]
        n.meta["val"] = fake(tuple(val.shape) if shape is None else shape, dtype or val.dtype)
        return n

    def apply(self, gm: fx.GraphModule, inputs: list[fx.Node]) -> list[fx.Node]:
        """The nodes of another graph on these."""
        env = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        for n in gm.graph.nodes:
            if n.op not in ("placeholder", "output"):
                env[n] = self.graph.node_copy(n, env.__getitem__)
        return list(env.values())


def unary(*steps):
    """One after the other; for a doubling, the sum of what they make of x and of x."""

    def step(t, x, double):
        y = x
        for one in steps:
            y = one(t, y, x)
        return t.call(aten.add.Tensor, x, y, like=x) if double else y

    return step


def binary(target):
    return lambda t, x, double: t.call(
        target, x, x if double else t.value(tuple(x.meta["val"].shape)), like=x
    )


def chosen(t, x, double):
    shape = tuple(x.meta["val"].shape)
    return t.call(
        aten.where.self, t.value(shape, torch.bool), x, x if double else t.value(shape), like=x
    )


def biased(t, x, double):
    return t.call(aten.add.Tensor, x if not double else t.call(aten.add.Tensor, x, x, like=x),
                  t.value(tuple(x.meta["val"].shape)[-1:]), like=x)  # fmt: skip


def multiplied(t, x, double):
    last = x.meta["val"].shape[-1]
    y = t.call(aten.matmul.default, x, t.value((last, last)), like=x)
    return t.call(aten.add.Tensor, x, y, like=x) if double else y


def multiplied_from_the_left(t, x, double):
    first = x.meta["val"].shape[-2] if x.meta["val"].dim() > 1 else 1
    if x.meta["val"].dim() < 2:
        return multiplied(t, x, double)
    y = t.call(aten.matmul.default, t.value((first, first)), x, like=x)
    return (
        t.call(aten.matmul.default, x, x, like=x)
        if double and first == x.meta["val"].shape[-1]
        else y
    )


def cast(dtype):
    return lambda t, y, x: t.call(aten.to.dtype, y, dtype, like=y, dtype=dtype)


def unsqueeze(t, y, x):
    return t.call(aten.unsqueeze.default, y, 0, like=y, shape=(1, *y.meta["val"].shape))


def view(t, y, x):
    return t.call(aten.view.default, y, list(x.meta["val"].shape), like=x)


def rows(t, y, x):
    shape = x.meta["val"].shape
    return t.call(
        aten.view.default, y, [-1, shape[-1]], like=x, shape=(shape[:-1].numel(), shape[-1])
    )


def transpose(t, y, x):
    shape = y.meta["val"].shape
    if len(shape) < 2:
        return y
    return t.call(aten.transpose.int, y, -2, -1, like=y, shape=(*shape[:-2], shape[-1], shape[-2]))


def times(number):
    return lambda t, y, x: t.call(aten.mul.Tensor, y, number, like=y)


def linear(t, y, x):
    last = y.meta["val"].shape[-1]
    return t.call(aten.linear.default, y, t.value((last, last)), t.value((last,)), like=y)


BF16, FP32 = torch.bfloat16, torch.float32
STEPS = {
    "sums": binary(aten.add.Tensor),
    "biases": biased,
    "products": binary(aten.mul.Tensor),
    "largest": binary(aten.maximum.default),
    "choices": chosen,
    "casts": unary(cast(BF16), cast(FP32)),
    "casts of factors": unary(times(0.5), cast(BF16), cast(FP32)),
    "transposed casts": unary(transpose, cast(BF16), transpose, cast(FP32)),
    "views": unary(unsqueeze, view),
    "rows of casts": unary(rows, cast(BF16), cast(FP32), view),
    "linear layers of rows": unary(rows, linear, view),
    "matrix products": multiplied,
    "matrix products from the left": multiplied_from_the_left,
}
# What the rules of softmax, linear layers and slices look through.
LOOKED_THROUGH = (
    "sums",
    "biases",
    "choices",
    "casts",
    "casts of factors",
    "transposed casts",
    "views",
    "rows of casts",
)
LOOKED_THROUGH += ("matrix products from the left",)


@functools.cache
def functions() -> dict:
    """Shape of the first input of floats -> functions of the cases of the rules, enough of them to
    use every rule.
    """
    found, missing = {}, set(RULES)
    for kinds, *fns in SAME.values():
        shape = of_floats(kinds)
        for fn in fns if shape else ():
            if new := rules_of(fn, kinds) & missing:
                missing -= new
                found.setdefault(shape, []).append((fn, kinds))
    # of integers alone; of process groups, and in place
    assert missing == {"aten::_int_mm", "_c10d_functional::wait_tensor", "aten::copy_"}
    return found


def of_floats(kinds) -> tuple | None:
    return next((k for k in kinds if type(k) is tuple), None)


def on_each(t: Tower, shape: tuple, double: bool) -> None:
    """All rules that have a case of this shape, on top of many of each step, one step after the
    other.
    """
    x, each = t.value(shape), LEVELS if double else LONG // 2 // len(STEPS)
    for step in STEPS.values():
        for _ in range(each):
            x = step(t, x, double)
        for fn, kinds in functions().get(shape, ()):
            gm = graph_of(fn, kinds)
            values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
            given = [t.value(tuple(v.shape), v.dtype) for v in values]
            given[kinds.index(shape)] = x
            t.apply(gm, given)


@pytest.mark.parametrize("double", [True, False], ids=["doublings", "chain"])
@pytest.mark.parametrize(
    "shape", sorted({of_floats(kinds) for kinds, *_ in SAME.values()} - {None}, key=str), ids=str
)
def test_every_rule_is_linear(shape, double):
    t = Tower()
    on_each(t, shape, double)
    with within(4):
        Canon().run(t.graph)


@pytest.mark.parametrize("step", LOOKED_THROUGH)
def test_rules_that_look_down_do_so_once(step):
    """Ten thousand of one step, and again and again a rule that may look down all of them."""
    t = Tower()
    x, k = t.call(aten.view.default, t.value((2, 3, 6)), [6, 6], like=t.value(M)), 0
    while len(t.graph.nodes) < 3 * LONG // 2:
        x, k = STEPS[step](t, x, False), k + 1
        if k % 8 == 0:
            t.call(aten.softmax.int, t.call(aten.matmul.default, x, x, like=x), -1, like=x)
            t.call(aten.softmax.int, x, -1, like=x)
            y = t.call(aten.linear.default, x, t.value(M), like=x)
            t.call(aten.view.default, y, [2, 3, 6], like=x, shape=(2, 3, 6))
            y = t.call(aten.matmul.default, t.value(R), x, like=t.value(R))
            t.call(aten.slice.Tensor, y, 1, 0, 3, like=x, shape=(4, 3))
    with within(4):
        Canon().run(t.graph)


# Masks.


def bools(target):
    return lambda t, c, double: t.call(
        target, c, c if double else t.value((6, 6), torch.bool), like=c
    )


def exclusive(t, c, double):
    """Either of two that both read the level below."""
    other = t.call(aten.bitwise_and.Tensor, c, t.value((6, 6), torch.bool), like=c)
    return t.call(
        aten.bitwise_xor.Tensor, c, other if double else t.value((6, 6), torch.bool), like=c
    )


def compared(t, c, double):
    n = t.call(aten.to.dtype, c, torch.int64, like=c, dtype=torch.int64)
    n = t.call(aten.add.Tensor, n, n if double else t.value((6, 6), torch.int64), like=n)
    return t.call(aten.gt.Scalar, n, 0, like=n, dtype=torch.bool)


def filled(t, c, double):
    y = t.call(aten.bitwise_not.default, c, like=c)
    return t.call(aten.where.self, c, y, c if double else t.value((6, 6), torch.bool), like=c)


def moved(t, c, double):
    y = t.call(aten.flip.default, c, [0], like=c)
    return t.call(aten.bitwise_or.Tensor, c, y, like=c) if double else y


CONDITIONS = {
    "and": bools(aten.bitwise_and.Tensor),
    "or": bools(aten.bitwise_or.Tensor),
    "xor": bools(aten.bitwise_xor.Tensor),
    "xor of and": exclusive,
    "compared": compared,
    "filled": filled,
    "moved": moved,
}


# Arguments that one rule or another takes: c is a condition `[6, 6]`, n and f are integers and
# floats of that shape.
TRIED = [
    ("n",), ("c",), ("n", "n"), ("c", "c"), ("c", "n", "n"), ("f",), ("f", "f"), ("n", 0),
    ("n", 0, 1), ("n", [0]),
    ("n", [1, 0]), ("n", [1, 1]), ("n", [6, 6]), ("n", 0, 0, 6), ("n", torch.int64),
    ("f", "c", 1.0), ("n", [2], 1),
    ("n", [2, 2], 1), ("n", ["n"]), ("n", 0, [2, 3]),
]  # fmt: skip
MADE_OF_NOTHING = {"aten::arange", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor"}
RULES_OF_MASKS = sorted(set(ELEMENTS) - MADE_OF_NOTHING)


@functools.cache
def call_of(name: str):
    """An operator of a rule of masks, what it can be given, and its result."""
    op = getattr(aten, name.removeprefix("aten::"))
    # not op.__getattr__, which puts new overloads in the place of those that others hold
    overloads = [getattr(op, overload) for overload in op.overloads()]
    values = dict(c=fake((6, 6), torch.bool), n=fake((6, 6), torch.int64), f=fake((6, 6)))
    for overload, inputs in itertools.product(overloads, TRIED):
        with MODE, contextlib.suppress(Exception):  # where these are not its arguments
            value = overload(*(given(a, values) for a in inputs))
            if isinstance(value, torch.Tensor):
                return overload, inputs, value
    raise LookupError(name)


def given(a, values: dict):
    return (
        [given(x, values) for x in a]
        if isinstance(a, list)
        else values[a]
        if isinstance(a, str)
        else a
    )


def on_top(t: Tower, name: str, c: fx.Node) -> fx.Node:
    """The operator of a rule over a condition, or over integers and floats made of it; where it is
    not zero.
    """
    overload, inputs, value = call_of(name)
    n = t.call(aten.to.dtype, c, torch.int64, like=c, dtype=torch.int64)
    f = t.call(aten.to.dtype, c, torch.float32, like=c, dtype=torch.float32)
    out = t.graph.call_function(overload, tuple(given(a, dict(c=c, n=n, f=f)) for a in inputs))
    out.meta["val"] = value
    return t.call(aten.ne.Scalar, out, 0, like=out, dtype=torch.bool)


@pytest.mark.parametrize("double", [True, False], ids=["doublings", "chain"])
def test_every_rule_of_masks_is_linear(double):
    t = Tower()
    i = t.call(aten.arange.default, 6, like=t.value((6,), torch.int64))
    i.kwargs = {"dtype": torch.int64}
    j, i = (
        t.call(aten.unsqueeze.default, i, d, like=i, shape=shape)
        for d, shape in enumerate([(1, 6), (6, 1)])
    )
    c = t.call(aten.le.Tensor, j, i, like=t.value((6, 6), torch.bool))
    asked = []
    for k, step in enumerate(CONDITIONS.values()):
        for _ in range(LEVELS if double else LONG // 2 // len(CONDITIONS)):
            c = step(t, c, double)
        # every rule on two steps or three
        asked += [on_top(t, name, c) for name in RULES_OF_MASKS[k % 3 :: 3]]
    view = View(None, t.graph, {}, {}, {}, set(), {}, {})
    with within(20, 600):
        masks = Facts(view, Canon().run(t.graph), False, {}).masks
        for n in asked:
            masks.of(n)
        for n in asked[::9]:
            index_of(n, masks)


def test_the_value_of_a_mask_is_computed_however_it_is_made():
    """Ten thousand operators that no rule follows that far, and no input decides: it is causal."""
    t = Tower()
    c = t.call(aten.ones.default, [6, 6], like=t.value((6, 6), torch.bool))
    c.kwargs = {"dtype": torch.bool}
    c = t.call(aten.tril.default, c, like=c)
    for _ in range(LONG // 2):
        c = t.call(aten.bitwise_not.default, c, like=c)
        c = t.call(aten.roll.default, c, [6], [0], like=c)
    with within(20, 300):
        view = View(None, t.graph, {}, {}, {}, set(), {}, {})
        assert Facts(view, Canon().run(t.graph), False, {}).masks.of(c).causal


@pytest.mark.parametrize("many", [6, 7, 8, 9])
def test_choices_in_each_other(many):
    """Few are read, more are a dense mask; nothing is lost."""
    t = Tower()
    m = t.call(aten.zeros.default, [6, 6], like=t.value((6, 6)))
    for k in range(many):
        there = t.call(aten.eq.Scalar, t.value((6, 6), torch.int64), k, like=m, dtype=torch.bool)
        m = t.call(aten.where.ScalarSelf, there, float("-inf"), m, like=m)
    view = View(None, t.graph, {}, {}, {}, set(), {}, {})
    found = Facts(view, Canon().run(t.graph), False, {}).masks.of(m)
    assert [p.kind for p in found.parts] == ["dense"] * len(found.parts)
    assert found.choice or many > 6, found


# The whole pass.


def test_embeddings_behind_a_doubling():
    t = Tower()
    ids = t.value((6,), torch.int64)
    x = t.call(aten.embedding.default, t.value(M), ids, like=t.value(M))
    table = x
    for _ in range(LEVELS):
        x = t.call(aten.add.Tensor, x, t.call(aten.sin.default, x, like=x), like=x)
    root = t.call(aten.exp.default, x, like=x)
    with within(2):
        assert embedded(x, {root}) is table


@pytest.fixture(scope="module")
def traced():
    """The templates of all patterns, which are no deeper than what they are traced from."""
    passed(decoder(1))


DOUBLINGS = {
    "sum": lambda x: x + x,
    "sum with its sine": lambda x: x + x.sin(),
    "sum with its product": lambda x: x + x * x,
    "sum with its cast": lambda x: x + x.to(torch.bfloat16).to(torch.float32),
    "product of rows": lambda x: x + (x.view(1, 8, 8) @ x).view(8, 8),
    "attention": lambda x: x + torch.softmax(x @ x.t() + x, -1) @ x,
}


@pytest.mark.parametrize("what", DOUBLINGS)
def test_the_pass_on_doublings(what, traced):
    def model(x):
        for _ in range(LEVELS):
            x = DOUBLINGS[what](x)
        return torch.softmax(x, -1), F.layer_norm(x, (8,))

    gm = graph(model, [(8, 8)])
    with within(10, 600):
        _, record, _ = passed(gm)
    assert record.error is None
    sites = [
        s for s in record.sites if s.pattern in ("softmax", "attention", "layer_norm") and s.fused
    ]
    assert len(sites) == (LEVELS if what == "attention" else 0) + 2, record.sites


def test_sums_before_a_softmax(traced):
    """Through Dynamo: what took seconds, and what was a RecursionError."""

    def model(x, y):
        z = x
        for _ in range(16):
            x = x + x
        for _ in range(900):
            z = z + y
        return x.softmax(-1), z.softmax(-1)

    with within(60, 900):
        report = collect(model, torch.randn(8, 8), torch.randn(8, 8), dynamic=False).report
    assert [g.error for g in report.graphs] == [None]
    assert [s.pattern for s in report.fused] == ["softmax", "softmax"]
