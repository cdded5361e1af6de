"""Two revisions of the kernels in alternation: is the change an improvement?

    python -m benchmarks.compare --base main [--only NAME ...] [--sizes ... --dtype ... --train] [--out FILE.json]

The base revision is checked out beside the working tree (git worktree, in a temporary directory),
uncommitted changes count as the new one. Each has a process that stays alive; they take turns, on
the same work, measured by the harness of the working tree. For each piece of work: median kernel
times and new / base, the median over the rounds of the ratio of that round's medians, with bounds
by bootstrap: the 0.5th and 99.5th percentile of that median over 2000 resamplings of the rounds. A
regression is a ratio whose lower bound is above 1 + tolerance (2 %, twice that under 20 µs: two
processes of one revision may differ by that much; `--base HEAD` in a clean tree shows it). Exit
code: 1 with a regression or where the new revision fails, 0 without, 2 for a request that makes no
sense, 130 after Ctrl-C. Work that the base lacks is listed as new.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.contenders import HOW
from benchmarks.options import duration, output, positive
from benchmarks.progress import progress
from benchmarks.results import CompareRow, Run, Spread, machine
from benchmarks.selection import add_arguments, selected, spread
from benchmarks.table import LONG_MS
from benchmarks.timing import CALLS, TURN_MS
from benchmarks.work import Work
from fusion_backend.frontends.loading import patterns

ROOT = Path(__file__).parent.parent
ROUNDS, RESAMPLINGS, TOLERANCE = 12, 2000, 0.02


class Failed(Exception):
    """A side cannot do what it was told."""


class Process:
    """A running benchmarks.side whose fusion_backend comes from `tree`."""

    def __init__(self, tree: Path, directory: Path, how: str):
        package = directory / "fusion_backend"
        package.mkdir(parents=True)
        for entry in (tree / "fusion_backend").iterdir():
            if entry.name not in ("patterns", "__pycache__"):
                (package / entry.name).symlink_to(entry)
        (package / "patterns").symlink_to(tree / "patterns")
        (directory / "benchmarks").symlink_to(ROOT / "benchmarks")
        self.errors = directory / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.side", how], cwd=directory, text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self.package = package

    def greet(self) -> None:
        """Wait until it has started, and see that it runs the code it should."""
        rooms = Path(self.answer()["rooms"])
        assert rooms.is_relative_to(self.package), f"{rooms} is not the code of this side"

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"the process ended: {self.errors.read_text().strip().splitlines()[-1:]}")
        found = json.loads(line)
        if "error" in found:
            raise Failed(found["error"])
        return found

    def tell(self, **request) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def checkout(revision: str, directory: Path) -> Iterator[Path]:
    """A worktree of the revision. Raises ValueError when git has none."""
    git, tree = ["git", "-C", str(ROOT)], directory / "base-tree"
    try:
        made = subprocess.run(
            [*git, "worktree", "add", "--detach", tree, revision], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise ValueError(f"there is no git, which would check {revision} out") from None
    if made.returncode:
        raise ValueError(
            f"no revision {revision}: {made.stderr.strip().splitlines()[-1].removeprefix('fatal: ')}"
        )
    try:
        if not (tree / "fusion_backend").is_dir():
            raise ValueError(
                f"{revision} has no fusion_backend at its top: {ROOT} is no checkout of this repository"
            )
        yield tree
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(tree)], capture_output=True)


def bounds(ratios: list[float]) -> tuple[float, float]:
    """The 0.5th and 99.5th percentile of the median over resamplings of the rounds."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLINGS)
    )
    return medians[round(0.005 * (RESAMPLINGS - 1))], medians[round(0.995 * (RESAMPLINGS - 1))]


def judged(base: list[list[float]], new: list[list[float]], tolerance: float) -> dict:
    """Ratio, bounds and verdict from the times of each round; short kernels may differ by twice the
    tolerance.
    """
    ratios = [statistics.median(n) / statistics.median(b) for b, n in zip(base, new, strict=True)]
    low, high = bounds(ratios)
    tolerance *= 2 if statistics.median(sum(base, [])) < LONG_MS else 1
    verdict = (
        "slower" if low > 1 + tolerance else "faster" if high < 1 / (1 + tolerance) else "same"
    )
    return dict(verdict=verdict, ratio=statistics.median(ratios), low=low, high=high)


