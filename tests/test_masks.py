"""What masks keep, recovered from how they are made: fixed cases, near misses, and random
compositions.
"""

import os
import random

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.view import View
from fusion_backend.compat.torch import FakeTensorMode, trace
from fusion_backend.decide.facts import Facts
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.masks.analysis import hides
from fusion_backend.masks.terms import computed

from . import selection

INF, SMALLEST = float("-inf"), torch.finfo(torch.float32).min


class Values(fx.Interpreter):
    """Run a graph and keep the value of every node."""

    def run_node(self, n):
        self.kept = getattr(self, "kept", {})
        self.kept[n] = super().run_node(n)
        return self.kept[n]


def read(make, *inputs, dynamic=False):
    """The mask that `make(*inputs)` is found to be, and the graph that it was found in."""
    masks, result, gm = masks_of(make, *inputs, dynamic=dynamic)
    return masks.of(result), gm


def masks_of(make, *inputs, dynamic=False):
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    if dynamic:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, list(range(x.dim())))
    with mode:
        fakes = [mode.from_tensor(x, static_shapes=not dynamic) for x in inputs]
    with torch.no_grad():
        gm = trace(make, fakes, mode)
    view = View(gm, gm.graph, {}, {}, {}, set(), {}, {})
    functionalize_locals(view)
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    canon = Canon().run(gm.graph)
    return Facts(view, canon, False, {}).masks, output.args[0], gm


def materialised(found, gm, inputs, shape):
    """The mask by its description alone, with the values that these inputs give."""
    interpreter = Values(gm)
    interpreter.run(*inputs)
    n, m = (1, *shape)[-2:]
    apart = torch.arange(n)[:, None] - torch.arange(m)
    kept = torch.ones(shape, dtype=torch.bool)
    if found.low is not None:
        kept = kept & (apart >= number(found.low, interpreter))
    if found.high is not None:
        kept = kept & (apart <= number(found.high, interpreter))
    names = [*(f"b{k}" for k in range(len(shape) - 2)), "i", "j"][-len(shape) :]
    for part in found.parts:
        sizes = dict(zip(names, shape, strict=True))
        kept = kept & computed(
            part.term, sizes, interpreter.kept.get, lambda size: number(size, interpreter)
        )
    return kept


def number(bound, interpreter):
    """A bound may be a symbolic size: what it is for the inputs of a run."""
    if isinstance(bound, int):
        return bound
    sizes = {n.meta["val"].node.expr: v for n, v in interpreter.kept.items()
             if isinstance(n.meta.get("val"), torch.SymInt)}  # fmt: skip
    return int(bound.node.expr.subs(sizes))


def truth(mask):
    return mask if mask.dtype == torch.bool else mask == 0


X = torch.zeros(2, 6, 6)
PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


def grid(x):
    return torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])[None, :]


def causal(x):
    i, j = grid(x)
    return j <= i


def by_index(p):
    """As vmap leaves it: the padding vector indexed by batch and key."""
    b, j = (
        torch.arange(p.shape[0])[:, None, None, None],
        torch.arange(p.shape[1])[None, None, None, :],
    )
    i = torch.arange(p.shape[1])[None, None, :, None]
    return ((j <= i) & p.bool()[b, j]).expand(p.shape[0], -1, p.shape[1], p.shape[1])


def same_documents(x):
    positions = torch.arange(x.shape[-1])[None].expand(x.shape[0], -1)
    ids = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (ids[:, :, None] == ids[:, None, :]) & causal(x)


def written_to(x):
    mask = causal(x)
    mask[0, 0] = False
    return mask


def written_through_a_view(x):
    mask = causal(x)
    mask.view(-1)[3:].zero_()
    return mask


def additive(fill, dtype=torch.float32):
    return lambda x: torch.where(causal(x), torch.zeros((), dtype=dtype), fill)


