"""Graphs that were decided before. If an earlier process has decided a Dynamo graph, its result is
written again without capture, match and decide.

A graph is kept as soon as nothing in it is left to measure. Its key has everything that a decision
depends on, except measured answers: the answers that were asked for are looked up again, and if one
has changed, the graph is decided anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import fx

from fusion_backend.cache import disk
from fusion_backend.cache.fingerprint import fingerprint
from fusion_backend.cache.graph_text import Unnamed, devices_of, graph_text
from fusion_backend.cache.identity import own_sources
from fusion_backend.compat.distributed import default_store
from fusion_backend.compat.state import inside_functorch, state_of_compilers, state_of_torch
from fusion_backend.compat.torch import (
    cache_folder,
    inductor_config,
    torch_version,
    trace_artifact,
)
from fusion_backend.compat.triton import triton_version
from fusion_backend.ir.rules import foreign_rules
from fusion_backend.kernels.common.launch import interpreting
from fusion_backend.kernels.common.reachable import make_known
from fusion_backend.kernels.common.target import TARGET
from fusion_backend.measure.judge import Judge, known_answer
from fusion_backend.measure.key import inductor_settings
from fusion_backend.measure.store import TODAY, Answer, on_date
from fusion_backend.ops.extension import EXTENSIONS
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import OPS
from fusion_backend.ops.rule import Rule
from fusion_backend.options import Options
from fusion_backend.pipeline import Scope, fuse_graph
from fusion_backend.reporting.faults import described
from fusion_backend.reporting.records import GraphRecord, Miss, Site
from fusion_backend.reporting.report import warn_once
from fusion_backend.rewrite.channels_last import layout_of
from fusion_backend.rewrite.recipe import NoRecipe, rebuilt, recipe_of

USED = True  # False: every graph is decided anew
FORMAT = 2
# of a graph's record
ABOUT = ("training", "copied", "operators", "channels_last", "lays_out", "layout")


def fuse(
    gm: fx.GraphModule,
    options: Options,
    record: GraphRecord,
    known: list[Rule],
    usable: Callable[[list[Rule]], list[Rule]],
) -> tuple[fx.GraphModule, list[Rule]]:
    """`fuse_graph`, unless an earlier process has decided this very graph. Returns the graph to
    compile and the rules that it uses. `usable` leaves out rules that cannot be traced. It takes
    time, and is called only if the passes run.
    """
    started, file, found = time.thread_time(), None, None
    with at_worst_decided(record):
        file = file_of(gm, options, known)
        found = recall(file, gm, options, record, known)
    if found is not None:
        record.rewrite_s = time.thread_time() - started
        return found
    good = usable(known)

    def done(top: Scope, judge: Judge) -> None:
        if len(good) == len(known):  # what was left out is warned about in every process
            with at_worst_decided(record):
                keep(file, top, judge, record)

    new, decisions = fuse_graph(gm, options, record, good, done=done)
    return new, [*{d.match.pattern.name: d.match.pattern for d in decisions if d.fused}.values()]


@contextlib.contextmanager
def at_worst_decided(record: GraphRecord) -> Iterator[None]:
    """Inside, a failure is a fault of ours; its only cost is that the graph is decided."""
    try:
        yield
    except Exception as error:
        fault = f"decided graphs cannot be used: {described(error)}"
        record.faults.append(fault)
        warn_once(f"fault {fault}", f"fusion: {fault}; please report this")


def file_of(gm: fx.GraphModule, options: Options, rules: list[Rule]) -> Path | None:
    """The file in which the decided graph is kept. None if it is not kept: Inductor's caches are
    off, something in it or in a pattern has no name that holds in every process, a size is dynamic,
    or several ranks decide together.
    """
    folder = cache_folder()
    together = default_store()[0] is not None
    if not USED or folder is None or together or options.dump is not None or inside_functorch():
        return None
    if TARGET.get() is not None:
        return None
    prints = [fingerprint(known) for known in (*rules, foreign_rules())]
    settings, sources = inductor_settings(), own_sources()
    if settings is None or sources is None or any(p.opaque for p in prints):
        return None
    try:
        text = graph_text(gm)
    except Unnamed:
        return None
    parts = [text, str(options), options.measure_s, state_of_torch(), settings, sources]
    parts += [torch_version(), triton_version(), sys.version, interpreting(), state_of_compilers()]
    parts += [[r.name for r in rules], [p.digest for p in prints], torch.cuda.is_available()]
    parts += [about_gpu(device) for device in devices_of(gm)]
    parts += [inductor_config.triton.cudagraphs]  # without them the host's time counts
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    return Path(folder) / "fusion" / f"graph-{digest}.json"


def forget(gm: fx.GraphModule, options: Options, rules: list[Rule]) -> None:
    """Decide the graph anew the next time, because the kept one could not be compiled. Its kernels
    were compiled before it was kept, and are not tried again when it is recalled.
    """
    file = file_of(gm, options, rules)
    if file is not None:
        file.unlink(missing_ok=True)


def about_gpu(device: torch.device) -> tuple:
    """The properties of a GPU by which kernels are chosen."""
    about = torch.cuda.get_device_properties(device)
    numbers = about.major, about.minor, about.multi_processor_count
    return about.name, *numbers, about.shared_memory_per_block_optin, about.total_memory


def recall(
    file: Path | None, gm: fx.GraphModule, options: Options, record: GraphRecord, rules: list[Rule]
) -> tuple[fx.GraphModule, list[Rule]] | None:
    """The kept graph and the rules that it uses; the record is filled as it was then. None if no
    graph is kept, or if the kept one is no longer current.
    """
    kept = disk.read(file, "decided graphs") if file is not None else None
    try:
        if kept is None or kept["format"] != FORMAT or not current(kept, options, record):
            return None
        by_name = EXTENSIONS | {rule.name: rule for rule in rules}
        used, ops = [by_name[name] for name in kept["rules"]], [OPS[name] for name in kept["ops"]]
        for op in ops:
            operator_of(op)  # so that torch has it
        laid_out = kept["about"]["channels_last"]
        source = layout_of(gm, lambda device: True).graph if laid_out else gm
        new = rebuilt(kept["recipe"], source)
        sites = [Site(**{**s, "nodes": tuple(s["nodes"])}) for s in kept["sites"]]
        misses = [Miss(**m) for m in kept["misses"]]
        about, then = {name: kept["about"][name] for name in ABOUT}, kept["date"]
        make_known(fn for op in ops for fn in (op.kernel_fn, op.backward_fn))
    except Exception:  # the entry is damaged
        return None
    if then != datetime.date.today().isoformat():
        for s in sites:
            s.reason = s.reason.replace(TODAY, on_date(then))
        about["layout"] = about["layout"].replace(TODAY, on_date(then))
    record.sites, record.misses, record.remembered = sites, misses, True
    for name, value in about.items():
        setattr(record, name, value)
    trace_artifact("fusion_remembered", lambda: "\n".join(map(str, sites)))
    return new, used


def current(kept: dict, options: Options, record: GraphRecord) -> bool:
    """Are the measured answers those that led to the decisions?"""
    if Judge(options, record, True).active != kept["active"]:
        return False
    return all(named(known_answer(k, options)) == then for k, then in kept["asked"].items())


def named(answer: Answer | None) -> str:
    if answer is None:
        return ""
    return hashlib.sha256(f"{answer.seed} {answer.to_json()}".encode()).hexdigest()[:16]


def keep(file: Path | None, top: Scope, judge: Judge, record: GraphRecord) -> None:
    """Keep a decided graph, unless a later process would decide more of it, or give a warning."""
    decisions = [d for scope in top.scopes() for d in scope.decisions]
    failed = record.faults or any(d.failure for d in decisions)
    if file is None or failed or not judge.settled:
        return
    fused = [d for d in decisions if d.fused]
    origins = {s.result: s.origins for s in top.scopes() if s.origins}
    try:
        recipe = recipe_of(top.result, top.view.source, origins)
    except NoRecipe:
        return
    kept = {
        "format": FORMAT,
        "date": datetime.date.today().isoformat(),
        "active": judge.active,
        "asked": {key: named(answer) for key, answer in judge.asked.items()},
        "rules": [*dict.fromkeys(d.match.pattern.name for d in fused)],
        "ops": [*dict.fromkeys(d.op.name for d in fused if d.op is not None)],
        "recipe": recipe,
        "sites": [dataclasses.asdict(s) for s in record.sites],
        "misses": [dataclasses.asdict(m) for m in record.misses],
        "about": {name: getattr(record, name) for name in ABOUT},
    }
    disk.write(file, kept)
