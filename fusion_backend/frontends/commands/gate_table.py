"""The decisions of the default gate by the tables of the patterns, and their evidence."""

from __future__ import annotations

import inspect
from pathlib import Path

from fusion_backend.frontends.catalogue import summary
from fusion_backend.frontends.commands.gate_answers import DEPENDS, DTYPES, Answer, answers, sizes
from fusion_backend.frontends.commands.gate_evidence import FOUND, about, timed
from fusion_backend.ops.rule import Rule

ROOT = Path(__file__).parents[3]
COLUMNS = [(dtype, training) for dtype in DTYPES for training in (False, True)]
SHORT = {
    "forward": "fused",
    "forward and backward": "fused",
    "backward": "backward",
    "": "Inductor",
    DEPENDS: "depends",
}
NEXT_TO = {
    "pointwise": "Next to operators that Inductor fuses it with, it is left to Inductor.",
    "reduction": "Next to operators that Inductor fuses it with, the forward is left to Inductor.",
    "recomputed": "Next to operators that Inductor fuses it with, it is left to Inductor.",
}


LEGEND = (
    "fused: forward, and in training backward; backward: that alone; Inductor: left to it; "
    "depends: on the graph.",
    "`fusion gate show PATTERN` has the reasons.",
)


def table(rules: list[Rule]) -> str:
    """One line for each pattern: what is fused at the size that benchmarks use, the last
    example.
    """
    head = "".join(f"{dtype + (' train' if train else ' infer'):12}" for dtype, train in COLUMNS)
    lines = [f"{'pattern':24}{head}at, and timed rows with the ratio to plain Inductor"]
    for rule in rules:
        case = (rule.cases or ({},))[-1]
        said = {(a.dtype, a.training): SHORT[a.fused] for a in answers(rule) if a.case == case}
        cells = "".join(f"{said.get(column, '-'):12}" for column in COLUMNS)
        lines.append(f"{rule.name:23} {cells}{sizes(case)}{evidence(rule)}")
    lines += ["", *LEGEND]
    return "\n".join(lines)


def evidence(rule: Rule) -> str:
    """How many rows were timed with a kernel of ours, and the range of their ratios."""
    ratios = [row.ratio for row in timed(rule.name) or () if not row.declined]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"; {len(ratios)} timed, {low if low == high else f'{low} to {high}'}"


def section(rule: Rule) -> str:
    """All details of one pattern."""
    lines = [f"{rule.name}: {summary(rule)}", *dict.fromkeys(map(line, answers(rule)))]
    if next_to := NEXT_TO.get(getattr(rule, "inductor", None)):
        lines.append(f"  {next_to}")
    lines += [f"  Decided by {place}." for place in places(rule)]
    rows = timed(rule.name)
    if rows is None:
        lines.append(f"  Timings: {FOUND} of the repository, which is not installed here.")
    elif not rows:
        lines.append("  It has not been timed.")
    else:
        lines.append(f"  Timed, as plain Inductor's time / ours ({about()}):")
        for row in rows:
            declined = f"  (left to Inductor: {row.declined})" if row.declined else ""
            lines.append(f"    {row.ratio:6.2f}  {row.work}{declined}")
    return "\n".join(lines)


def line(one: Answer) -> str:
    if one.fused == DEPENDS:
        return f"  It depends {one.reason}; fusion explain says it for your model."
    mode = "training" if one.training else "inference"
    what = f"{one.fused} fused" if one.fused else "left to Inductor"
    return f"  {one.dtype} {mode} {sizes(one.case)}: {what}{f': {one.reason}' * bool(one.reason)}"


def places(rule: Rule) -> list[str]:
    """The functions that decide, with file and line."""
    found = []
    for name in ("replacement", "guard", "worthwhile", "neighbours"):
        fn = getattr(rule, f"{name}_fn", None)
        if fn is not None:
            code = inspect.unwrap(fn).__code__
            file = Path(code.co_filename)
            file = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            found.append(f"{name} at {file}:{code.co_firstlineno}")
    return found
