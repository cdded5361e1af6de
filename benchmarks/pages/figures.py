"""The figures that a page may ask for: tables and paragraphs of Markdown.

A figure takes a run and the names that the page gives after the file; without names it is about all
rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.pages.decoding_figures import decoding
from benchmarks.pages.foreign_figures import foreign
from benchmarks.pages.kernel_figures import block_sizes, compared, compiled, swept, ways
from benchmarks.pages.markdown import where, wrapped
from benchmarks.pages.model_figures import compile_times, models, shares
from benchmarks.pages.pattern_figures import by_pattern, losses, memory, named_rows, summary
from benchmarks.pages.rank_figures import ranks
from benchmarks.pages.sum_figures import sums
from benchmarks.records.runs import Run


def source(run: Run, _: list[str]) -> str:
    stopped = run.about.get("stopped")
    return wrapped(where(run) + (f" The run stopped: {stopped}." if stopped else ""))


@dataclasses.dataclass(frozen=True)
class Figure:
    kinds: tuple[str, ...]  # of runs that it is made from; none: all
    write: Callable[[Run, list[str]], str]


FIGURES = {
    "source": Figure((), source),
    "summary": Figure(("patterns",), summary),
    "by-pattern": Figure(("patterns",), by_pattern),
    "rows": Figure(("patterns",), named_rows),
    "memory": Figure(("patterns",), memory),
    "losses": Figure(("patterns", "models"), losses),
    "models": Figure(("models",), models),
    "compile-times": Figure(("models",), compile_times),
    "shares": Figure(("models",), shares),
    "foreign": Figure(("foreign",), foreign),
    "compared": Figure(("compare",), compared),
    "block-sizes": Figure(("block_size",), block_sizes),
    "swept": Figure(("sweep",), swept),
    "ways": Figure(("sweep",), ways),
    "compiled": Figure(("compile_kernels",), compiled),
    "ranks": Figure(("distributed",), ranks),
    "sums": Figure(("all_reduce",), sums),
    "decoding": Figure(("tensor_parallel",), decoding),
}
