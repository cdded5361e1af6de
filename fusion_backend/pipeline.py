"""The passes, in order: capture, analyse, match, decide, write. Where Inductor lays out images
channels-last, or should, they run on a copy of the graph that is (`rewrite/channels_last.py`).

Each pass is a function of scopes, and reads what the passes before it have filled in. The Dynamo
entry, the torch.export entry and `explain` run the same passes. `fusion.dump` (`dump.py`) prints
what each pass has made.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import fx

from fusion_backend import dump
from fusion_backend.capture import autocast
from fusion_backend.capture.aliases import versions, writers_of
from fusion_backend.capture.attention import brought_to_form
from fusion_backend.capture.functionalize import functionalize_locals
from fusion_backend.capture.norms_of_sums import norms_together
from fusion_backend.capture.tracer import capture
from fusion_backend.capture.view import View
from fusion_backend.compat.channels_last import FORCE_LAYOUT
from fusion_backend.compat.torch import (
    fake_mode_of,
    inductor_config,
    no_new_guards,
    refusals_unlogged,
)
from fusion_backend.decide.facts import Facts
from fusion_backend.decide.gate import Decision, Gate
from fusion_backend.decide.record import (
    best_answers,
    count_operators,
    mark_alternatives,
    near_misses,
    note_faults,
    site,
)
from fusion_backend.extend.extended import extends, extensions
from fusion_backend.ir.canonicalize import Canon
from fusion_backend.match.matcher import Match, Matcher
from fusion_backend.measure import layouts
from fusion_backend.measure.judge import Judge
from fusion_backend.ops.rule import Rule
from fusion_backend.options import Options
from fusion_backend.reporting.records import GraphRecord, RuleCount
from fusion_backend.rewrite.channels_last import layout_of
from fusion_backend.rewrite.writer import Origins, rewrite


@dataclasses.dataclass
class Scope:
    """One graph on its way through the passes, with a scope for each body inside it (of activation
    checkpoints, `invoke_subgraph` and `cond`). `path` says where it is: "" or "body.inner.".
    """

    view: View  # made by capture
    bodies: dict[str, Scope]
    path: str = ""
    canon: Canon | None = None  # made by analyse, as are the next two
    chains: dict | None = None  # in-place operators that became functional
    facts: Facts | None = None
    matcher: Matcher | None = None  # made by match, as are the matches
    matches: list[Match] = dataclasses.field(default_factory=list)
    gate: Gate | None = None  # made by decide, as are the decisions
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    result: fx.GraphModule | None = None  # made by write, as are the next
    origins: Origins = dataclasses.field(default_factory=dict)

    def scopes(self) -> Iterator[Scope]:
        """The bodies first, then this one."""
        for body in self.bodies.values():
            yield from body.scopes()
        yield self


def scope_of(view: View, path: str = "") -> Scope:
    bodies = {name: scope_of(body, f"{path}{name}.") for name, body in view.bodies.items()}
    return Scope(view, bodies, path)


def analyse(top: Scope, options: Options) -> None:
    """View -> canonical expressions and facts: aliases, writers, masks, gradients."""
    for scope in top.scopes():
        fences = autocast.resolve(scope.view)
        scope.chains = functionalize_locals(scope.view)
        view = scope.view
        brought_to_form(view, fences, scope.chains)
        inner = {name: body.facts for name, body in scope.bodies.items()}
        writers = writers_of(view, {name: facts.writers for name, facts in inner.items()})
        known = versions(view, writers)
        scope.canon = Canon().run(view.graph, view.region, fences, view.trains, known)
        scope.facts = Facts(view, scope.canon, options.exact_masks, inner, writers)


def match(top: Scope, rules: list[Rule], options: Options) -> None:
    """Canonical expressions and rules -> matches, extended matches behind them, and near misses
    with their reasons.
    """
    for scope in top.scopes():
        scope.matcher = Matcher(scope.view.graph, scope.canon, rules)
        scope.matches = list(scope.matcher.candidates())
        if extends(options):
            found = extensions(scope.view, scope.canon, scope.matcher, scope.matches)
            scope.matches = [*scope.matches, *found]


def decide(top: Scope, options: Options, judge: Judge) -> None:
    """Matches and facts -> decisions, repeated until the judge has answered every proposal.
    `fusion.limit` counts the sites of all scopes.
    """
    for scope in top.scopes():
        scope.gate = Gate(scope.facts, options, scope.matcher.other_readings)
    for _ in judge.rounds([scope.gate for scope in top.scopes()]):
        fused = 0
        for scope in top.scopes():
            scope.decisions = best_answers(scope.gate.decide_all(scope.matches, fused))
            fused += sum(d.fused for d in scope.decisions)


def note(top: Scope, record: GraphRecord) -> None:
    """Decisions, near misses and faults -> the rows of the report. The record's dicts are replaced,
    not changed, because another thread may be reading them.
    """
    for scope in top.scopes():
        mark_alternatives(scope.decisions, scope.gate)
        record.sites += [site(d, scope.facts.order, scope.path) for d in scope.decisions]
        record.misses += near_misses(scope.matcher, scope.gate, scope.decisions)
        record.training |= bool(scope.view.requires_grad) and torch.is_grad_enabled()
        count_operators(record, scope.view.graph)
        record.copied = record.copied | {n.name: why for n, why in scope.view.copied.items()}
        note_faults(record, scope.canon, scope.matcher)
        rules, new = record.rules, scope.matcher.counts
        record.rules = rules | {k: c.plus(rules.get(k, RuleCount())) for k, c in new.items()}


def write(top: Scope) -> None:
    """Decisions -> graphs with the accepted sites; the same graph object if there are none."""
    for scope in top.scopes():
        bodies = {name: body.result for name, body in scope.bodies.items()}
        written = rewrite(scope.view, scope.canon, scope.decisions, scope.chains, bodies)
        scope.result, scope.origins = written


def fuse_graph(
    gm: fx.GraphModule,
    options: Options,
    record: GraphRecord,
    rules: list[Rule],
    compiles: bool = True,
    done: Callable[[Scope, Judge], None] = lambda top, judge: None,
) -> tuple[fx.GraphModule, list[Decision]]:
    """Run all passes on one Dynamo graph. Returns the graph to compile (the same object if nothing
    was accepted) and every decision. `compiles`: the graph is compiled next, so sites without an
    answer may be measured. `done` is called with the results of the passes.
    """
    record.nodes = len(gm.graph.nodes)
    with refusals_unlogged(), no_new_guards(fake_mode_of(gm)), dump.into(options.dump) as dumped:
        started = time.thread_time()
        judge = Judge(options, record, compiles)
        laid_out, hidden, work = layout_of(gm, partial(layouts.asked, judge))
        record.capture_s = time.thread_time() - started
        forced = work is not None and layouts.faster(work, judge)
        if work is not None and not forced:
            laid_out = None
        source = gm if laid_out is None else laid_out
        with inductor_config.patch(FORCE_LAYOUT if forced else {}), norms_together(source):
            started = time.thread_time()
            view = capture(source)
            record.capture_s += time.thread_time() - started
            if view is None:
                record.layout = ""
                return gm, []
            started = time.thread_time()
            view.lies_otherwise = hidden
            top = scope_of(view)
            dumped.view(top)
            run(top, judge, record, rules, dumped)
            record.match_s += time.thread_time() - started - judge.thread_s
            started = time.thread_time()
            write(top)
            record.rewrite_s += time.thread_time() - started
        dumped.result(top)
        record.lays_out = forced
        record.channels_last = forced or laid_out is not None and top.result is not laid_out
        done(top, judge)
    new = gm if top.result is laid_out and not forced else top.result
    return new, [d for scope in top.scopes() for d in scope.decisions]


def run(
    top: Scope, judge: Judge, record: GraphRecord, rules: list[Rule], dumped: dump.Dump
) -> None:
    """Run the passes between capture and rewrite, for Dynamo graphs and exported programs."""
    options = judge.options
    analyse(top, options)
    dumped.canonical(top)
    match(top, rules, options)
    dumped.candidates(top)
    decide(top, options, judge)
    note(top, record)
    dumped.decisions(top, record)
