"""Two revisions in turns: the ratio of their times with its bounds, and the verdict."""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.command_line.progress import progress
from benchmarks.measure.timing import CALLS, LONG_MS, TURN_MS
from benchmarks.pattern_runs.sides import Failed
from benchmarks.records.rows import CompareRow, Spread
from benchmarks.records.runs import Run
from benchmarks.workloads.work import Work

ROUNDS, RESAMPLINGS, TOLERANCE = 12, 2000, 0.02


def bounds(ratios: list[float]) -> tuple[float, float]:
    """The 0.5th and 99.5th percentile of the median over resamplings of the rounds."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLINGS)
    )
    return medians[round(0.005 * (RESAMPLINGS - 1))], medians[round(0.995 * (RESAMPLINGS - 1))]


def judged(base: list[list[float]], new: list[list[float]], tolerance: float) -> dict:
    """Ratio, bounds and verdict from the times of each round, in milliseconds. Short kernels may
    differ by twice the tolerance.
    """
    ratios = [statistics.median(n) / statistics.median(b) for b, n in zip(base, new, strict=True)]
    low, high = bounds(ratios)
    tolerance *= 2 if statistics.median(sum(base, [])) < LONG_MS else 1
    verdict = (
        "slower" if low > 1 + tolerance else "faster" if high < 1 / (1 + tolerance) else "same"
    )
    return dict(verdict=verdict, ratio=statistics.median(ratios), low=low, high=high)


def compare(work: Work, base, new, rounds: int, tolerance: float) -> CompareRow:
    """Both sides prepare at the same time; then they take turns, and in each round the other one
    begins.
    """
    sides, found = dict(new=new, base=base), {}
    for side in sides.values():
        side.send(do="prepare", work=work.to_json())
    for name, side in sides.items():
        try:
            found[name] = side.answer()
        except Failed as error:
            found[name] = error
    if failed := next((name for name in sides if isinstance(found[name], Failed)), None):
        return CompareRow(
            work.name, "failed" if failed == "new" else "base failed", note=str(found[failed])
        )
    if found["base"].get("missing"):
        return CompareRow(work.name, "new", note="the base has no such pattern")
    calls = max(
        CALLS[0], min(CALLS[1], round(TURN_MS / max(side["ms"] + 0.7 for side in found.values())))
    )
    times: dict[str, list[list[float]]] = {"base": [], "new": []}
    try:
        for turn in range(rounds):
            for side in ("base", "new") if turn % 2 else ("new", "base"):
                sides[side].send(do="time", calls=calls)
                times[side].append(sides[side].answer()["ms"])
    except Failed as error:
        return CompareRow(work.name, "failed" if side == "new" else "base failed", note=str(error))
    spreads = {side: Spread.of(sum(rows, [])) for side, rows in times.items()}
    return CompareRow(work.name, **spreads, **judged(times["base"], times["new"], tolerance))


def compare_all(
    run: Run, works: list[Work], base, new, args: argparse.Namespace, begun: float
) -> None:
    """Append a row to the run for each piece of work, print it and write the file, until the time
    since `begun` is up.
    """
    print(f"{run.about['gpu'] or 'CPU: these times say nothing about a GPU'}\n{HEADER}", flush=True)
    with progress(len(works), "compare") as begin:
        for i, work in enumerate(works):
            taken = time.monotonic() - begun
            if args.minutes and i and taken * (i + 1) / i > args.minutes * 60:
                run.about["stopped"] = f"time is up after {i} of {len(works)} rows"
                break
            begin(work.name)
            run.rows.append(compare(work, base, new, args.rounds, args.tolerance))
            print(show(run.rows[-1]), flush=True)
            if args.out:
                run.save(args.out)


HEADER = f"{'work':52}{'base ms':>10}{'new ms':>10}{'new/base':>10}{'bounds':>17}"


def show(row: CompareRow) -> str:
    """The row as a line of the table."""
    if row.ratio is None:
        return f"{row.work:52}  {row.verdict.upper()}: {row.note}"
    times = f"{row.base.median:10.4f}{row.new.median:10.4f}{row.ratio:10.3f}"
    return f"{row.work:52}{times}{f'{row.low:.3f} .. {row.high:.3f}':>17}  {row.verdict}"


def finish(run: Run) -> int:
    """Print how many rows have each verdict; the exit status."""
    counts = {
        v: sum(r.verdict == v for r in run.rows) for v in dict.fromkeys(r.verdict for r in run.rows)
    }
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if "stopped" in run.about:
        print(run.about["stopped"])
    return int(bool(counts.keys() & {"slower", "failed"}))