def compare(work: Work, base, new, rounds: int, tolerance: float) -> CompareRow:
    """Both sides prepare, at the same time; then they take turns, the first one of a round in turn
    too.
    """
    sides, found = dict(new=new, base=base), {}
    for side in sides.values():
        side.tell(do="prepare", work=work.to_json())
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
                sides[side].tell(do="time", calls=calls)
                times[side].append(sides[side].answer()["ms"])
    except Failed as error:
        return CompareRow(work.name, "failed" if side == "new" else "base failed", note=str(error))
    spreads = {side: Spread.of(sum(rows, [])) for side, rows in times.items()}
    return CompareRow(work.name, **spreads, **judged(times["base"], times["new"], tolerance))


HEADER = f"{'work':52}{'base ms':>10}{'new ms':>10}{'new/base':>10}{'bounds':>17}"


def show(row: CompareRow) -> str:
    if row.ratio is None:
        return f"{row.work:52}  {row.verdict.upper()}: {row.note}"
    times = f"{row.base.median:10.4f}{row.new.median:10.4f}{row.ratio:10.3f}"
    return f"{row.work:52}{times}{f'{row.low:.3f} .. {row.high:.3f}':>17}  {row.verdict}"


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--base", required=True, metavar="REV", help="a git revision")
    add_arguments(parser)
    parser.add_argument(
        "--contender", default="fusion-always", choices=list(HOW), help="default: fusion-always"
    )
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="let pass (0.02); under 20 µs twice that"
    )
    parser.add_argument(
        "--minutes",
        type=duration,
        help="stop before this time is up; every pattern has its turn first",
    )
    parser.add_argument(
        "--out", type=output, metavar="FILE", help="write the results as JSON, anew after each row"
    )
    args, begun = parser.parse_args(argv), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patterns()
    run = Run(
        "compare",
        machine(device, "benchmarks.compare") | dict(base=args.base, tolerance=args.tolerance),
    )
    sides: list[Process] = []
    try:
        works = selected(args, device.type == "cuda")
        works = spread(works) if args.minutes else works
        with (
            tempfile.TemporaryDirectory() as directory,
            checkout(args.base, Path(directory)) as tree,
        ):
            try:
                sides.append(Process(tree, Path(directory, "base"), args.contender))
                sides.append(Process(ROOT, Path(directory, "new"), args.contender))
                for side in sides:
                    side.greet()
                print(
                    f"{run.about['gpu'] or 'CPU: these times say nothing about a GPU'}\n{HEADER}",
                    flush=True,
                )
                with progress(len(works), "compare") as begin:
                    for i, work in enumerate(works):
                        taken = time.monotonic() - begun
                        if args.minutes and i and taken * (i + 1) / i > args.minutes * 60:
                            run.about["stopped"] = f"time is up after {i} of {len(works)} rows"
                            break
                        begin(work.name)
                        run.rows.append(compare(work, *sides, args.rounds, args.tolerance))
                        print(show(run.rows[-1]), flush=True)
                        if args.out:
                            run.save(args.out)
            finally:
                for side in sides:
                    side.close()
    except (ValueError, Failed) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"interrupted; {len(run.rows)} rows"
            + (f" in {args.out}" if args.out and run.rows else "")
        )
        return 130
    run.about["seconds"] = round(time.monotonic() - begun, 1)
    if args.out:
        run.save(args.out)
    return finish(run)


def finish(run: Run) -> int:
    """A last line, and the exit code."""
    counts = {
        v: sum(r.verdict == v for r in run.rows) for v in dict.fromkeys(r.verdict for r in run.rows)
    }
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    if "stopped" in run.about:
        print(run.about["stopped"])
    return int(bool(counts.keys() & {"slower", "failed"}))


if __name__ == "__main__":
    sys.exit(main())
