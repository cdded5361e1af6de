"""How many generated spellings of a pattern are recognised, and how many near misses left alone.

Every generated function (generate.py) is traced by Dynamo and rewritten with `fusion.gate=always`.
A spelling must compute what the reference does, value and gradient in fp64, and should be
recognised with all its arguments. Whatever was rewritten must compute what the function does in
eager, with no larger error against fp64 than `close` allows. Every other function runs in
inference, under no_grad; so does one that eager cannot differentiate.

Autocast can make a spelling more exact than the pattern: a convolution in bf16 plus a tensor in
fp32 is in fp32, and the pattern gives bf16. Such a spelling must be left alone and is not counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from fusion_backend.compat.torch import many_recompiles, pytree
from fusion_backend.frontends.explain import Collector
from fusion_backend.match.templates import templates
from fusion_backend.ops.pattern import Pattern
from fusion_backend.reporting.records import NO_GPU, NO_KERNEL, UNSUPPORTED
from fusion_backend.testing.asserts import fused_nodes
from fusion_backend.testing.compare import (
    FACTOR,
    ULPS,
    DropoutOfKernels,
    close,
    value_and_gradients,
)
from fusion_backend.testing.spelling.generate import Spelling, near_misses, spellings

SHORT = {torch.float32, torch.bfloat16, torch.float16}
ROUNDINGS = 64
SEVERAL = 8
# The causes of refusing a site that was found, because of what would take its place.
FOUND = (NO_GPU, NO_KERNEL, UNSUPPORTED)
CASTS = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}


class CastsTo(TorchFunctionMode):
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
    """What became of one function. `wrong` is empty where the rewritten function is right."""

    spelling: Spelling
    training: bool
    recognised: bool  # a site of the pattern that holds all of its arguments
    fused: bool  # anything at all
    same: bool  # it computes what the reference does
    wrong: str  # how the rewritten function differs from the function
    reason: str  # why it was not recognised
    ran: bool = True  # a change may leave shapes that do not fit
    more_exact: bool = False  # not recognised: the pattern would round its result to 16 bits


@dataclasses.dataclass
class Recall:
    """The outcomes for one pattern. `changed`: the functions that were generated as near misses."""

    pattern: Pattern
    spellings: list[Outcome]
    changed: list[Outcome]

    @property
    def near_misses(self) -> list[Outcome]:
        """The changed functions that no longer compute what the reference does."""
        return [o for o in self.changed if not o.same]

    @property
    def faults(self) -> list[Outcome]:
        """Functions generated as spellings that do not compute what the reference does."""
        return [o for o in self.spellings if not o.same]

    @property
    def counted(self) -> list[Outcome]:
        return [o for o in self.spellings if o.same and not o.more_exact]

    @property
    def unrecognised(self) -> list[Outcome]:
        return [o for o in self.counted if not o.recognised]

    @property
    def wrong(self) -> list[Outcome]:
        return [o for o in (*self.spellings, *self.changed) if o.wrong]

    @property
    def left_alone(self) -> list[Outcome]:
        return [o for o in self.near_misses if not o.fused]

    def row(self) -> dict:
        """The counts. Those of spellings are by mode too, training or inference."""
        counts = {"pattern": self.pattern.name}
        for mode, training in (("training", True), ("inference", False)):
            of_mode = [o for o in self.counted if o.training is training]
            counts[mode] = len(of_mode)
            counts[f"recognised_in_{mode}"] = sum(o.recognised for o in of_mode)
        return counts | dict(
            spellings=counts["training"] + counts["inference"],
            recognised=counts["recognised_in_training"] + counts["recognised_in_inference"],
            more_exact=sum(o.more_exact for o in self.spellings),
            faults=len(self.faults),
            near_misses=len(self.near_misses),
            near_misses_in_training=sum(o.training for o in self.near_misses),
            left_alone=len(self.left_alone),
            functions=len(self.spellings) + len(self.changed),
            wrong=len(self.wrong),
        )

    def to_blame(self) -> list[tuple[str, int, int]]:
        """The words of unrecognised spellings: (words, unrecognised, uses), those first of which
        the largest part is unrecognised.
        """
        missed = collections.Counter(w for o in self.unrecognised for w in set(o.spelling.words))
        uses = collections.Counter(w for o in self.spellings for w in set(o.spelling.words))
        return sorted(
            ((w, k, uses[w]) for w, k in missed.items()), key=lambda found: -found[1] / found[2]
        )


def recall(
    pattern: Pattern,
    kinds: tuple[str, ...] | None = None,
    count: int = 40,
    misses: int | None = None,
    seed: int = 0,
) -> Recall:
    """Generate `count` spellings and `misses` near misses of a pattern, and check each.

    kinds, seed: as `spellings` takes them; misses: `count` by default.

        found = recall(rms_norm, count=8)
        print(found.row())
    """
    misses = count if misses is None else misses
    spelled, changed = (
        spellings(pattern, kinds, count, seed),
        near_misses(pattern, kinds, misses, seed),
    )
    outcomes = (outcome(s, i % 2 == 0 or "detach" in s.words[0]) for i, s in enumerate(changed))
    return Recall(
        pattern,
        [outcome(s, i % 2 == 0) for i, s in enumerate(spelled)],
        [o for o in outcomes if o.ran],
    )


def outcome(s: Spelling, training: bool = True) -> Outcome:
    """Run one function as eager does and as rewritten, with gradients where wanted and possible."""
    error = ""
    for grad in (True, False) if training else (False,):  # most in-place code is for inference
        try:
            run(s.fn, s.tensors, grad)
            exact, found = (
                computed_in(torch.float64, fn, s.tensors, grad) for fn in (s.fn, s.reference)
            )
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        else:
            return compared(s, grad, len(exact) == len(found) and all(map(agree, exact, found)))
    return Outcome(s, False, False, False, False, "", f"it does not run: {error}", ran=False)


def compared(s: Spelling, training: bool, same: bool) -> Outcome:
    """The rewritten function: is it recognised, is it right?"""
    collector = Collector({"fusion.gate": "always", "fusion.only": [s.pattern.name]})
    wrong, rewritten = "", torch.compile(s.fn, backend=collector, dynamic=False)
    with many_recompiles():
        try:
            run(rewritten, s.tensors, training)
        # eager checks more than compiled code does: mixed dtypes, results that were overwritten
        except Exception as error:
            # Inductor would draw other random numbers: there is nothing to compare
            random = s.kinds in s.pattern.memo.get("random", ())
            wrong, rewritten = ("", s.fn) if random else compiled(s, training, error)
        wrong = wrong or differs(s, rewritten, training)
    if len(collector.report.graphs) > len(collector.graphs):
        wrong = wrong or "the pass raised"
    nodes = [n for gm in graphs(collector) for n in fused_nodes(gm)]
    whole = [
        n
        for n in nodes
        if sum(isinstance(a, torch.fx.Node) for a in n.args) == s.kinds.count("tensor")
    ]
    sites = [site for site in collector.report.sites if site.pattern == s.pattern.name]
    recognised = bool(whole) or any(site.fused and site.forward == "library" for site in sites)
    # never inlined: without a kernel it can only be found
    if s.kinds in s.pattern.memo.get("random", ()):
        recognised = any(site.fused or site.cause in FOUND for site in sites)
    more_exact = same and not recognised and is_more_exact(s, collector)
    reasons = [*(s.reason for s in sites), *map(str, collector.report.misses)]
    reason = "" if recognised else "\n".join(reasons) or "no site and no near miss"
    fused = bool(nodes)
    return Outcome(s, training, recognised, fused, same, wrong, reason, more_exact=more_exact)


def is_more_exact(s: Spelling, collector: Collector) -> bool:
    """Does it match under autocast except that a result is in fp32, with more bits than the
    pattern's 16?
    """
    if 'torch.autocast("cpu", torch.bfloat16)' not in s.source:
        return False
    told = "the result is torch.float32, the pattern gives torch.bfloat16"
    misses = [m for m in collector.report.misses if m.pattern == s.pattern.name]
    if not any(m.matched == m.size and told in m.reason for m in misses):
        return False
    results = (t for t in run(s.fn, s.tensors, False) if t.dtype == torch.float32)
    return any(not torch.equal(t, t.bfloat16().float()) for t in results)


def differs(s: Spelling, rewritten, training: bool) -> str:
    """How the rewritten function is worse than the function itself, in value or gradient; the
    errors are those against fp64.

    The largest of a few errors of the size of a rounding is a matter of chance. Such errors are
    judged by their root mean square over five draws of the inputs.
    """
    found = measured(s, rewritten, s.tensors, training)
    if isinstance(found, str):
        return found
    # the reference rounds as it does by itself
    wrong = [close(g, p, e) and close(g, n, e) for g, p, n, e in found]
    if sums_before_integers(s.pattern):
        wrong = [
            w and not as_good_integers(*one) and w for w, one in zip(wrong, found, strict=True)
        ]
    if not any(wrong) or not all(
        rounded(g, p, e) for (g, p, _, e), w in zip(found, wrong, strict=True) if w
    ):
        return next(filter(None, wrong), "")
    generator = torch.Generator().manual_seed(0)
    draws = [[scattered(t, generator) for t in s.tensors] for _ in range(4)]
    outputs = zip(
        found, *(measured(s, rewritten, tensors, training) for tensors in draws), strict=True
    )
    return next(
        filter(None, (w and worse(of_draws) for w, of_draws in zip(wrong, outputs, strict=True))),
        "",
    )


def sums_before_integers(pattern: Pattern) -> bool:
    """Does it compute a mean or a sum? Then its rounding decides on which side of a tie an integer
    falls.
    """
    pending = [root for t in templates(pattern) for root in t.roots]
    while pending:
        e = pending.pop()
        if e.op in ("mean", "sum"):
            return True
        pending += e.args
    return False


def as_good_integers(got, plain, narrow, exact) -> bool:
    """Are at most FACTOR times as many integers wrong as unfused, none by more than one above the
    largest unfused error?
    """
    if got.dtype.is_floating_point or got.shape != exact.shape or got.dtype != plain.dtype:
        return False
    mine, *theirs = ((t.double() - exact.double()).abs() for t in (got, plain, narrow))
    most = max(int((t > 0).sum()) for t in theirs)
    return int((mine > 0).sum()) <= FACTOR * most and mine.max() <= max(t.max() for t in theirs) + 1


def measured(
    s: Spelling, rewritten, tensors: list[torch.Tensor], training: bool
) -> list[tuple] | str:
    """Each output four times: rewritten, in eager, in eager with every cast to bf16 (where there is
    bf16), in fp64. A sentence where the number of outputs differs.
    """
    with DropoutOfKernels():
        plain, got = run(s.fn, tensors, training), run(rewritten, tensors, training)
        exact, narrow = computed_in(torch.float64, s.fn, tensors, training), plain
        if any(t.dtype == torch.bfloat16 for t in tensors):
            with contextlib.suppress(NotImplementedError):  # there are operators without bf16
                narrow = computed_in(torch.bfloat16, s.fn, tensors, training)
    if len(got) != len(exact):
        return f"{len(got)} results instead of {len(exact)}"
    return list(zip(got, plain, narrow, exact, strict=True))


def scattered(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other values with the same signs."""
    return (
        t * (0.5 + torch.rand(t.shape, generator=generator)).to(t.dtype)
        if t.is_floating_point()
        else t
    )


