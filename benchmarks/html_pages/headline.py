"""What a run found, in the sentences and figures that a page begins with."""

from __future__ import annotations

import dataclasses
import statistics

from benchmarks.html_pages import units
from benchmarks.html_pages.other_charts import warps, works
from benchmarks.measure import timing
from benchmarks.pages.markdown import AUTOTUNE, TITLES, counted, verdict
from benchmarks.pages.model_figures import model_name
from benchmarks.pages.pattern_figures import declined
from benchmarks.records.rows import WRONG
from benchmarks.records.runs import Run

SAME = f"within {timing.SMALLEST:.0%} or the noise"
CPU = "Measured on a CPU: times say nothing about a GPU; errors and sites do."


@dataclasses.dataclass(frozen=True)
class Headline:
    title: str
    sentences: list[str]
    figures: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # number, words


def where(run: Run) -> str:
    about = run.about
    versions = [
        f"{name} {about[name]}" for name in ("torch", "triton", "transformers") if about.get(name)
    ]
    gpu = f"one {about['gpu']}" if about.get("gpu") else "a CPU"
    return f"{gpu} with {', '.join(versions)}" if versions else gpu


def machine(run: Run) -> str:
    return f"one {run.about['gpu']}" if run.about.get("gpu") else "a CPU"


def against(rows: list, to: str) -> tuple[dict[str, int], list[float]]:
    """How often fusion is faster, the same and slower than another, and the ratios."""
    found = counted(rows, to)
    ratios = [row.ratio("fusion", to) for group in found.values() for row in group]
    return {kind: len(group) for kind, group in found.items()}, ratios


def counts(kinds: dict[str, int]) -> str:
    return f"{kinds['faster']} faster, {kinds['same']} as fast, {kinds['slower']} slower"


def figures(rows: list, others: tuple[str, ...]) -> list[tuple[str, str]]:
    shown = []
    for to in others:
        kinds, ratios = against(rows, to)
        if ratios:
            words = f"{TITLES.get(to, to)} (geometric mean of {len(ratios)}): {counts(kinds)}"
            shown.append((units.times(statistics.geometric_mean(ratios)), words))
    return shown


def patterns(run: Run) -> Headline:
    kinds, ratios = against(run.rows, "inductor")
    if not ratios:
        return Headline(f"Kernels on {machine(run)}", ["No site has times that can be compared."])
    mean, median = statistics.geometric_mean(ratios), statistics.median(ratios)
    left = sum(bool(verdict(row)) and declined(row) for row in run.rows)
    sentences = [
        f"At {kinds['faster']} of {len(ratios)} sites fusion with its default gate is faster than "
        f"plain Inductor, at {kinds['same']} as fast ({SAME}) and at {kinds['slower']} slower; the "
        f"geometric mean of the ratios is {units.times(mean)}, the median {units.times(median)}.",
        "A ratio is plain Inductor's GPU time divided by fusion's: at 2× fusion takes half the "
        "time.",
        "A site is one pattern in one size and dtype, in inference or, where it says train, "
        f"forward and backward together. Each was compiled alone and timed on {where(run)}. The "
        "sizes are the project's choice; at other sizes and next to other code a ratio may differ.",
    ]
    if left:
        sentences.append(
            f"At {left} sites the gate left the work to Inductor; they are among those that are as "
            "fast."
        )
    if missing := [row for row in run.rows if not verdict(row)]:
        whose = "a result is wrong, failed or missing"
        if all((one := row.of("inductor")) and one.status == WRONG for row in missing):
            whose = "plain Inductor's result is wrong"
        sentences.append(
            f"{len(missing)} more {'site is' if len(missing) == 1 else 'sites are'} not counted, "
            f"because {whose} there; the table names each."
        )
    shown = figures(run.rows, ("inductor", AUTOTUNE, "eager"))
    return Headline(f"Kernels: {mean:.2f} times plain Inductor on {machine(run)}", sentences, shown)


