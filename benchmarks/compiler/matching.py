"""What matching costs with the full catalogue."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from benchmarks.compiler.synthetic import chain, decoder
from fusion_backend.capture import autocast
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.tracer import capture
from fusion_backend.decide.facts import Facts
from fusion_backend.decide.gate import Gate
from fusion_backend.decide.record import near_misses
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.match.matcher import Matcher
from fusion_backend.options import parse

GRAPHS = {
    "decoder": lambda nodes: decoder(nodes // 36),
    "x + y": lambda nodes: chain(torch.add, nodes),
    "x * y": lambda nodes: chain(torch.mul, nodes),
    "(x + y) * y": lambda nodes: chain(lambda x, y: (x + y) * y, nodes // 2),
    "sin(x)": lambda nodes: chain(lambda x, y: torch.sin(x), nodes),
}


def cost(gm: torch.fx.GraphModule, runs: int) -> dict[str, float]:
    """Seconds for each step, and how many sites there are."""
    known = usable(patterns())
    options, _ = parse({}, [p.name for p in known])
    gc.disable()
    try:
        view = capture(gm)
        fences = autocast.resolve(view)
        functionalize_locals(view)
        read, canon = least(lambda: Canon().run(view.graph, view.region, fences), runs)
        match, (matcher, found) = least(lambda: matched(view, canon, known), runs)
        decide, decided = least(lambda: decisions(view, canon, options, matcher, found), runs)
    finally:
        gc.enable()
    return dict(nodes=len(gm.graph.nodes), read=read, match=match, decide=decide, sites=decided)


def matched(view, canon, known):
    matcher = Matcher(view.graph, canon, known)
    return matcher, list(matcher.candidates())


def decisions(view, canon, options, matcher, found) -> int:
    gate = Gate(Facts(view, canon, options.exact_masks, {}), options, matcher.other_readings)
    decided = gate.decide_all(found)
    near_misses(matcher, gate, decided)
    return len(decided)


def least(fn: Callable, runs: int):
    """The least CPU time of some runs, and what the last one returned."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        out = fn()
        times.append(time.process_time() - started)
    return min(times), out
