"""A report as text, on one screen: first the fused sites, then the others and why."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fusion_backend.reporting.places import folded, named, short
from fusion_backend.reporting.records import (
    DROPPED,
    NO_GPU,
    NO_KERNEL,
    UNPROFITABLE,
    GraphRecord,
    Miss,
    Site,
)

if TYPE_CHECKING:
    from fusion_backend.reporting.report import Report

WIDEST, NARROWEST = 100, 60
LEAST = 20  # characters of a text, however little room there is beside it
MOST_MODULES = 3  # that are named in an entry
MOST_MISSES = 5
MOST_OPERATORS = 8
MOST_VERIFIED = 5
# Operators of torch that stand for a whole block: nothing inside them can be recognised.
WHOLE_BLOCKS = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
FASTPATH = (
    "PyTorch runs its own fused operator for a whole block here. "
    "torch.backends.mha.set_fastpath_enabled(False) writes the block out, so that its parts can be "
    "fused."
)
UNMEASURED = "fusion.measure_s"  # in the reason of a site for whose measurement there was no time
MORE_TIME = (
    "could not be measured in the seconds of fusion.measure_s. Raise it, or let "
    "`fusion gate measure SPEC` measure all of your model once; later processes find the answers."
)
MEASURED = "H200"  # the GPU that the gate's measurements were made on


def terminal_width() -> int:
    """The columns of the terminal, 60 to 100; 100 where the output goes elsewhere."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def headline(report: Report) -> str:
    """How many sites are fused, of how many, in how many graphs."""
    graphs = numbered(len(report.graphs), "graph")
    counted = sum(s.counted for s in report.sites)
    kind = "training" if any(g.training for g in report.graphs) else "inference"
    parts = [f"{len(report.fused)} of {counted} recognised sites fused in {graphs}"]
    parts += [kind] if report.graphs else []
    parts += [f"as on an {report.target}"] if report.target else []
    return f"fusion: {', '.join(parts)}"


class Hints(NamedTuple):
    """What a hint tells the user to write: in Python, or on a command line."""

    target: str = 'explain(model, ..., target="H200")'
    always: str = 'options={"fusion.gate": "always"}'
    verbose: str = "text(verbose=True)"


IN_PYTHON = Hints()
IN_SHELL = Hints("--target H200", "--gate always", "--verbose")


def text_of(report: Report, verbose: bool, width: int, words: Hints = IN_PYTHON) -> str:
    """All sections that are not empty. See `Report.text`."""
    counted = [s for s in in_order(report) if s.counted or verbose]
    refused = [s for s in counted if not s.fused]
    needs_gpu = [s for s in refused if s.cause == NO_GPU]
    without_kernel = [s for s in refused if s.cause == NO_KERNEL]
    left = [s for s in refused if s.cause not in (NO_GPU, NO_KERNEL) or verbose]
    parts = [wrapped(headline(report), width)]
    layout = Layout(width, max((len(s.pattern) for s in counted), default=0), verbose)
    parts += section("fused", [s for s in counted if s.fused], layout)
    parts += section("not fused", left, layout)
    if not verbose:
        parts += section("needs a GPU", needs_gpu, layout, reasons=False)
        parts += section("no kernel yet", without_kernel, layout, reasons=False)
    parts += near_misses(report.misses, width, verbose)
    parts += kept_in_memory(report.graphs, width)
    parts += added_from_outside(report.graphs, width)
    parts += embeddings(report.graphs, width)
    parts += channels_last(report.graphs, width)
    parts += measurements(report.graphs)
    parts += graph_breaks(report.graphs, width)
    parts += verified(report.graphs, width, verbose)
    parts += failures(report, width)
    parts += [["", *lines] for lines in hints(report, refused, width, verbose, words)]
    return "\n".join(line for part in parts for line in part)


def in_order(report: Report) -> list[Site]:
    """The sites of all graphs, as the code has them."""
    return [s for g in report.graphs for s in sorted(g.sites, key=lambda s: s.position)]


class Layout(NamedTuple):
    """width of a line, width of the column of names, and whether every site has its own entry."""

    width: int
    margin: int
    verbose: bool


@dataclasses.dataclass
class Entry:
    """Sites of one pattern with one decision, on one line of source."""

    pattern: str
    where: str
    told: str
    sites: list[Site]

    def lines(self, layout: Layout, reason: bool) -> list[str]:
        number = f"×{len(self.sites)}" if len(self.sites) > 1 else ""
        head = f"  {self.pattern:{layout.margin}}  {number:>4}  "
        by_module = all(s.by_module for s in self.sites)
        place, told = "" if by_module else self.where, self.told if reason else ""
        second = f"{place}: {told}" if place and told else place or told
        texts = [t for t in (named_modules(self.sites), second) if t]
        rows = [row for t in texts for row in wrapped(t, layout.width - len(head))]
        return [head + "".join(rows[:1]), *(" " * len(head) + row for row in rows[1:])]