# what it is: everything, causal, causal with an offset, a window, keys, documents, dense
CASES = {
    "causal": (causal, X, "causal"),
    "tril": (lambda x: torch.ones(6, 6, dtype=torch.bool).tril(), X, "causal"),
    "triu of -inf": (lambda x: torch.full((6, 6), INF).triu(1), X, "causal"),
    "complement of triu": (lambda x: ~torch.ones(6, 6, dtype=torch.bool).triu(1), X, "causal"),
    "tril equal to zero": (lambda x: torch.tril(torch.ones(6, 6)) != 0, X, "causal"),
    "tril of floats, filled": (
        lambda x: torch.zeros(6, 6).masked_fill(torch.ones(6, 6).tril() == 0, INF), X, "causal"),
    "one minus, times": (lambda x: (1.0 - causal(x).float()) * SMALLEST, X, "causal"),
    "within a distance": (lambda x: (grid(x)[0] - grid(x)[1]).abs() <= 2, X, "window"),
    "beyond a distance": (lambda x: abs(grid(x)[1] - grid(x)[0]) > 2, X, "dense"),
    "positions repeated": (
        lambda x: (p := torch.arange(6)[None].repeat(2, 1))[:, None, :] <= p[:, :, None], X,
        "causal"),
    "positions repeated along themselves": (
        lambda x: (p := torch.arange(3).repeat(2))[None, :] <= p[:, None], X, "dense"),
    "two additive masks": (lambda x: additive(SMALLEST)(x) + additive(SMALLEST)(x), X, "causal"),
    "additive": (additive(SMALLEST), X, "causal"),
    "additive of -inf": (additive(INF), X, "causal"),
    "additive of fp16": (additive(-65504.0, torch.float16), X, "causal"),
    "additive of -1e9": (additive(-1e9), X, "causal"),
    "additive of -1e4": (additive(-1e4), X, "dense"),
    "by a product of booleans": (lambda x: causal(x) * torch.ones(6, 6, dtype=torch.bool), X,
    "causal"),
    "by or with itself moved": (lambda x: causal(x) | (grid(x)[1] < grid(x)[0]), X, "causal"),
    "by squares": (lambda x: grid(x)[1] ** 2 <= grid(x)[0] ** 2, X, "dense"),
    "by floor division": (lambda x: grid(x)[1] * 2 // 2 <= grid(x)[0], X, "causal"),
    "documents of one": (same_documents, X, "causal"),
    "everything": (lambda x: grid(x)[1] >= 0 * grid(x)[0], X, "everything"),
    "everything, additive": (lambda x: torch.zeros(6, 6), X, "everything"),
    "ones": (lambda x: torch.ones(2, 1, 6, 6, dtype=torch.bool), X, "everything"),
    "ones in floats are a bias": (lambda x: torch.ones(6, 6), X, "dense"),
    "causal in floats is a bias": (lambda x: causal(x).float(), X, "dense"),
    "a row of keys": (lambda x: torch.arange(6) < 4, X, "dense"),
    "nothing": (lambda x: grid(x)[1] > grid(x)[0] + 9, X, "dense"),
    "without the diagonal": (lambda x: grid(x)[1] < grid(x)[0], X, "offset"),
    "one further": (lambda x: grid(x)[1] <= grid(x)[0] + 1, X, "offset"),
    "anti-causal": (lambda x: grid(x)[1] >= grid(x)[0], X, "window"),
    "window": (lambda x: causal(x) & (grid(x)[1] > grid(x)[0] - 3), X, "window"),
    "window of everything": (lambda x: causal(x) & (grid(x)[1] > grid(x)[0] - 6), X, "causal"),
    "all but one element": (lambda x: causal(x) & ((grid(x)[0] != 4) | (grid(x)[1] != 2)), X,
    "dense"),
    "written to": (written_to, X, "dense"),
    "written to through a view": (written_through_a_view, X, "dense"),
    "times an input": (lambda x: causal(x) * x[0].bool(), X, "dense"),
    "an additive mask plus an input": (lambda x: additive(SMALLEST)(x) + x[0], X, "causal"),
    "an additive mask times an input": (lambda x: additive(SMALLEST)(x) * x[0], X, "dense"),
    "a small additive mask plus an input": (lambda x: additive(-1e4)(x) + x[0], X, "dense"),
    "an additive mask and twice an input": (lambda x: torch.add(additive(SMALLEST)(x), x[0],
    alpha=2), X, "dense"),
    "an input where causal": (lambda x: torch.where(causal(x), x[0], SMALLEST), X, "causal"),
    "an input where not causal": (lambda x: torch.where(causal(x), SMALLEST, x[0]), X, "window"),
    "an input of another dtype where causal": (
        lambda x: torch.where(causal(x), x[0].half(), torch.full((1, 1), SMALLEST)), X, "dense"),
    "an input or another": (lambda x: torch.where(causal(x), x[0], x[1]), X, "dense"),
    "an input": (lambda x: x[0] > 0, X, "dense"),
    "padding": (lambda p: p[:, None, None, :].bool(), PADDING, "keys"),
    "padding, compared": (lambda p: (p != 0)[:, None, None, :], PADDING, "keys"),
    "padding, additive": (lambda p: (1.0 - p[:, None, None, :].float()) * SMALLEST, PADDING,
    "dense"),
    "padding, chosen": (lambda p: torch.where(p[:, None, None, :] == 1, 0.0, SMALLEST), PADDING,
    "keys"),
    "padding by index": (by_index, PADDING, "causal and keys"),
    "padding of the queries": (lambda p: p[:, None, :, None].bool(), PADDING, "dense"),
    "documents": (lambda d: d[:, :, None] == d[:, None, :], IDS, "documents"),
    "causal documents": (lambda d: (d[:, :, None] == d[:, None, :]) & torch.ones(6,
    6).tril().bool(), IDS,
                         "causal and documents"),
    "documents, not equal": (lambda d: d[:, :, None] != d[:, None, :], IDS, "dense"),
    "one query of a cache": (lambda x: grid(x)[1] <= torch.arange(5, 6)[:, None], X[:, :1],
    "everything"),
    "two queries of a cache": (lambda x: grid(x)[1] <= torch.arange(4, 6)[:, None], X[:, :2],
    "offset"),
    "wide, top left": (causal, X[:, :4], "causal, not square"),
}  # fmt: skip


def kind_of(found):
    kinds = {p.kind for p in found.parts}
    if found.everything:
        return "everything"
    if "dense" in kinds:
        return "dense"
    if found.high is not None:
        return "window"
    if not kinds and not found.causal:
        return "causal, not square" if found.low == 0 else "offset"
    return " and ".join(["causal"] * (found.low is not None) + sorted(kinds))


@pytest.mark.parametrize("name", CASES)
def test_what_a_mask_is(name):
    make, x, kind = CASES[name]
    found, gm = read(make, x)
    assert kind_of(found) == kind, f"{found}\n{gm.graph}"
    if all(p.term is not None for p in found.parts):
        want = truth(make(x))
        assert torch.equal(materialised(found, gm, [x], want.shape), want)


DYNAMIC = ("causal", "additive", "documents of one", "window", "without the diagonal",
    "one further", "anti-causal",
           "padding", "padding by index", "documents", "all but one element", "written to",
           "everything",
           "within a distance", "causal in floats is a bias", "two additive masks")  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_what_a_mask_of_dynamic_size_is(name):
    make, x, kind = CASES[name]
    found, gm = read(make, x, dynamic=True)
    assert kind_of(found) == kind, f"{found}\n{gm.graph}"
    bigger = torch.cat([x, x, x], -1)
    bigger = torch.cat([bigger, bigger, bigger], -2) if x.dim() == 3 else bigger
    if all(p.term is not None for p in found.parts):
        want = truth(make(bigger))
        assert torch.equal(materialised(found, gm, [bigger], want.shape), want)


def test_a_bottom_right_triangle_of_dynamic_size_is_an_offset():
    def make(x):
        i, j = grid(x)
        return j <= i + (x.shape[-1] - x.shape[-2])

    found, _ = read(make, torch.zeros(4, 7), dynamic=True)
    assert found.low is not None and not found.causal and not found.everything and not found.parts


def test_a_bias_by_distance_is_a_table():
    def make(x):
        i, j = grid(x)
        return -0.5 * (i - j).abs().float()

    masks, result, _ = masks_of(make, X)
    table = masks.values.by_difference(result)
    assert not masks.of(result).everything and table.shape == (11,)
    i, j = grid(X)
    assert torch.equal(table[i - j + 5], make(X))


def test_what_is_hidden():
    assert (
        hides(INF, torch.float32) and hides(-1e9, torch.float32) and hides(SMALLEST, torch.bfloat16)
    )
    assert hides(-65504.0, torch.float16) and not hides(-65504.0, torch.float32)
    assert (
        not hides(-1e4, torch.float32)
        and not hides(0.0, torch.float32)
        and not hides(float("nan"), torch.float32)
    )


# random masks; a fifth as many of dynamic size
COMPOSITIONS = int(os.environ.get("MASK_COMPOSITIONS", 0))  # 0: as many as the selection has


class Compositions:
    """Random masks of n queries and m keys as functions of (x [b, n, m], padding [b, m], ids [b,
    n]).
    """

    def __init__(self, seed: int, square: bool):
        self.random, self.square = random.Random(seed), square

    def pick(self, *choices):
        return self.random.choice(choices)

    def condition(self, depth: int):
        if depth == 0 or self.random.random() < 0.25:
            return self.atom()
        a, b = self.condition(depth - 1), self.condition(depth - 1)
        return self.pick(
            lambda *t: a(*t) & b(*t),
            lambda *t: torch.logical_and(a(*t), b(*t)),
            lambda *t: a(*t) * b(*t),
            lambda *t: a(*t) | b(*t),
            lambda *t: ~a(*t),
            lambda *t: a(*t) ^ b(*t),
            lambda *t: torch.where(a(*t), b(*t), False),
            lambda *t: torch.where(a(*t), True, b(*t)),
            lambda *t: a(*t).masked_fill(~b(*t), False),
            lambda *t: a(*t).long() != 0,
            lambda *t: (a(*t).long() + b(*t).long()) > 1,
            lambda *t: a(*t).int() * b(*t).int() == 1,
            lambda *t: a(*t).expand(t[0].shape[0], -1, -1)[:1],
            lambda *t: a(*t)[:, None].squeeze(1),
            lambda *t: a(*t).mT.mT,
            lambda *t: a(*t).clone().logical_not_(),
        )

    def atom(self):
        c, d = self.random.randint(-4, 4), self.random.randint(-3, 3)
        compare = self.pick(
            torch.le, torch.lt, torch.ge, torch.gt, torch.le, torch.ge, torch.eq, torch.ne
        )

        def places(x):
            return (torch.arange(x.shape[1]) + d)[None, :, None], torch.arange(d, x.shape[2] + d)[
                None, None, :
            ]

        def ones(x):
            return torch.ones(x.shape[1], x.shape[2], dtype=torch.bool)[None]

        atoms = [
            lambda x, p, ids: compare(places(x)[1], places(x)[0] + c),
            lambda x, p, ids: compare(places(x)[0] - places(x)[1], c),
            lambda x, p, ids: compare((places(x)[0] - places(x)[1] + d).abs(), c + 1),
            lambda x, p, ids: compare(
                places(x)[1].repeat(2, 1, 1)[:1], places(x)[0].repeat(1, 1, 1) + c
            ),
            lambda x, p, ids: ones(x).tril(c),
            lambda x, p, ids: ones(x).triu(c),
            lambda x, p, ids: torch.ones(x.shape[1], x.shape[2] + 3)[:, 3:][None].tril(c) > 0.5,
            lambda x, p, ids: ones(x),
            lambda x, p, ids: p[:, None, :].bool(),
            lambda x, p, ids: (
                p[torch.arange(p.shape[0])[:, None, None], torch.arange(p.shape[1])] != 0
            ),
            lambda x, p, ids: (p[:, None, :] > 0) & ones(x),
            lambda x, p, ids: places(x)[1].flip(-1) <= places(x)[0],
        ]
        if self.square:
            atoms += [
                lambda x, p, ids: ids[:, :, None] == ids[:, None, :],
                lambda x, p, ids: same_documents(x)[:1],
                lambda x, p, ids: ids[:, :, None] <= ids[:, None, :],
            ]
        return self.pick(*atoms)

    def mask(self):
        keep = self.condition(self.random.randint(0, 3))
        return self.pick(
            keep,
            keep,
            lambda *t: torch.where(keep(*t), 0.0, SMALLEST),
            lambda *t: torch.zeros(t[0].shape[1:]).masked_fill(~keep(*t), INF),
            lambda *t: (1.0 - keep(*t).float()) * SMALLEST,
        )

    def bias(self, keep, fill):
        """x where it is kept, in some words; once where it is not."""
        return self.pick(
            lambda *t: torch.where(keep(*t), t[0], fill),
            lambda *t: torch.where(keep(*t), fill, t[0][:1]).clone(),
            lambda *t: t[0].masked_fill(~keep(*t), fill),
            lambda *t: t[0] + torch.where(keep(*t), 0.0, fill),
            lambda *t: torch.where(keep(*t), 0.0, fill).add(t[0].half().float()).contiguous(),
        )


def inputs_of(b, n, m):
    torch.manual_seed(n * m)
    return torch.zeros(b, n, m), torch.randint(2, (b, m)), torch.randint(3, (b, n)).cumsum(-1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_random_compositions(dynamic):
    """What is recovered, written out again, is the very mask; and often enough something is
    recovered.
    """
    recovered = {}
    many = COMPOSITIONS or (150 if selection.FULL else 80)
    for seed in range(many // 5 if dynamic else many):
        square = seed % 2 == 0
        make = Compositions(seed, square).mask()
        sizes = [(2, 5, 5), (3, 8, 8)] if square else [(2, 3, 7), (2, 6, 4)]
        found, gm = read(make, *inputs_of(*sizes[0]), dynamic=dynamic)
        for size in sizes if dynamic else sizes[:1]:
            inputs = inputs_of(*size)
            want = truth(make(*inputs))
            assert all(p.term is not None for p in found.parts), f"{seed}: {found}\n{gm.graph}"
            have = materialised(found, gm, inputs, want.shape)
            assert torch.equal(have, want), f"{seed}: {found}\n{gm.graph}\n{have}\n{want}"
            if found.everything:
                assert want.all()
            if found.causal:
                assert torch.equal(want, torch.ones_like(want).tril())
        recovered[kind_of(found)] = recovered.get(kind_of(found), 0) + 1
    assert (
        recovered["everything"]
        and recovered["causal"]
        and recovered["window"]
        and recovered["keys"]
    ), recovered
    assert recovered["dense"] < sum(recovered.values()) * 0.75, recovered


def test_random_biases():
    """Where a mask with a bias in it is separated, the bias is the mask where it is kept, and
    hidden elsewhere.
    """
    separated, many = 0, 200 if selection.FULL else 80
    for seed in range(many):
        keep = (compositions := Compositions(seed, seed % 2 == 0)).condition(
            compositions.random.randint(0, 2)
        )
        fill = compositions.pick(SMALLEST, INF, -1e9, -1e4)
        make = compositions.bias(keep, fill)
        _, *rest = inputs_of(*((2, 5, 5) if seed % 2 == 0 else (2, 3, 7)))
        inputs = torch.randn(2, *((5, 5) if seed % 2 == 0 else (3, 7))), *rest
        found, gm = read(make, *inputs)
        if found.added is None:
            continue
        separated += 1
        want = make(*inputs)
        interpreter = Values(gm)
        interpreter.run(*inputs)
        kept = materialised(found, gm, inputs, want.shape)
        bias = interpreter.kept[found.added].expand_as(want)
        assert torch.equal(bias[kept], want[kept]), f"{seed}: {found}\n{gm.graph}"
        assert (kept.all() or fill < -1e4) and bool((want[~kept] <= -0.98e9).all()), (
            f"{seed}: {found}\n{gm.graph}"
        )
        assert found.fill in (None, torch.tensor(fill).item())
    assert separated > many * 0.4, separated
