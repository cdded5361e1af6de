"""Each rule of canonical.py preserves values: what it reads as one expression is one value in fp64,
and what is another value, or another rounding that nobody allowed, stays another expression.
"""

import functools
import math

import pytest
import torch

from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.view import View, is_lowered
from fusion_backend.compat.torch import FakeTensorMode, trace
from fusion_backend.ir import rules_shape
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.ir.rules import RULES
from fusion_backend.ir.rules_shape import with_dimension
from fusion_backend.ir.schema_args import SYNONYMS
from fusion_backend.testing import assert_fuses
from tests import canonical_cases, canonical_others
from tests.canonical_cases import BYTES, INTS, LABELS, MASK, M
from tests.canonical_complex import COMPLEX, OTHER_COMPLEX
from tests.canonical_losses import LOSSES
from tests.canonical_norms import NORMS

SAME = canonical_cases.SAME | NORMS | LOSSES | COMPLEX
OTHER = canonical_others.OTHER | OTHER_COMPLEX


def made(kind):
    """Random values in fp64; in matrices also infinities, NaN and zeros."""
    generator = torch.Generator().manual_seed(len(str(kind)))
    if kind == MASK:
        return torch.rand(4, 6, generator=generator) > 0.4
    if kind == BYTES:
        return torch.randint(-128, 128, (32, 32), generator=generator, dtype=torch.int8)
    if kind in (INTS, LABELS):
        return torch.randint(0, 6, (4, 6) if kind == INTS else (4,), generator=generator)
    x = torch.randn(kind, generator=generator, dtype=torch.float64)
    if kind == M:
        x[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    return x


@functools.cache
def graph_of(fn, kinds):
    mode = FakeTensorMode()
    with mode:
        fakes = [
            torch.empty_like(made(k), dtype=torch.float32 if type(k) is tuple else None)
            for k in kinds
        ]
    with torch.no_grad():
        gm = trace(lambda *args: fn(*args), fakes, mode)
    functionalize_locals(View(gm, gm.graph, {}, {}, {}, set(), {}, {}))
    return gm


def read(canon, fn, kinds):
    """The expressions that a function returns; inputs go by their place."""
    gm = graph_of(fn, kinds)
    for i, n in enumerate(p for p in gm.graph.nodes if p.op == "placeholder"):
        canon.variable(n, f"x{i}")
    canon.run(gm.graph)
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    outs = output.args[0]
    return [canon.of[o] for o in (outs if isinstance(outs, (tuple, list)) else (outs,))]


def rules_of(fn, kinds) -> set[str]:
    return {n.target._schema.name for n in graph_of(fn, kinds).graph.nodes if is_lowered(n)}


@pytest.mark.parametrize("what", SAME)
def test_one_value_is_one_expression(what):
    kinds, *fns = SAME[what]
    canon = Canon()
    found = [read(canon, fn, kinds) for fn in fns]
    for fn, expressions in zip(fns, found, strict=True):
        assert expressions == found[0], (
            f"line {fn.__code__.co_firstlineno if hasattr(fn, '__code__') else fn}"
        )


@pytest.mark.parametrize("what", SAME)
def test_one_expression_is_one_value(what):
    kinds, first, *rest = SAME[what]
    args = [made(k) for k in kinds]
    for fn in rest:
        torch.testing.assert_close(fn(*args), first(*args), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("what", OTHER)
def test_another_value_is_another_expression(what):
    kinds, *fns = OTHER[what]
    canon = Canon()
    found = [e for fn in fns for e in read(canon, fn, kinds)]
    assert len(set(found)) == len(found) > 1, found


def test_every_rule_has_a_case():
    covered = {name for kinds, *fns in SAME.values() for fn in fns for name in rules_of(fn, kinds)}
    synonyms = {name for name, of in SYNONYMS.items() if of in RULES}
    of_ranks = {"_c10d_functional::wait_tensor", "aten::copy_"}  # tests/ranks/test_all_reduce.py
    missing = sorted({*RULES, *synonyms} - covered - of_ranks)
    assert not missing, " ".join(missing)


def test_grad_mode_is_part_of_a_value():
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)

    def constant(x, y):
        with torch.no_grad():
            t = x + y
        return t * 2.0

    assert_fuses(lambda x, y: (x + y) * 2.0, x, y, pattern="add_mul")
    assert_fuses(constant, x, y, pattern="add_mul", count=0)
    assert_fuses(lambda x, y: (x + y).detach() * 2.0, x, y, pattern="add_mul", count=0)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_shape_of_a_value_that_has_its_dimension_again(dim):
    (found,) = read(Canon(), lambda x: (x.mean(dim) + 1).sqrt().unsqueeze(dim), ((2, 3, 4),))
    root, total = found.op, found.args[0]
    assert (root, total.op) == ("sqrt", "add")
    assert (
        found.shape == total.shape == tuple(1 if i == dim else n for i, n in enumerate((2, 3, 4)))
    )


def test_a_value_under_another_grad_mode_has_no_dimension_again():
    kinds = ((4, 6),)
    graph = graph_of(lambda x: (x.mean(-1) + 1).sqrt().unsqueeze(-1), kinds).graph
    (root,) = [n for n in graph.nodes if is_lowered(n) and n.target._schema.name == "aten::sqrt"]
    for region, op in (({}, "sqrt"), ({root: "without"}, "unsqueeze")):
        canon = Canon().run(graph, region)
        assert canon.of[next(iter(root.users))].op == op


def test_a_value_of_unknown_shape_has_no_dimension_again():
    c = Canon()
    column = c.make("var", (), "x", (4, 1))
    root = c.make("sqrt", (c.make("squeeze", (column,), (-1,), (4,)),))
    assert with_dimension(c, root, -1, {}) is None


def test_values_that_are_read_twice_are_looked_at_once(monkeypatch):
    calls = []

    def counted(*given):
        calls.append(given)
        return with_dimension(*given)

    monkeypatch.setattr(rules_shape, "with_dimension", counted)

    def doubled(x):
        y = x.mean(-1)
        for _ in range(12):
            y = y * y
        return y.unsqueeze(-1)

    (found,) = read(Canon(), doubled, ((4, 6),))
    assert found.op == "mul" and len(calls) < 40
