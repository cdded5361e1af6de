"""The torch.compile entry: capture, match, gate, rewrite, hand to Inductor."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import threading
import time

from torch import fx

from fusion_backend.cache.identity import key_of, with_identity
from fusion_backend.capture import autocast
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.subgraphs import outside
from fusion_backend.capture.tracer import View, capture
from fusion_backend.compat.inductor import inductor_of_ours
from fusion_backend.compat.torch import (
    RestartAnalysis,
    fake_mode_of,
    inductor,
    inductor_config,
    no_new_guards,
    refusals_unlogged,
    reset_cudagraphs,
)
from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.match.matcher import Matcher, Mismatch
from fusion_backend.match.templates import renew, templates
from fusion_backend.ops.pattern import REGISTRY, Pattern, clashes_left_out
from fusion_backend.options import DISABLED, Options, parse
from fusion_backend.reporting import report as reporting
from fusion_backend.reporting.reject import PatternError
from fusion_backend.rewrite.writer import rewrite

LOADED: list[str] = []
LOADING = threading.RLock()  # a pattern's file may itself ask for the patterns


def patterns() -> list[Pattern]:
    """All usable patterns in order of registration; loads the built-in and the installed ones at
    first use.

    A second thread waits until all are loaded.
    """
    with LOADING:
        load()
        return list(REGISTRY.values())


def load() -> None:
    if not LOADED:
        LOADED.append("fusion_backend.patterns")
        try:
            import fusion_backend.patterns  # noqa: F401
        except Exception as error:
            reporting.warn_once(
                "built-in", f"fusion: the built-in patterns cannot be loaded: {error}"
            )
        for entry in importlib.metadata.entry_points(group="fusion_backend.patterns"):
            try:
                with clashes_left_out():
                    entry.load()
            except Exception as error:
                reporting.warn_once(
                    entry.name, f"fusion: patterns of {entry.value} cannot be loaded: {error}"
                )


def usable(known: list[Pattern]) -> list[Pattern]:
    """Those that can be traced; a broken one costs a warning, not the model."""
    good = []
    for p in known:
        try:
            renew(p)
            templates(p)
            good.append(p)
        except PatternError as error:
            reporting.warn_once(f"pattern {p.name}", f"fusion: {error}; it is left out")
    return good


def fuse_graph(gm: fx.GraphModule, options: Options, record: reporting.GraphRecord):
    """Run the pass on one Dynamo graph. Returns the graph to compile, the same object when nothing
    was accepted.
    """
    record.nodes = len(gm.graph.nodes)
    with refusals_unlogged(), no_new_guards(fake_mode_of(gm)):
        known = usable(patterns())
        started = time.thread_time()
        view = capture(gm)
        record.capture_s = time.thread_time() - started
        if view is None:
            return gm, []
        started = time.thread_time()
        prepared = prepare(view, options)
        record.match_s += time.thread_time() - started
        return fuse_view(prepared, known, options, record, 0)


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
        body.gate.masks.connect(gate.masks, outside(view, name))
    return Prepared(view, canon, chains, gate, bodies)


def fuse_view(
    prepared: Prepared, known: list[Pattern], options: Options, record, fused: int, path: str = ""
):
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
    """What failed before there was a site: it costs a rule at one node, or a place to match, and
    not the graph.
    """
    for n, fault in (*canon.faults.items(), *matcher.faults.items()):
        record.faults.append(f"{fault}, at {reporting.location(n)}")
        reporting.warn_once(f"fault {fault}", f"fusion: {record.faults[-1]}; please report this")


def best_answers(decisions: list[Decision]) -> list[Decision]:
    """One decision a pattern and root: the fused one, else the first refusal (of the largest
    template).
    """
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
            f"kernel {m.pattern.name}",
            f"fusion: {m.pattern.where}: {d.failure}; its sites are left to Inductor",
        )
    # the bodies of a graph share names
    nodes = tuple(path + n.name for n in (*m.interior, *m.roots))
    where = reporting.location(m.roots[0])
    told = (d.fused, d.reason, d.forward, d.backward, d.bytes_saved)
    return reporting.Site(m.pattern.name, where, *told, nodes, d.covered)


def nearest(matcher: Matcher, gate: Gate) -> list[reporting.Miss]:
    """The best partial match of a pattern on each source line, at least half of it, outside what
    was fused.
    """
    best: dict[tuple[str, str], Mismatch] = {}
    for m in matcher.misses.values():
        key = (m.pattern.name, reporting.location(m.root))
        if m.root in gate.claimed or matcher.covered(m):
            continue
        if key not in best or m.rank > best[key].rank:
            best[key] = m
    return [
        reporting.Miss(
            name, where, m.matched, m.size, f"{m.reason} at {reporting.location(m.node)}"
        )
        for (name, where), m in best.items()
    ]


class FusionBackend:
    """`torch.compile(model, backend="fusion", mode=…, options=…)`. Options beginning `fusion.` are
    ours.
    """

    __name__ = "fusion"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs,
        *,
        mode: str | None = None,
        options: dict | None = None,
    ):
        ours, theirs = parse(options, [p.name for p in patterns()])
        plain = inductor(mode, theirs)  # the user's own mistakes are told before we start
        if DISABLED.get():
            return plain(gm, example_inputs)
        record = reporting.GraphRecord(len(gm.graph.nodes))
        reporting.add(record)
        try:
            return self.compile(gm, example_inputs, mode, ours, theirs, record)
        except RestartAnalysis:
            # Dynamo hands the graph over again, with a float that Inductor wants constant
            reporting.take_back(record)
            raise

    def compile(
        self, gm: fx.GraphModule, example_inputs, mode, ours: Options, theirs: dict, record
    ):
        """With its sites fused; should that fail, as plain Inductor would."""
        plain = inductor(mode, theirs)
        try:
            with inductor_config.patch(plain.config):
                new, decisions = fuse_graph(gm, ours, record)
            reporting.log(record)
            if new is not gm:
                used = {d.match.pattern for d in decisions if d.fused}
                key = key_of(
                    list(used),
                    [str(ours), *(f"{s.pattern} {s.forward} {s.backward}" for s in record.sites)],
                )
                compile = inductor_of_ours(
                    mode, with_identity(theirs, key), lambda e: backward_failed(record, e)
                )
                return compile(new, example_inputs)
            failure = None
        except RestartAnalysis:
            raise
        except Exception as error:
            failure = error
            give_up(record, error)
        try:
            compiled = plain(gm, example_inputs)
        except RestartAnalysis:
            raise
        except Exception as error:
            # the model's or Inductor's fault: told as plain Inductor tells it
            if failure is not None:
                record.error += f"; plain Inductor refuses the graph as well: {summary(error)}"
            raise
        if failure is not None:
            told = f"fusion: a graph went to Inductor as it was, please report this: {record.error}"
            reporting.warn_once(f"graph {record.error}", told)
        return compiled

    def reset(self) -> None:
        reset_cudagraphs()


def give_up(record: reporting.GraphRecord, error: Exception) -> None:
    """Nothing of the graph is fused, because of this error."""
    record.error = summary(error)
    for s in record.sites:
        s.fused, s.reason, s.forward, s.backward = (
            False,
            f"the whole graph fell back: {record.error}",
            None,
            None,
        )


def backward_failed(record: reporting.GraphRecord, error: Exception) -> None:
    """Inductor compiles a backward when it first runs: the forward has run by then, and the graph
    cannot go back.
    """
    record.backward_error = summary(error)
    reporting.warn_once(
        f"backward {record.backward_error}",
        "fusion: Inductor cannot compile the backward of a graph with fused sites; it runs operator by operator. "
        f"Please report this if plain Inductor compiles it: {record.backward_error}",
    )


def summary(error: Exception) -> str:
    """Its type and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


fusion = FusionBackend()
