"""Generated spellings of a pattern, as a line of the table of benchmarks.spellings."""

from __future__ import annotations

from fusion_backend.testing.spelling.recall import Recall

HEADER = (
    f"{'pattern':24}{'training':>10}{'found':>8}{'inference':>11}{'found':>8}{'not one':>9}"
    f"{'near misses':>13}{'left alone':>12}{'wrong':>7}"
)


def line(found: Recall) -> str:
    r = found.row()
    of_mode = "".join(
        f"{r[mode]:{width}}{share(r[f'recognised_in_{mode}'], r[mode]):>8}"
        for mode, width in (("training", 10), ("inference", 11))
    )
    rest = f"{r['faults']:9}{r['near_misses']:13}{r['left_alone']:12}{r['wrong']:7}"
    return f"{r['pattern']:24}{of_mode}{rest}"


def share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"


def failures(found: Recall) -> str:
    """The functions that were not recognised, came out wrong or are no spelling, with source."""
    groups = {
        "not recognised": found.unrecognised,
        "wrong": found.wrong,
        "not a spelling": found.faults,
        "more exact than the pattern": [o for o in found.spellings if o.more_exact],
    }
    lines = [f"    {w}: {k} of {n} not recognised" for w, k, n in found.to_blame()[:8]]
    for title, outcomes in groups.items():
        for o in outcomes:
            lines += [
                f"--- {title} {o.spelling.kinds} {o.spelling.words} {o.wrong}",
                o.spelling.source,
                o.reason,
            ]
    return "\n".join(lines)
