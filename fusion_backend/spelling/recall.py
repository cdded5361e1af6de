"""How well a pattern is recognised: generated spellings and near misses (spelling.py), each proven.

Of each function, traced by Dynamo and rewritten with the gate open: a spelling computes what the reference does, value
and gradient in fp64; it is recognised, whole; whatever was rewritten computes what the function itself does in eager,
no worse against fp64.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import unittest.mock
from collections.abc import Iterator

import torch
from torch.overrides import TorchFunctionMode

from fusion_backend.collect import Collector
from fusion_backend.pattern import Pattern
from fusion_backend.spelling.author import Spelling, near_misses, spellings
from fusion_backend.testing import close, fused_nodes, value_and_gradients
from fusion_backend.torch_api import many_recompiles, pytree

SHORT = {torch.float32, torch.bfloat16, torch.float16}
CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class Computing(TorchFunctionMode):
    """All casts between floats become casts to one dtype."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in CASTS:
            return args[0].to(self.dtype)
        dtypes = {d: self.dtype for d in SHORT}
        args, kwargs = pytree.tree_map(
            lambda a: dtypes.get(a, a) if type(a) is torch.dtype else a, (args, kwargs or {})
        )
        return func(*args, **kwargs)


@dataclasses.dataclass
class Outcome:
    """What became of one function. `wrong` and `fault` are empty when all is well."""

    spelling: Spelling
    training: bool
    recognised: bool  # a site of the pattern that holds all of its arguments
    fused: bool  # anything at all
    same: bool  # it computes what the reference does
    wrong: str  # how the rewritten function differs from the function
    reason: str  # why it was not recognised


@dataclasses.dataclass
class Recall:
    """The outcomes for one pattern."""

    pattern: Pattern
    spellings: list[Outcome]
    near_misses: list[Outcome]

    @property
    def faults(self) -> list[Outcome]:
        """Spellings that are none: a fault of the generator."""
        return [o for o in self.spellings if not o.same]

    @property
    def unrecognised(self) -> list[Outcome]:
        return [o for o in self.spellings if o.same and not o.recognised]

    @property
    def wrong(self) -> list[Outcome]:
        return [o for o in (*self.spellings, *self.near_misses) if o.wrong]

    @property
    def left_alone(self) -> list[Outcome]:
        return [o for o in self.near_misses if not o.fused]

    def row(self) -> dict:
        found = [o for o in self.spellings if o.recognised]
        return dict(
            pattern=self.pattern.name,
            spellings=len(self.spellings),
            training=sum(o.training for o in self.spellings),
            recognised=len(found),
            faults=len(self.faults),
            near_misses=len(self.near_misses),
            left_alone=len(self.left_alone),
            wrong=len(self.wrong),
        )

    def to_blame(self) -> list[tuple[str, int, int]]:
        """The words that unrecognised spellings have in common: (words, unrecognised, uses), the likeliest first."""
        missed = collections.Counter(w for o in self.unrecognised for w in set(o.spelling.words))
        uses = collections.Counter(w for o in self.spellings for w in set(o.spelling.words))
        return sorted(((w, k, uses[w]) for w, k in missed.items()), key=lambda found: -found[1] / found[2])


def recall(pattern: Pattern, kinds=None, count: int = 40, misses: int | None = None, seed: int = 0) -> Recall:
    """Generate and prove `count` spellings and `misses` near misses (as many, by default) of a pattern."""
    misses = count if misses is None else misses
    return Recall(
        pattern,
        [outcome(s) for s in spellings(pattern, kinds, count, seed)],
        [o for s in near_misses(pattern, kinds, misses, seed) if (o := outcome(s, near_miss=True)) and not o.same],
    )


def outcome(s: Spelling, near_miss: bool = False) -> Outcome | None:
    """Run one function as eager does and as rewritten. None for a near miss that does not run: shapes do not fit."""
    found = None
    for training in (True, False):  # what eager cannot differentiate, as most in-place code, is for inference
        try:
            plain, exact = run(s.fn, s, training), computed_in(torch.float64, s.fn, s, training)
            found = computed_in(torch.float64, s.reference, s, training)
            break
        except Exception:
            if not near_miss and not training:
                raise
    if found is None:
        return None
    same = len(exact) == len(found) and all(map(agree, exact, found))
    collector = Collector({"fusion.gate": "always", "fusion.only": [s.pattern.name]})
    crash, got = "", []
    try:
        with many_recompiles():
            got = run(torch.compile(s.fn, backend=collector, dynamic=False), s, grad=training)
    except Exception as error:  # eager has checks that compiled code has not: of mixed dtypes, of written results
        crash, got = compiled(s, training, error)
    nodes = [n for gm in graphs(collector) for n in fused_nodes(gm)]
    whole = [n for n in nodes if sum(isinstance(a, torch.fx.Node) for a in n.args) == s.kinds.count("tensor")]
    sites = [site for site in collector.report.sites if site.pattern == s.pattern.name]
    recognised = bool(whole)
    if s.kinds in s.pattern.memo.get("random", ()):  # never inlined: without a kernel it can only be found
        recognised = any(site.fused or "kernel" in site.reason for site in sites)
    wrong = crash or "" if crash or len(got) == len(exact) else f"{len(got)} results instead of {len(exact)}"
    narrow = plain if "island" not in s.words else computed_in(torch.bfloat16, s.fn, s, training)
    for g, p, n, e in zip(got, plain, narrow, exact, strict=False):  # an inlined reference rounds as it does by itself
        wrong = wrong or (close(g, p, e) and close(g, n, e))
    told = [*(g.error for g in collector.report.graphs if g.error), *(s.reason for s in sites)]
    told += map(str, collector.report.misses)
    reason = "" if recognised else "\n".join(told) or "no site and no near miss"
    return Outcome(s, training, recognised, bool(nodes), same, wrong, reason)


def compiled(s: Spelling, grad: bool, error: Exception) -> tuple[str, list]:
    """What could not run as it stood, through Inductor: the error and no result when that fails too."""
    options = {"fusion.gate": "always", "fusion.only": [s.pattern.name]}
    try:
        return "", run(torch.compile(s.fn, backend="fusion", options=options, dynamic=False), s, grad)
    except Exception:
        return f"{type(error).__name__}: {error}", []


def graphs(collector: Collector) -> Iterator[torch.fx.GraphModule]:
    """The rewritten graphs and the bodies within them."""
    for gm in collector.graphs:
        yield from (m for m in gm.modules() if isinstance(m, torch.fx.GraphModule))


def run(fn, s: Spelling, grad: bool = True, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Results and gradients on fresh tensors, every draw of random numbers the same."""
    args = [a.detach().clone().to(dtype if a.is_floating_point() and dtype else a.dtype) for a in s.tensors]
    args = [a.requires_grad_(grad and a.is_floating_point()) for a in args]
    torch.manual_seed(0)
    with contextlib.nullcontext() if grad else torch.no_grad():
        return value_and_gradients(fn, args)


def computed_in(dtype: torch.dtype, fn, s: Spelling, grad: bool) -> list[torch.Tensor]:
    """Everything in one dtype. A checkpoint would run its body again out of reach of the mode."""
    inline = unittest.mock.patch("torch.utils.checkpoint.checkpoint", lambda fn, *args, **how: fn(*args))
    with inline, Computing(dtype):
        return run(fn, s, grad, dtype)


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
