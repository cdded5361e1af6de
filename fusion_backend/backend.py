"""The torch.compile entry: capture, match, gate, rewrite, hand to Inductor."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import time

from torch import fx

from fusion_backend import autocast, reporting
from fusion_backend.bodies import outside
from fusion_backend.cache import key_of, with_identity
from fusion_backend.canonical import Canon
from fusion_backend.capture import View, capture
from fusion_backend.compat.torch import (
    RestartAnalysis,
    fake_mode_of,
    inductor,
    inductor_config,
    no_new_guards,
    reset_cudagraphs,
)
from fusion_backend.functional import functionalize_locals
from fusion_backend.gate import Decision, Gate
from fusion_backend.matcher import Matcher
from fusion_backend.options import DISABLED, Options, parse
from fusion_backend.pattern import REGISTRY, Pattern, PatternError
from fusion_backend.rewrite import rewrite
from fusion_backend.template import templates

LOADED: list[str] = []


def patterns() -> list[Pattern]:
    """All usable patterns in order of registration; loads the built-in and the installed ones at first use."""
    if not LOADED:
        LOADED.append("fusion_backend.patterns")
        try:
            import fusion_backend.patterns  # noqa: F401
        except Exception as error:
            reporting.warn_once("built-in", f"fusion: the built-in patterns cannot be loaded: {error}")
        for entry in importlib.metadata.entry_points(group="fusion_backend.patterns"):
            try:
                entry.load()
            except Exception as error:
                reporting.warn_once(entry.name, f"fusion: patterns of {entry.value} cannot be loaded: {error}")
    return list(REGISTRY.values())


def usable(known: list[Pattern]) -> list[Pattern]:
    """Those that can be traced; a broken one costs a warning, not the model."""
    good = []
    for p in known:
        try:
            templates(p)
            good.append(p)
        except PatternError as error:
            reporting.warn_once(f"pattern {p.name}", f"fusion: {error}; it is left out")
    return good


def fuse_graph(gm: fx.GraphModule, options: Options, record: reporting.GraphRecord):
    """Run the pass on one Dynamo graph. Returns the graph to compile, the same object when nothing was accepted."""
    record.nodes = len(gm.graph.nodes)
    known = usable(patterns())
    with collector_paused(), no_new_guards(fake_mode_of(gm)):
        started = time.thread_time()
        view = capture(gm)
        record.capture_s = time.thread_time() - started
        if view is None:
            return gm, []
        started = time.thread_time()
        prepared = prepare(view, options)
        record.match_s += time.thread_time() - started
        return fuse_view(prepared, known, options, record, 0)


@contextlib.contextmanager
def collector_paused():
    """Python's garbage collector walks every module of a large program, again and again during a pass."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclasses.dataclass
class Prepared:
    """A view as expressions, and the gate that decides its sites; the bodies inside it likewise."""

    view: View
    canon: Canon
    chains: dict
    gate: Gate
    bodies: dict[str, Prepared]


def prepare(view: View, options: Options) -> Prepared:
    bodies = {name: prepare(body, options) for name, body in view.bodies.items()}
    fences = autocast.resolve(view)
    chains = functionalize_locals(view)
    canon = Canon().run(view.graph, view.region, fences)
    gate = Gate(view, canon, options, {name: body.gate.writers for name, body in bodies.items()})
    for name, body in bodies.items():
        body.gate.masks.look_out(gate.masks, outside(view, name))
    return Prepared(view, canon, chains, gate, bodies)


def fuse_view(prepared: Prepared, known: list[Pattern], options: Options, record, fused: int, path: str = ""):
    """Match, decide and rewrite one view; the bodies inside it first."""
    decisions: list[Decision] = []
    bodies: dict[str, fx.GraphModule] = {}
    view, canon, gate = prepared.view, prepared.canon, prepared.gate
    for name, body in prepared.bodies.items():
        bodies[name], inner = fuse_view(body, known, options, record, fused, f"{path}{name}.")
        decisions += inner
        fused += sum(d.fused for d in inner)
    started = time.thread_time()
    matcher = Matcher(view.graph, canon, known)
    mine = best_answers(gate.decide_all(list(matcher.candidates()), fused))
    record.sites += [site(d, path) for d in mine]
    record.misses += nearest(matcher, gate)
    record.kept |= {n.name: why for n, why in view.kept.items()}
    note_faults(record, canon, matcher)
    record.match_s += time.thread_time() - started
    started = time.thread_time()
    new = rewrite(view, canon, mine, prepared.chains, bodies)
    record.rewrite_s += time.thread_time() - started
    return new, decisions + mine