def rounded(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> bool:
    """Is the error no more than a few roundings of the largest value, or several of the unfused
    errors? Under autocast a loss in fp32 has errors of bf16.
    """
    if got.shape != exact.shape or not got.dtype.is_floating_point:
        return False
    error, unfused = ((t.double() - exact).abs().max().item() for t in (got, plain))
    rounding = torch.finfo(got.dtype).eps * exact.abs().max().item()
    return error <= max(ROUNDINGS * rounding, SEVERAL * unfused)


def worse(of_draws: tuple[tuple, ...]) -> str:
    """One output in several draws: what is wrong where its root mean square error is more than is
    allowed of the largest error.
    """

    def rms(values) -> float:
        return torch.cat([v.double().flatten() for v in values]).square().mean().sqrt().item()

    mine, plain, narrow = (rms(d[i].double() - d[3] for d in of_draws) for i in range(3))
    floor = ULPS * torch.finfo(of_draws[0][0].dtype).eps * rms(d[3] for d in of_draws)
    fine = mine <= max(FACTOR * max(plain, narrow), floor)
    return (
        ""
        if fine
        else f"error {mine:.3g} against fp64 in the mean, the unfused one has "
        f"{max(plain, narrow):.3g}"
    )


def compiled(s: Spelling, grad: bool, error: Exception) -> tuple[str, Callable]:
    """A function whose rewritten graph cannot run in eager, compiled by Inductor instead: "" and
    the compiled function, or the error and the function itself.
    """
    options = {"fusion.gate": "always", "fusion.only": [s.pattern.name]}
    try:
        rewritten = torch.compile(s.fn, backend="fusion", options=options, dynamic=False)
        run(rewritten, s.tensors, grad)
    except Exception:
        return f"{type(error).__name__}: {error}", s.fn
    return "", rewritten


def graphs(collector: Collector) -> Iterator[torch.fx.GraphModule]:
    """The rewritten graphs and the bodies within them."""
    for gm in collector.graphs:
        yield from (m for m in gm.modules() if isinstance(m, torch.fx.GraphModule))


def run(
    fn, tensors: list[torch.Tensor], grad: bool, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Results and gradients on copies of the tensors, with the same random numbers every time."""
    args = [
        a.detach().clone().to(dtype if a.is_floating_point() and dtype else a.dtype)
        for a in tensors
    ]
    args = [a.requires_grad_(grad and a.is_floating_point()) for a in args]
    torch.manual_seed(0)
    with contextlib.nullcontext() if grad else torch.no_grad():
        return value_and_gradients(fn, args, seed=1)  # 0 would give the inputs again


def computed_in(
    dtype: torch.dtype, fn, tensors: list[torch.Tensor], grad: bool
) -> list[torch.Tensor]:
    """Results and gradients with everything in one dtype. Checkpoints are run inline: they would
    run their body again outside of the mode.
    """
    inline = unittest.mock.patch(
        "torch.utils.checkpoint.checkpoint", lambda fn, *args, **how: fn(*args)
    )
    with inline, CastsTo(dtype):
        return run(fn, tensors, grad, dtype)


def agree(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(
        a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True
    )
