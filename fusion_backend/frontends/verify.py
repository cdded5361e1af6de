"""`fusion.verify`: a graph with fused sites against plain Inductor's, on the first real inputs.

Both are compiled. The first call runs both on twins of its inputs, compares what they compute and
times them in turn; one stays, and computes the user's call. In training a run is forward and
backward.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from fusion_backend.compat.distributed import collective, fakes_first
from fusion_backend.compat.torch import (
    RestartAnalysis,
    apart_from_context,
    inductor_config,
    interposed,
    is_traceable_wrapper_subclass,
    namespace_of,
    pytree,
)
from fusion_backend.frontends.runs import Compiled, NotVerified, Runs, apart, check
from fusion_backend.frontends.twins import Twins, written_places
from fusion_backend.measure.agreement import coarsest, disagreement
from fusion_backend.measure.timing import ROUNDS, Race, race
from fusion_backend.reporting import report as reporting
from fusion_backend.reporting.faults import described
from fusion_backend.reporting.records import DROPPED, GraphRecord
from fusion_backend.rewrite.writer import copied

SECONDS = 2.0  # of timing, for each graph; more where ROUNDS[0] rounds take longer, ...
LONGEST = 8.0  # ... which they may up to here
# Operators of these namespaces only compute; those of others may communicate.
COMPUTES = ("aten", "prims", "fusion", "higher_order")


class Pair(NamedTuple):
    """One graph compiled twice: with its sites fused, and by plain Inductor."""

    ours: Compiled
    plain: Compiled


def compile_both(
    gm: fx.GraphModule,
    new: fx.GraphModule,
    example_inputs,
    record: GraphRecord,
    compilers: Callable[[dict], Pair],
    options: dict,
) -> Compiled:
    """The function that Dynamo is to call. Its first call decides between `new` and `gm`.

    compilers: Inductor for graphs of ours and plain Inductor, by Inductor's options. If these ask
    for CUDA graphs, two more compilations without them are compared: runs with CUDA graphs would be
    recorded, and would overwrite the results of the user's calls in the memory of CUDA graphs.
    Raises what compiling `new` raises, before `gm` is changed.
    """
    if why := unsuitable(gm):
        not_verified(record, why)
        return compilers(options).ours(new, example_inputs)
    eager, places, eps = copied(gm), written_places(gm), coarsest(gm)
    asked = getattr(compilers(options).plain, "config", {})
    cudagraphs = asked.get("triton.cudagraphs", inductor_config.triton.cudagraphs)
    spare = (copied(new), copied(gm)) if cudagraphs else None
    ours = compilers(options).ours(new, example_inputs)
    try:
        with apart_from_context():
            plain = compilers(options).plain(gm, example_inputs)
            stay = rivals = Pair(ours, plain)
            if spare is not None:
                without = compilers({**options, "triton.cudagraphs": False})
                rivals = Pair(
                    without.ours(spare[0], example_inputs), without.plain(spare[1], example_inputs)
                )
    except RestartAnalysis:
        raise
    except Exception as error:
        not_verified(record, f"it cannot be compiled a second time: {described(error)}")
        return ours
    return Verified(Comparison(stay, rivals, eager, places, eps, record))


def unsuitable(gm: fx.GraphModule) -> str:
    """Why a graph is not to run more often than the user calls it, or ""."""
    if fakes_first():
        return "Dynamo divides the graph for DistributedDataParallel"
    if any(True for _ in itertools.chain(gm.parameters(), gm.buffers())):
        return "it holds tensors of its own"
    return communication(gm)


def communication(gm: fx.GraphModule) -> str:
    """Why a graph may wait for other processes; "" if it does not."""
    bodies = [body for body in gm.modules() if isinstance(body, fx.GraphModule)]
    for n in (n for body in bodies for n in body.graph.nodes):
        if any(map(is_traceable_wrapper_subclass, pytree.tree_leaves(n.meta.get("example_value")))):
            return "it computes with a tensor subclass"
        if n.op == "call_function" and communicates(n.target):
            return f"{getattr(n.target, '__name__', n.target)} may communicate with other processes"
    return ""


def communicates(target) -> bool:
    """May a call wait for another process? In a process that has others, all operators may that
    are not known to compute only.
    """
    if collective(target):
        return True
    space = namespace_of(target)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return several and space is not None and space not in COMPUTES


class Verified:
    """The compiled graph: both, until the first call that can decide has decided."""

    def __init__(self, comparison: Comparison):
        self.comparison: Comparison | None = comparison
        self.chosen: Compiled | None = None  # set before `comparison` becomes None
        self.lock = threading.RLock()
        self.deciding = False

    def __call__(self, *args):
        return (self.chosen or self.decided(args))(*args)

    def decided(self, args: tuple) -> Compiled:
        """What computes this call: ours, where it cannot decide."""
        comparison = self.comparison
        if comparison is not None and interposed(args):
            return comparison.stay.ours
        with self.lock:
            # A hook of the user's may call the model inside a run, from the same thread.
            if self.deciding:
                return comparison.stay.ours
            if self.chosen is None:
                self.deciding = True
                try:
                    self.chosen = comparison.winner(args)
                    self.comparison = None
                finally:
                    self.deciding = False
            return self.chosen


class Comparison(NamedTuple):
    """stay: the pair from which one is chosen; rivals: the same pair without CUDA graphs, which is
    run. eager: the graph to run operator by operator. places, eps: see Twins and `disagreement`.
    """

    stay: Pair
    rivals: Pair
    eager: fx.GraphModule
    places: set[int]
    eps: float
    record: GraphRecord

    def winner(self, args: tuple) -> Compiled:
        """Ours, unless it is certainly slower, is wrong, or raises an exception and plain Inductor
        does not.
        """
        try:
            dropped = self.verdict(args)
        except NotVerified as reason:
            not_verified(self.record, str(reason))
            return self.stay.ours
        except torch.OutOfMemoryError:
            not_verified(self.record, "there is not enough memory to run both")
            return self.stay.ours
        except Exception as error:
            not_verified(self.record, f"comparing them raised {described(error)}")
            reporting.warn_once(
                f"verify {self.record.verified}",
                f"fusion: a graph was {self.record.verified}; please report this",
            )
            return self.stay.ours
        if not dropped:
            return self.stay.ours
        self.record.forget_rewrites()
        for s in self.record.sites:
            if s.fused:
                s.fused, s.forward, s.backward = False, None, None
                s.reason, s.cause = f"fusion.verify: the graph {dropped}", DROPPED
        return self.stay.plain

    def verdict(self, args: tuple) -> str:
        """Why ours is dropped, or ""; the record says what was found."""
        check(args)
        with apart(args) as device:
            trains = torch.is_grad_enabled() and any(
                isinstance(a, Tensor) and a.requires_grad for a in args
            )
            runs = Runs(Twins(args, self.places, trains), device)
            dropped, compared = self.correctness(runs)
            if dropped:
                told = f"{dropped}: plain Inductor stays"
                say(self.record, f"verified on the first inputs: {told}")
                reporting.warn_once(
                    f"verify {dropped}",
                    f"fusion: a graph with fused sites {told}; please report this",
                )
                return dropped
            found = timed(
                functools.partial(runs.run, self.rivals.plain),
                functools.partial(runs.run, self.rivals.ours),
                runs.clock(),
            )
        compared += "; timed without CUDA graphs" if self.rivals is not self.stay else ""
        say(self.record, f"verified on the first inputs: {speed(found)}{compared}")
        return (
            f"was slower on the first inputs, {times(found)}" if found.verdict == "slower" else ""
        )

    def correctness(self, runs: Runs) -> tuple[str, str]:
        """Why ours is dropped, or ""; and a remark on the results for the report."""
        try:
            plain, random = runs.values(self.rivals.plain)
        except (NotVerified, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotVerified(f"plain Inductor's graph raised {described(error)}") from error
        try:
            ours, ours_random = runs.values(self.rivals.ours)
        except (NotVerified, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"raised {described(error)} where plain Inductor's graph does not", ""
        if random or ours_random:
            return "", "; its numbers are random and were not compared"
        wrong = disagreement(ours, plain, lambda: runs.values(self.eager)[0], self.eps)
        return (f"was wrong on the first inputs: {wrong}" if wrong else ""), ""


def timed(plain: Callable[[], object], ours: Callable[[], object], clock) -> Race:
    """A race with time for the rounds that a verdict needs; one sample of each if the calls are too
    long for that.
    """
    once = Race()
    once.add(clock(plain), clock(ours))
    needed = ROUNDS[0] * (once.plain[0] + once.ours[0]) / 1e3
    return once if needed > LONGEST else race(plain, ours, clock, max(SECONDS, 1.25 * needed))


def speed(found: Race) -> str:
    """The result of a race, in words."""
    if found.verdict == "slower":
        return f"slower, {times(found)}: plain Inductor stays"
    if found.verdict == "faster":
        return times(found)
    if len(found.plain) == 1:
        how = "timed once only"
    elif found.verdict:
        how = "as fast as plain Inductor"
    else:
        how = "no certain difference to plain Inductor"
    return f"{how}, {milliseconds(found)}"


def times(found: Race) -> str:
    return f"{found.ratio:.2f} times as fast as plain Inductor, {milliseconds(found)}"


def milliseconds(found: Race) -> str:
    ours, plain = statistics.median(found.ours), statistics.median(found.plain)
    ours, plain = (f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}" for ms in (ours, plain))
    return f"{ours} against {plain} ms"


def not_verified(record: GraphRecord, why: str) -> None:
    say(record, f"not verified: {why}")


def say(record: GraphRecord, told: str) -> None:
    record.verified = told
    if reporting.log_level() >= 1:
        print(f"[fusion] {told}", file=sys.stderr)
