"""The figures in README.md and docs/, written from the committed results.

    python -m benchmarks.readme           # write them
    python -m benchmarks.readme --check   # exit status 1 where a page and its results differ

A page asks for figures with a comment, and what follows it up to the closing one is written here:

    <!-- figures: summary benchmarks/results/h200.json -->
    <!-- end of figures -->

The words after "figures:" are one of
    summary FILE            a paragraph: the machine, the command, wins and losses of a run of benchmarks.patterns
    by-pattern FILE         a table with a line a pattern: how often faster and slower, the best and the worst ratio
    rows FILE: NAME; NAME   a table of these rows; with fusion.gate=always where the default gate was not timed
    source FILE             a paragraph: the machine, the command, remarks
    models FILE             a table of a run of benchmarks.models
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.model_results import ModelRow
from benchmarks.model_results import rows as model_rows
from benchmarks.results import OK, Row, Run

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(?P<open><!-- figures: (?P<kind>[\w-]+) (?P<file>[^\s:]+)(?::(?P<names>[^>]*?))? -->\n)(?P<text>.*?)"
    r"(?P<close><!-- end of figures -->)",
    re.DOTALL,
)
SAME = 0.02  # ratios closer to 1, or closer than the noise of their row, are no difference


class Wrong(Exception):
    """A page asks for figures that there are not."""


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def verdict(row: Row | ModelRow, name: str = "fusion") -> str:
    """ "faster" or "slower" than plain Inductor, or "same"; "" where one of them has no time."""
    ratio, bound = row.ratio(name), max(SAME, row.noise or 0.0)
    if ratio is None:
        return ""
    return "faster" if ratio > 1 + bound else "slower" if ratio < 1 / (1 + bound) else "same"


def source(run: Run, _: list[str]) -> str:
    about = run.about
    versions = f"{about['gpu'] or 'A CPU'}, torch {about['torch']}, triton {about['triton']}"
    text = f"{versions}, {about['date']}, revision {about['revision']}: `{about['command']}`."
    return wrapped(f"{text} {about.get('remarks', '')}")


def ours(row: Row) -> str:
    """With the default gate, or where that was not timed, with fusion.gate=always."""
    return "fusion" if row.of("fusion") else "fusion-always"


def summary(run: Run, _: list[str]) -> str:
    about, rows = run.about, run.rows
    kinds = {kind: [row for row in rows if verdict(row) == kind] for kind in ("faster", "same", "slower")}
    timed = sum(map(len, kinds.values()))
    declined = sum(bool(row.of("fusion") and row.of("fusion").declined) for row in rows)
    text = (
        f"{about['gpu'] or 'A CPU'}, torch {about['torch']}, triton {about['triton']}, {about['date']}: "
        f"`{about['command']}`. In {len(kinds['faster'])} of {timed} rows fusion with its default gate is faster than "
        f"plain Inductor, in {len(kinds['same'])} as fast (within {SAME:.0%} or the noise), in {len(kinds['slower'])} "
        f"slower; in {declined} the gate leaves the site to Inductor."
    )
    if noise := about.get("noise"):
        text += f" The same code timed twice differs by {noise['median']:.1%} (median), {noise['max']:.1%} at most."
    if kinds["slower"]:
        losses = (f"{row.name} ({ms(row, 'fusion')} ms, Inductor {ms(row, 'inductor')})" for row in kinds["slower"])
        text += f" Slower: {'; '.join(losses)}."
    wrong = [f"{row.name}: {one.name} {one.status}" for row in rows for one in row.contenders if one.status != OK]
    if wrong:
        text += f" Wrong or failed: {'; '.join(wrong)}."
    if about.get("converted"):
        text += f" The file was converted {about['converted']}."
    return wrapped(text)


def wrapped(text: str, width: int = 120) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines) + "\n"


def ms(row: Row, name: str) -> str:
    one = row.of(name)
    return f"{one.kernel.median:.4f}" if one and one.kernel else "–"


def by_pattern(run: Run, _: list[str]) -> str:
    patterns: dict[str, list[Row]] = {}
    for row in run.rows:
        if verdict(row):
            patterns.setdefault(row.pattern, []).append(row)
    lines = []
    for pattern, rows in patterns.items():
        counts = [sum(verdict(row) == kind for row in rows) for kind in ("faster", "same", "slower")]
        declined = sum(bool(row.of("fusion").declined) for row in rows)
        ratios = sorted(row.ratio("fusion") for row in rows)
        lines.append([pattern, *map(str, counts), str(declined), f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"])
    return table(("pattern", "faster", "as fast", "slower", "declined", "worst ratio", "best ratio"), lines)


def named_rows(run: Run, names: list[str]) -> str:
    known, lines = {row.name: row for row in run.rows}, []
    if missing := [name for name in names if name not in known]:
        raise Wrong(f"no row {'; '.join(missing)}")
    for row in (known[name] for name in names):
        ratio, one = row.ratio(ours(row)), row.of(ours(row))
        share = f"{row.floor_ms / one.kernel.median:.0%}" if one and one.kernel else "–"
        lines.append([row.name, ms(row, "inductor"), ms(row, ours(row)), f"{ratio:.2f}" if ratio else "–", share])
    return table(("site", "plain Inductor", "fusion", "ratio", "of the floor"), lines)


def models(run: Run, _: list[str]) -> str:
    lines = []
    for row in model_rows(run):
        one = row.of("fusion")
        times = [f"{c.step.median:.2f}" if (c := row.of(name)) and c.step else c.status if c else "–"
                 for name in ("eager", "inductor", "fusion")]  # fmt: skip
        ratio = row.ratio("fusion")
        peaks = [f"{c.peak_bytes / 1e9:.1f}" if (c := row.of(name)) and c.peak_bytes else "–"
                 for name in ("inductor", "fusion")]  # fmt: skip
        noise = f"{row.noise:.1%}" if row.noise is not None else "–"
        fused = str(sum(one.fused.values())) if one else "–"
        lines.append([row.title, *times, f"{ratio:.2f}" if ratio else "–", noise, " → ".join(peaks), fused])
    heads = ("model", "eager ms", "plain Inductor ms", "fusion ms", "ratio", "noise", "peak GB", "sites fused")
    return table(heads, lines)


KINDS: dict[str, tuple[str | None, Callable[[Run, list[str]], str]]] = {
    "source": (None, source),
    "summary": ("patterns", summary),
    "by-pattern": ("patterns", by_pattern),
    "rows": ("patterns", named_rows),
    "models": ("models", models),
}


def figures(kind: str, file: str, names: str | None, root: Path) -> str:
    """What stands between the comments."""
    if kind not in KINDS:
        raise Wrong(f"there are no figures of kind {kind!r}; there are {', '.join(KINDS)}")
    of, write = KINDS[kind]
    try:
        run = Run.load(root / file)
    except (OSError, ValueError) as error:
        raise Wrong(f"{file}: {error}") from None
    if of and run.kind != of:
        raise Wrong(f"{kind} needs a run of benchmarks.{of}; {file} is one of benchmarks.{run.kind}")
    return write(run, [name.strip() for name in (names or "").split(";") if name.strip()])


def written(text: str, root: Path = ROOT) -> str:
    """The page with its figures written anew."""
    if text.count("<!-- figures:") != len(BLOCK.findall(text)):
        raise Wrong("a comment <!-- figures: ... --> is not of the form that benchmarks/readme.py knows, or not closed")

    def block(found: re.Match) -> str:
        new = figures(found["kind"], found["file"], found["names"], root)
        return f"{found['open']}\n{new}\n{found['close']}"

    return BLOCK.sub(block, text)


def pages(root: Path = ROOT) -> list[Path]:
    return [page for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))) if page.exists()]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 where something would change"
    )
    args = parser.parse_args(argv)
    status = 0
    for page in pages(root):
        before, name = page.read_text(), page.relative_to(root)
        try:
            after = written(before, root)
        except Wrong as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        if after == before:
            continue
        if args.check:
            status = 1
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(name), "from the results", n=0)
            print("\n".join([*lines, "run `python -m benchmarks.readme`"]))
        else:
            page.write_text(after)
            print(f"wrote {name}")
    return status


if __name__ == "__main__":
    sys.exit(main())