def section(title: str, sites: list[Site], layout: Layout, reasons: bool = True) -> list[list[str]]:
    """A title, and one entry for all sites that differ only in the number of their layer."""
    if not sites:
        return []
    found: dict[tuple[str, ...], Entry] = {}
    for s in sites:
        told = s.how if s.fused else s.reason
        where, told = short(s.where), short(told)
        key = (
            (s.pattern, where, told, s.module) if layout.verbose else alike(s.pattern, where, told)
        )
        entry = found.setdefault(key, Entry(s.pattern, where, told, []))
        entry.sites.append(s)
        entry.where = where if where == entry.where else folded(where)
        entry.told = told if told == entry.told else folded(told)
    return [["", title], *(e.lines(layout, reasons) for e in found.values())]


def alike(*texts: str) -> tuple[str, ...]:
    return tuple(folded(t) for t in texts)


def named_modules(sites: list[Site]) -> str:
    """The modules of an entry, with one name for all layers, and how many more there are."""
    names = list(dict.fromkeys(s.module for s in sites if s.module))
    if len(names) > 1:
        names = list(dict.fromkeys("*" if n.isdigit() else folded(n) for n in names))
    names = list(map(named, names))
    more = f" and {len(names) - MOST_MODULES} more" if len(names) > MOST_MODULES else ""
    return ", ".join(names[:MOST_MODULES]) + more


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, or 20 where that is fewer; a longer word, such as a
    path, loses its beginning.
    """
    width = max(width, LEAST)
    words = [w if len(w) <= width else "…" + w[1 - width :] for w in text.split(" ")]
    return textwrap.wrap(" ".join(words), width, break_long_words=False, break_on_hyphens=False)


def near_misses(misses: list[Miss], width: int, verbose: bool) -> list[list[str]]:
    """Code that is almost a pattern and not part of another; with `verbose` all partial matches."""
    shown = misses if verbose else [m for m in misses if almost(m)][:MOST_MISSES]
    lines = []
    for m in shown:
        place = f"{short(m.where)}: {m.pattern}, {short(m.how_far)}"
        lines += hanging(place, width)
    return [["", "almost a pattern", *lines]] if lines else []


def almost(m: Miss) -> bool:
    return not m.inside and m.size >= 3 and m.size - m.matched <= 1


def hanging(text: str, width: int) -> list[str]:
    rows = wrapped(text, width - 6)
    return [f"  {''.join(rows[:1])}", *(f"      {row}" for row in rows[1:])]


def measurements(graphs: list[GraphRecord]) -> list[list[str]]:
    """For which graphs something was measured."""
    lines = [f"  graph {i}: {measured(g)}" for i, g in enumerate(graphs) if g.measured]
    return [["", "measured", *lines]] if lines else []


def measured(g: GraphRecord) -> str:
    """How many regions were measured, and how long that took."""
    return f"{numbered(g.measured, 'distinct region')} in {g.measure_s:.1f} s"


def graph_breaks(graphs: list[GraphRecord], width: int) -> list[list[str]]:
    """Where Dynamo ended a graph early, and why: no pattern is found across a break."""
    places = Counter(g.broken for g in graphs if g.broken)
    lines: list[str] = []
    for (where, why), n in places.items():
        lines += hanging(f"{short(where)}: {why}{f' (×{n})' if n > 1 else ''}", width)
    title = "graph breaks, which no pattern can cross"
    return [["", title, *lines]] if lines else []


def verified(graphs: list[GraphRecord], width: int, verbose: bool) -> list[list[str]]:
    """The results of `fusion.verify`, graph by graph; dropped graphs first."""
    told = [(i, g) for i, g in enumerate(graphs) if g.verified]
    told.sort(key=lambda row: all(s.cause != DROPPED for s in row[1].sites))
    shown = told if verbose else told[:MOST_VERIFIED]
    lines = [row for i, g in shown for row in hanging(short(f"graph {i}: {g.verified}"), width)]
    more = len(told) - len(shown)
    lines += [f"  and {numbered(more, 'graph')} more"] if more else []
    return [["", "verified against plain Inductor", *lines]] if lines else []


def kept_in_memory(graphs: list[GraphRecord], width: int) -> list[list[str]]:
    """The values that are written to memory for the kernels that read them."""
    title = "written to memory once, instead of computed in each kernel that reads it"
    return counted(title, [text for g in graphs for text in g.in_memory], width)


def added_from_outside(graphs: list[GraphRecord], width: int) -> list[list[str]]:
    """The results whose gradient from outside is not filled with zeros where there is none."""
    title = "returned and read by a loss: a gradient from outside is added only where there is one"
    return counted(title, [text for g in graphs for text in g.from_outside], width)


def embeddings(graphs: list[GraphRecord], width: int) -> list[list[str]]:
    """The embeddings whose gradient a kernel of ours computes."""
    title = "embeddings whose gradient a kernel sums row by row, from sorted tokens"
    return counted(title, [text for g in graphs for text in g.embeddings], width)


def channels_last(graphs: list[GraphRecord], width: int) -> list[list[str]]:
    """The graphs whose images are channels-last although the model's are contiguous, and those of
    which it was measured whether they should be.
    """
    title = "images channels-last, as Inductor lays them out for the convolutions"
    by_inductor = [i for i, g in enumerate(graphs) if g.channels_last and not g.lays_out]
    parts = counted(title, [f"graph {i}" for i in by_inductor], width)
    title = "layout of images that Inductor would leave contiguous"
    chosen = [f"graph {i}: {g.layout}" for i, g in enumerate(graphs) if g.layout]
    return parts + counted(title, chosen, width)


def counted(title: str, texts: list[str], width: int) -> list[list[str]]:
    """A part with each text once, and how often it was told."""
    lines = [
        row
        for text, n in Counter(texts).items()
        for row in hanging(short(f"{text}{f' (×{n})' if n > 1 else ''}"), width)
    ]
    return [["", title, *lines]] if lines else []


def failures(report: Report, width: int) -> list[list[str]]:
    """The failures of our code or a pattern's, graph by graph."""
    told = [fault for g in report.graphs for fault in g.faults]
    for i, g in enumerate(report.graphs):
        if g.error:
            told.append(f"graph {i} went to Inductor as it was: {g.error}")
        if g.backward_error:
            told.append(f"graph {i} runs its backward operator by operator: {g.backward_error}")
    lines = [row for text in told for row in hanging(short(text), width)]
    return [["", "failed", *lines]] if lines else []