def models(run: Run) -> Headline:
    kinds, ratios = against(run.rows, "inductor")
    if not ratios:
        return Headline(f"Models on {machine(run)}", ["No model has times that can be compared."])
    mean = statistics.geometric_mean(ratios)
    sentences = [
        f"In {kinds['faster']} of {len(ratios)} runs of whole models a step with fusion is faster "
        f"than with plain Inductor, in {kinds['same']} as fast ({SAME}) and in {kinds['slower']} "
        f"slower; the geometric mean of the ratios is {units.times(mean)}."
    ]
    eager, over = against(run.rows, "eager")
    if over:
        sentences.append(
            f"Against eager it is faster in {eager['faster']} of {len(over)}, as fast in "
            f"{eager['same']} and slower in {eager['slower']}; geometric mean "
            f"{units.times(statistics.geometric_mean(over))}."
        )
    if behind := [row for row in run.rows if (row.ratio("inductor", "eager") or 1) < 0.99]:
        names = ", ".join(model_name(row) for row in behind)
        sentences.append(
            f"Plain Inductor is itself slower than eager in {names}: read both ratios there."
        )
    sentences.append(
        "A ratio is the wall time of a step with plain Inductor, or with eager, divided by the one "
        f"with fusion; measured on {where(run)}."
    )
    shown = figures(run.rows, ("inductor", "eager", AUTOTUNE))
    return Headline(f"Models: {mean:.2f} times plain Inductor on {machine(run)}", sentences, shown)


def block_size(run: Run) -> Headline:
    sentences, shown, reached = [], [], []
    for work, rows in works(run).items():
        kernel = [row for row in rows if row.who == "kernel"]
        best = max(kernel, key=lambda row: row.rate_bytes)
        taken = next((row for row in kernel if row.chosen), None)
        others = {row.who: units.bandwidth(row.rate_bytes) for row in rows if row.who != "kernel"}
        text = (
            f"{work}: the best of {len(kernel)} configurations, BLOCK {best.block:,} with "
            f"{warps(best.warps)}, moves {units.bandwidth(best.rate_bytes)}"
        )
        if taken:
            reached.append(taken.rate_bytes / best.rate_bytes)
            text += (
                f"; what the launcher takes, BLOCK {taken.block:,} with {warps(taken.warps)}, "
                f"moves {units.bandwidth(taken.rate_bytes)}, "
                f"{units.share(taken.rate_bytes / best.rate_bytes)} of that"
            )
            shown.append((units.bandwidth(taken.rate_bytes), "what the launcher takes"))
        if others:
            text += "; " + ", ".join(
                f"{TITLES.get(who, who)} {rate}" for who, rate in others.items()
            )
        sentences.append(f"{text}.")
        shown.append((units.bandwidth(best.rate_bytes), "the best configuration"))
        shown += [(rate, TITLES.get(who, who)) for who, rate in others.items()]
    sentences.append(
        "A figure is the bytes that the work must move divided by the GPU time of the kernel, on "
        f"{where(run)}; more is better."
    )
    if not works(run):
        return Headline(f"Block sizes on {machine(run)}", ["No configuration was timed."])
    least, alone = min(reached, default=None), len(works(run)) == 1
    title = f"Block sizes on {machine(run)}"
    if least is not None:
        found = f"{units.share(least)} of the best{'' if alone else ' or more'}"
        title = f"Block sizes: the launcher's choice reaches {found} on {machine(run)}"
    return Headline(title, sentences, shown if alone else [])


def compare(run: Run) -> Headline:
    verdicts = [row.verdict for row in run.rows]
    parts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
    sentences = [
        f"Of {len(run.rows)} pieces of work: {parts}.",
        "A ratio is the new revision's kernel time divided by the base's, so less is better; "
        f"measured on {where(run)}.",
    ]
    return Headline(f"Two revisions on {machine(run)}", sentences)


def headline(run: Run) -> Headline:
    kinds = {"patterns": patterns, "models": models, "block_size": block_size, "compare": compare}
    if run.kind in kinds:
        return kinds[run.kind](run)
    title = "Configurations" if run.kind == "sweep" else run.kind.replace("_", " ").capitalize()
    return Headline(f"{title} on {machine(run)}", [f"Measured on {where(run)}."])
