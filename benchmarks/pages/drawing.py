"""What the pictures of benchmarks.plots share: colours, names, PNG, panels and bars.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; markers and hatches
differ, too.
"""

from __future__ import annotations

import io
from collections.abc import Callable

from benchmarks.measure.trace import KINDS
from benchmarks.records.rows import FAILED
from benchmarks.records.runs import Run

ORDER = ("eager", "inductor", "max-autotune", "fusion", "fusion-always")
COLOURS = {
    "eager": "#999999",
    "inductor": "#0072B2",
    "max-autotune": "#56B4E9",
    "fusion": "#D55E00",
    "fusion-always": "#E69F00",
}
MARKERS = {"eager": "s", "inductor": "o", "max-autotune": "D", "fusion": "^", "fusion-always": "v"}
CLASS_COLOURS = dict(
    zip(
        KINDS,
        ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#999999"),
        strict=True,
    )
)
CEILING = "#000000"
DPI = 130
LABEL = dict(padding=3, fontsize=7.5, bbox=dict(facecolor="white", edgecolor="none", pad=0.6))


class NoMatplotlib(Exception):
    pass


def pyplot():
    """matplotlib without a display."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib(f"plots need matplotlib ({error}): pip install -e '.[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
        }
    )
    return plt


def png(figure) -> bytes:
    """With a palette, which bars and letters do with: a third of the bytes."""
    from PIL import Image  # matplotlib needs it too

    drawn, data = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    pyplot().close(figure)
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(data, format="png", optimize=True)
    return data.getvalue()


def where(run: Run) -> str:
    """The machine in a title."""
    return (
        f"{run.about.get('gpu') or 'CPU: times mean nothing'}, torch {run.about.get('torch', '?')}"
    )


def names(rows: list) -> list[str]:
    """The contenders of some rows that were timed, in the order of ORDER; twins are left out."""
    found = {c.name for row in rows for c in row.contenders if timed(c)}
    return [name for name in ORDER if name in found] + sorted(
        name for name in found if name not in ORDER and not name.endswith("-again")
    )


def timed(contender) -> bool:
    return (contender.step if hasattr(contender, "step") else contender.kernel) is not None


def colour(name: str) -> str:
    return COLOURS.get(name, "#000000")


def byte_words(n: float, _=None) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.3g} {unit}"
        n /= 1000
    return ""


def panels(plt, count: int, width: float, height: float, columns: int = 3):
    columns = min(columns, count)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(width * columns, height * lines + 0.8), squeeze=False
    )
    flat = list(grid.flat)
    for axes in flat[count:]:
        axes.set_visible(False)
    return figure, flat[:count]


def bars(axes, rows: list, value: Callable, title: Callable, form: Callable | None = None) -> None:
    """Horizontal bars: a group a row, the first at the top, in it a bar a contender
    that was timed.
    """
    shown = names(rows)
    height = 0.84 / len(shown)
    for i, name in enumerate(shown):
        found = [
            (k, row.of(name)) for k, row in enumerate(rows) if row.of(name) and timed(row.of(name))
        ]
        places = [k + (i - (len(shown) - 1) / 2) * height for k, _ in found]
        drawn = axes.barh(
            places, [value(one) for _, one in found], height * 0.92, color=colour(name), label=name
        )
        if form:
            axes.bar_label(drawn, [form(rows[k], one) for k, one in found], **LABEL)
        for k, row in enumerate(rows):
            if row.of(name) and row.of(name).status == FAILED:
                axes.text(
                    0, k + (i - (len(shown) - 1) / 2) * height, " failed", va="center", fontsize=7.5
                )
    axes.set_yticks(range(len(rows)), [title(row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
