"""The fingerprint of a pattern: another one after any edit of what it reaches, the same after none,
and a reason where something cannot be followed.
"""

import re
import sys
import types

import pytest

from fusion_backend.cache.fingerprint import MAX_OBJECTS, fingerprint
from fusion_backend.ops.registry import unregister

HELPERS = """
import collections, dataclasses, enum, functools, math
from torch import Tensor
import triton
import triton.language as tl

ALPHA, TABLE, SET = 2.0, {"a": [1.0, (102.5,)]}, frozenset({"x", "y"})
HALF: tl.constexpr = tl.constexpr(0.5)
Pair = collections.namedtuple("Pair", "left right")
PAIR = Pair(1, 11)

class Kind(enum.Enum):
    FIRST = 103.5

class Base:
    slope = 104.5
    def scale(self, x):
        return x * self.slope * 105.5

class Derived(Base):
    @staticmethod
    def shift(x): return x + 106.5
    @property
    def width(self): return 107.5

@dataclasses.dataclass
class Settings:
    beta: float = 108.5

SETTINGS = Settings(109.5)

def inner(x, by=110.5, *, more=112.5):
    return x * by * more

def act(x):
    return sum(inner(x) for _ in range(1)) + even(x, 0)

def even(x, n): return x if n == 0 else odd(x, n - 1)
def odd(x, n): return x * 113.5 if n == 0 else even(x, n - 1)

def around(factor):
    def inside(x): return x * factor
    return inside

def decorated(fn):
    @functools.wraps(fn)
    def wrapper(x): return fn(x) + 114.5
    return wrapper

closed, wrapped, partial = around(115.5), decorated(abs), functools.partial(inner, by=116.5)
wrapped.attribute = 117.5
cached = functools.lru_cache(lambda x: x * 118.5)
Outer = type("Outer", (), {"method": classmethod(lambda cls, x: x * 119.5)})

@triton.jit
def device(x): return x * 120.5

@triton.jit
def kernel(X, N: tl.constexpr):
    tl.store(X, device(tl.load(X)) * HALF + 121.5)
"""
PATTERN = """
import helpers
import torch
from helpers import ALPHA, SETTINGS, Derived, Kind, cached
from fusion_backend import Op, Pattern, Reject, Replacement

@Pattern(reciprocal=True)
def followed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = helpers.act(x) * ALPHA + len(helpers.TABLE) + later(y) * (x in helpers.SET)
    y = Derived().scale(y) + Derived.shift(y) + Kind.FIRST.value
    y = y + helpers.closed(x) + helpers.PAIR.right
    y = y + [helpers.wrapped(v) for v in (x,)][0] + helpers.partial(y)
    return y + (lambda: SETTINGS.beta)() + 122.5

@followed.spelling
def _(x, y): return cached(x) + y * 123.5

@followed.seeded
def _(x, y, seed): return helpers.math.pi * x + y + helpers.Outer.method(x) + 124.5

@followed.guard
def _(x, y): return Reject("125.5")

@followed.worthwhile
def _(x, y, training): return Reject("126.5")

@followed.kernel(saves=("mean",))
def _(x, y, seed, save):
    helpers.kernel[(1,)](x, 27)

@followed.saved
def _(x, y, seed): return x + 128.5

@followed.replacement(asks={"x": "attention_mask"})
def _(x, y, known, training): return Replacement(other, (x,), {}, "129.5")

@followed.backward(result=True, same={"y": "x"})
def _(saved, dy): return dy * 130.5, None

@followed.inputs(dict(n=31))
def _(tensor, n): return tensor(n), tensor(n)

@Op
def other(x: torch.Tensor) -> torch.Tensor: return x + 132.5

def later(x): return x + 133.5
"""
NUMBERS = sorted(set(re.findall(r"\b1\d\d\.5\b", HELPERS + PATTERN)))
EDITS = {number: number.replace(".5", ".75") for number in NUMBERS}
EDITS |= {
    "TABLE, SET = 2.0": "TABLE, SET = 3.0",
    "Pair(1, 11)": "Pair(1, 12)",
    '"x", "y"})': '"x", "z"})',
}
EDITS |= {
    "constexpr(0.5)": "constexpr(0.25)",
    "(x, 27)": "(x, 28)",
    "n=31": "n=32",
    'asks={"x": "attention_mask"}': 'asks={"y": "attention_mask"}',
}
EDITS |= {
    "reciprocal=True": "reciprocal=False",
    "backward(result=True": "backward(result=False",
    '"y": "x"': '"y": 0',
}
EDITS |= {
    "math.pi": "math.e",
    "class Derived(Base)": "class Derived(Base, dict)",
    '("mean",)': '("rstd",)',
}
EDITS |= {
    "def later(x): return x": "def later(x): return -x",
    '"a": [': '"b": [',
    "by * more": "more * by",
}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """made(edit) is the fingerprint of the pattern `followed`, its two modules edited, written and
    loaded anew.
    """

    def make(old="", new="", pattern=PATTERN, helpers=HELPERS):
        assert not old or old in pattern + helpers, f"{old} is not there"
        modules = {}
        for name, source in (("helpers", helpers), ("mine", pattern)):
            file, modules[name] = tmp_path / f"{name}.py", types.ModuleType(name)
            # Triton reads the source of its kernels
            file.write_text(source.replace(old, new) if old else source)
            monkeypatch.setitem(sys.modules, name, modules[name])
            exec(compile(file.read_text(), str(file), "exec"), vars(modules[name]))
        found = modules["mine"].followed
        for name in ("followed", "other"):
            unregister(name)
        return fingerprint(found)

    return make


