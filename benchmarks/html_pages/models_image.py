"""docs/images/models.svg: what compiling does to whole models, for README.md.

    IMAGES["docs/images/models.svg"](root)   # its text, from the committed results

Written by hand, so that it depends on nothing but the results. Its paper and ink follow the
reader's light or dark setting; the paper is opaque, for a page may be dark where the setting is
light.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path

from benchmarks.html_pages import units
from benchmarks.html_pages.lanes import Axis
from benchmarks.pages.markdown import Wrong, of_names
from benchmarks.pages.model_figures import model_name
from benchmarks.records.rows import ModelRow
from benchmarks.records.runs import Run

RESULTS = "benchmarks/results/h200-models-retimed.json"
MODELS = (
    "llama infer",
    "llama train",
    "gpt2 train",
    "t5 train",
    "vit infer",
    "vit train",
    "bert train",
)
MODES = {"infer": "inference", "train": "training", "decode": "decoding"}
NAMES = {"llama": "Llama", "gpt2": "GPT-2", "t5": "T5", "vit": "ViT", "bert": "BERT"}
WIDTH, LEFT, RIGHT, TOP, LANE, FOOT = 830, 160, 620, 118, 40, 96
TO_INDUCTOR, TO_EAGER = 716, 810  # right edges of the two columns of ratios
STYLE = """
  text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
  .paper { fill: #ffffff } .ink { fill: #1f2328 } .soft { fill: #59636e }
  .rule { stroke: #d8dee4 } .base { stroke: #1f2328; stroke-width: 1.5 }
  .eager { fill: #1f2328 } .inductor { fill: #0969b5 } .fusion { fill: #c84a00 }
  .arrow { stroke: #c84a00; stroke-width: 3; fill: none; opacity: .55 }
  .number { font-weight: 600; font-variant-numeric: tabular-nums }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117 } .ink { fill: #e6edf3 } .soft { fill: #9da7b1 }
    .rule { stroke: #30363d } .base { stroke: #e6edf3 }
    .eager { fill: #e6edf3 } .inductor { fill: #58a6ff } .fusion { fill: #ff8a3d }
    .arrow { stroke: #ff8a3d }
  }"""


def title_of(row: ModelRow) -> str:
    return f"{NAMES.get(row.name, row.name)} {MODES.get(row.mode, row.mode)}"


def models_image(run: Run, names: tuple[str, ...] = MODELS) -> str:
    """The SVG of the named rows. Raises Wrong where one is missing or was not timed."""
    rows = of_names(run.rows, list(names), model_name)
    if untimed := [model_name(row) for row in rows if not ratios(row)]:
        raise Wrong(f"no times of eager, plain Inductor and fusion for {'; '.join(untimed)}")
    found = [ratio for row in rows for ratio in ratios(row)]
    axis = Axis(min(1.0, *found) / 1.12, max(found) * 1.06, units.tick, line=1.0)
    bottom = TOP + LANE * len(rows)
    parts = [
        *heading(rows),
        *(tick_svg(axis, tick, bottom) for tick in axis.ticks()),
        *(lane(axis, row, TOP + LANE * i + LANE / 2) for i, row in enumerate(rows)),
        *small_print(run, bottom),
    ]
    height = bottom + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-labelledby="title desc">\n'
        '<title id="title">Speed of whole models: eager, plain Inductor and fusion</title>\n'
        f'<desc id="desc">{html.escape(described(run, rows))}</desc>\n'
        f"<style>{STYLE}\n</style>\n"
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def ratios(row: ModelRow) -> list[float]:
    """The speed of plain Inductor and of fusion, eager = 1; empty where one was not timed."""
    found = [row.ratio(who, "eager") for who in ("inductor", "fusion")]
    return found if all(found) else []


def described(run: Run, rows: list[ModelRow]) -> str:
    lines = [
        f"{title_of(row)}: fusion {units.times(row.ratio('fusion'))} plain Inductor and "
        f"{units.times(row.ratio('fusion', 'eager'))} eager"
        for row in rows
    ]
    return f"Measured on {run.about.get('gpu') or 'a CPU'}. " + "; ".join(lines) + "."


def place(axis: Axis, value: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * axis.at(value) / 100, 1)


def text(x: float, y: float, css: str, words: str, size: int = 14, anchor: str = "start") -> str:
    return (
        f'<text class="{css}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def heading(rows: list[ModelRow]) -> list[str]:
    dtypes = " and ".join(dict.fromkeys(row.dtype for row in rows))
    x = 27
    parts = [text(20, 32, "ink number", f"Speed of whole models, {dtypes}: eager = 1", 18)]
    for css, words, step in (("eager", "eager", 80), ("inductor", "plain Inductor", 140)):
        parts += [circle(x, 58, css), text(x + 12, 63, "ink", words)]
        x += step
    parts += [circle(x, 58, "fusion"), text(x + 12, 63, "ink", "fusion")]
    for right, words in ((TO_INDUCTOR, "plain Inductor"), (TO_EAGER, "eager")):
        parts += [
            text(right, TOP - 28, "soft", "fusion over", 13, "end"),
            text(right, TOP - 12, "soft", words, 13, "end"),
        ]
    return parts


def circle(x: float, y: float, css: str) -> str:
    return f'<circle class="{css}" cx="{x:g}" cy="{y:g}" r="6.5"/>'


def tick_svg(axis: Axis, tick: float, bottom: float) -> str:
    x, css = place(axis, tick), "base" if tick == axis.line else "rule"
    label = text(x, TOP - 12, "soft", axis.form(tick), 13, "middle")
    return f'<line class="{css}" x1="{x:g}" x2="{x:g}" y1="{TOP - 4}" y2="{bottom}"/>{label}'


def lane(axis: Axis, row: ModelRow, y: float) -> str:
    before, after = (place(axis, ratio) for ratio in ratios(row))
    side = 1 if after >= before else -1
    end = after - 9 * side
    parts = [text(LEFT - 16, y + 5, "ink", title_of(row), 15, "end")]
    if abs(after - before) > 24:
        tip = f"M{before + 9 * side:g} {y:g}H{end:g}m{-7 * side} -6l{7 * side} 6l{-7 * side} 6"
        parts.append(f'<path class="arrow" d="{tip}"/>')
    parts += [circle(place(axis, 1.0), y, "eager"), circle(before, y, "inductor")]
    parts.append(circle(after, y, "fusion"))
    for right, to in ((TO_INDUCTOR, "inductor"), (TO_EAGER, "eager")):
        ratio = units.times(row.ratio("fusion", to))
        parts.append(text(right, y + 5, "ink number", ratio, 16, "end"))
    return "".join(parts)


def small_print(run: Run, bottom: float) -> list[str]:
    about = run.about
    words = [
        f"one {about['gpu']}" if about.get("gpu") else "a CPU",
        f"torch {about.get('torch', '?')}",
    ]
    words += [f"transformers {about['transformers']}"] if about.get("transformers") else []
    first = (
        "Right is faster; the axis is logarithmic. "
        "The arrow leads from plain Inductor to fusion: the longer, the more fusion adds."
    )
    lines = [
        first,
        f"Wall time of a step on {', '.join(words)}, {about.get('date', '')}.",
        f"Source: {RESULTS}",
    ]
    return [text(20, bottom + 32 + 21 * i, "soft", line, 13) for i, line in enumerate(lines)]


def committed(root: Path) -> str | None:
    """None where there are no such results."""
    path = root / RESULTS
    return models_image(Run.load(path)) if path.exists() else None


IMAGES: dict[str, Callable[[Path], str | None]] = {"docs/images/models.svg": committed}