def hints(
    report: Report, refused: list[Site], width: int, verbose: bool, words: Hints
) -> Iterable[list[str]]:
    """What the user can do, each hint a paragraph."""
    operators = sum((Counter(g.operators) for g in report.graphs), Counter())
    if WHOLE_BLOCKS & {*operators}:
        yield wrapped(FASTPATH, width)
    elif operators and not report.sites and not any(map(almost, report.misses)):
        most = ", ".join(f"{name} ×{n}" for name, n in operators.most_common(MOST_OPERATORS))
        yield wrapped(f"No pattern was recognised. The operators are {most}.", width)
    if not report.graphs:
        told = "No graph was compiled. If a model has run, TORCH_LOGS=graph_breaks says why."
        yield wrapped(told, width)
    if any(s.cause == NO_GPU for s in refused):
        yield wrapped(f"There is no CUDA GPU here. {words.target} shows what one would do.", width)
    late = sum(s.counted and UNMEASURED in s.reason for s in report.sites)
    if late:
        yield wrapped(f"{numbered(late, 'site')} {MORE_TIME}", width)
    if any(s.cause == UNPROFITABLE for s in refused):
        told = "fuses wherever a kernel can run, also where that does not pay."
        yield wrapped(f"{words.always} {told}", width)
    if report.target and MEASURED not in report.target:
        told = (
            f"The gate was timed on an {MEASURED}; what it says of an {report.target} is a guess."
        )
        yield wrapped(told, width)
    if report.dropped:
        yield [f"{report.dropped} older graphs were dropped from the report"]
    hidden = sum(not s.counted for s in report.sites)
    missed = sum(not almost(m) for m in report.misses)
    more = [numbered(hidden, "overlapping site")] if hidden else []
    more += [f"{numbered(missed, 'place')} where a pattern matches in part"] if missed else []
    if more and not verbose:
        yield wrapped(f"{words.verbose} adds {' and '.join(more)}.", width)


def numbered(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def with_counts(entries: Iterable[Site | Miss]) -> list[tuple[str, int]]:
    """Each distinct line with its number, in order of first appearance."""
    return list(Counter(str(e) for e in entries).items())