def test_every_edit_counts(made):
    first = made()
    assert not first.opaque
    assert (
        made()
        == first
        == made(helpers="\n\n" + HELPERS + "\nunrelated = open\n", pattern="\n" + PATTERN)
    )
    assert len(NUMBERS) == 29
    found = {old: made(old, new) for old, new in EDITS.items()}
    assert not [old for old, f in found.items() if f == first or f.opaque]
    assert len({f.digest for f in found.values()}) == len(EDITS)


HEAD = """
import helpers
import torch
from fusion_backend import Pattern
"""
ONE = (
    HEAD
    + """
@Pattern
def followed(x: torch.Tensor) -> torch.Tensor:
    return {body}
"""
)
# What a pattern reaches that cannot be told by code alone, and what the reason says.
OPAQUE = {
    "a tensor": ("T = torch.ones(2)", "x * helpers.T", "an object of torch.Tensor"),
    "a module": ("W = torch.nn.Linear(2, 2)", "helpers.W(x)", "an object of torch"),
    "C code": ("import numpy as np", "x * helpers.np.sqrt(2.0)", "numpy"),
    "a built-in of a package": ("import numpy as np", "x * helpers.np.arange(2)[1]",
    "arange is not Python code"),
    "a module in a list": ("ALL = [__import__('helpers')]", "x * helpers.ALL[0].a",
    "helpers is used as a value"),
    "a module handed on": ("def take(m): return m.a", "x * helpers.take(helpers)",
    "helpers is used as a value"),
    "getattr on a module": ("a = 1.0", "x * getattr(helpers, 'a')", "helpers is used as a value"),
    "a module's dictionary": ("a = 1.0", "x * helpers.__dict__['a']", "helpers.__dict__"),
    "a module's __getattr__": ("def __getattr__(n): return 1.0", "x * helpers.missing",
    "helpers.missing"),
    "an import": ("def late(x):\n    import helpers\n    return x", "helpers.late(x)",
    "imports helpers"),
    "exec": ("def run(x):\n    exec('y = 1')\n    return x", "helpers.run(x)", "exec"),
    "globals": ("def run(x): return x * globals()['a']", "helpers.run(x)", "globals"),
    "a file": ("f = open", "x * float(helpers.f('number').read())", "open"),
    "an import by name": ("from importlib import import_module as i", "x * helpers.i('a').b",
    "import_module"),
    "a variable of the environment": ("import os", "x * float(helpers.os.getenv('A'))", "getenv"),
    "a generator": ("g = (i for i in 'a')", "x * next(helpers.g)",
    "an object of builtins.generator"),
    "objects in a set": ("s = {object}", "x * len(helpers.s)", "a set of objects"),
    "own state": ("class A:\n    def __getstate__(self): 1\na = A()", "x * helpers.a.b",
    "an object of helpers.A"),
    "too much": (f"a = [[i] for i in range({MAX_OBJECTS})]", "x * helpers.a[3][0]",
    f"more than {MAX_OBJECTS} objects"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_cannot_be_followed(kind, made):
    helpers, body, why = OPAQUE[kind]
    found = made(helpers="import torch\n" + helpers, pattern=ONE.format(body=body))
    assert why in found.opaque, found.opaque


# Things that patterns use and that need no following, or are followed whole.
FINE = [
    "torch.nn.functional.gelu(x) + torch.ops.aten.add.Tensor(x, 1).to(torch.float32)",
    "sum(map(torch.sin, [x])) + max(1, 2) + isinstance(x, torch.Tensor) + getattr(x, 'ndim')",
    "x * helpers.math.sqrt(2) + helpers.torch.pi"
    " + helpers.functools.reduce(helpers.operator.mul, [1, 2])",
    "helpers.quiet(x) * len(helpers.os.sep) * len(helpers.ordered)",
    "helpers.logger.debug('x') or x * float(helpers.fractions.Fraction(1, 2) * helpers.fraction)",
]
USED = """
import collections, fractions, functools, logging, math, operator, os, torch
logger, fraction = logging.getLogger("a"), fractions.Fraction(1, 3)
ordered = collections.OrderedDict(a=collections.defaultdict(list, b=[1]))
@torch.no_grad()
def quiet(x): return x
"""


@pytest.mark.parametrize("body", FINE)
def test_what_can_be_followed(body, made):
    found = made(helpers=USED, pattern=ONE.format(body=body))
    assert not found.opaque
    assert made(helpers=USED, pattern=ONE.format(body=body)) == found


def test_a_file_with_the_name_of_a_module_of_python_is_followed(monkeypatch, tmp_path, made):
    """`statistics.py` beside a script is the user's."""
    prints = []
    for number in (2.0, 3.0):
        (tmp_path / "statistics.py").write_text(f"def scale(x): return x * {number}")
        mine = types.ModuleType("statistics")
        mine.__file__ = str(tmp_path / "statistics.py")
        exec(compile((tmp_path / "statistics.py").read_text(), mine.__file__, "exec"), vars(mine))
        monkeypatch.setitem(sys.modules, "statistics", mine)
        prints.append(
            made(
                helpers="import statistics", pattern=ONE.format(body="helpers.statistics.scale(x)")
            )
        )
    assert prints[0] != prints[1] and not prints[0].opaque