def note_faults(record: reporting.GraphRecord, canon: Canon, matcher: Matcher) -> None:
    """What failed before there was a site: it costs a rule at one node, or a place to match, and not the graph."""
    for n, fault in (*canon.faults.items(), *matcher.faults.items()):
        record.faults.append(f"{fault}, at {reporting.location(n)}")
        reporting.warn_once(f"fault {fault}", f"fusion: {record.faults[-1]}; please report this")


def best_answers(decisions: list[Decision]) -> list[Decision]:
    """One decision a pattern and root: the fused one, else the first refusal (of the largest template)."""
    best: dict[tuple, Decision] = {}
    for d in decisions:
        key = (d.match.pattern.name, d.match.roots[0])
        if key not in best or (d.fused and not best[key].fused):
            best[key] = d
    return list(best.values())


def site(d: Decision, path: str = "") -> reporting.Site:
    m = d.match
    if d.failure:
        reporting.warn_once(
            f"kernel {m.pattern.name}", f"fusion: {m.pattern.where}: {d.failure}; its sites are left to Inductor"
        )
    nodes = tuple(path + n.name for n in (*m.interior, *m.roots))  # the bodies of a graph share names
    where = reporting.location(m.roots[0])
    told = (d.fused, d.reason, d.forward, d.backward, d.bytes_saved)
    return reporting.Site(m.pattern.name, where, *told, nodes, d.covered)


def nearest(matcher: Matcher, gate: Gate) -> list[reporting.Miss]:
    """The best partial match of a pattern on each source line, at least half of it, outside what was fused."""
    best: dict[tuple[str, str], reporting.Miss] = {}
    for m in matcher.misses.values():
        if m.root in gate.claimed:
            continue
        where = reporting.location(m.root)
        found = reporting.Miss(m.pattern.name, where, m.matched, m.size, f"{m.reason} at {reporting.location(m.node)}")
        key = (m.pattern.name, where)
        if key not in best or found.matched > best[key].matched:
            best[key] = found
    return list(best.values())


class FusionBackend:
    """`torch.compile(model, backend="fusion", mode=…, options=…)`. Options beginning `fusion.` are ours."""

    __name__ = "fusion"

    def __call__(self, gm: fx.GraphModule, example_inputs, *, mode: str | None = None, options: dict | None = None):
        ours, theirs = parse(options, [p.name for p in patterns()])
        if DISABLED.get():
            return inductor(mode, theirs)(gm, example_inputs)
        plain = inductor(mode, theirs)  # the user's own mistakes are told before we start
        record = reporting.GraphRecord(len(gm.graph.nodes))
        reporting.REPORT.graphs.append(record)
        new, decisions = gm, []
        try:
            with inductor_config.patch(plain.config):
                new, decisions = fuse_graph(gm, ours, record)
        except Exception as error:
            self.give_up(record, error)
            new = gm
        reporting.log(record)
        used = {d.match.pattern for d in decisions if d.fused}
        key = key_of(list(used), [str(ours), *(f"{s.pattern} {s.forward} {s.backward}" for s in record.sites)])
        try:
            return inductor(mode, theirs if new is gm else with_identity(theirs, key))(new, example_inputs)
        except RestartAnalysis:  # Dynamo hands the graph over again, with a float that Inductor wants constant
            del reporting.REPORT.graphs[-1]
            raise
        except Exception as error:
            if new is gm:
                raise
            self.give_up(record, error)
            return inductor(mode, theirs)(gm, example_inputs)

    def give_up(self, record: reporting.GraphRecord, error: Exception) -> None:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        record.error = f"{type(error).__name__}: {first}"
        for s in record.sites:
            s.fused, s.reason, s.forward, s.backward = False, f"the whole graph fell back: {record.error}", None, None
        reporting.warn_once(
            f"graph {record.error}", f"fusion: a graph went to Inductor as it was, please report this: {record.error}"
        )

    def reset(self) -> None:
        reset_cudagraphs()


fusion = FusionBackend()
