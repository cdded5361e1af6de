"""Where the figures of a page come from: machine, versions, revision, commands, noise."""

from __future__ import annotations

import html

from benchmarks.html_pages import units
from benchmarks.measure.timing import LONG_MS
from benchmarks.records.runs import Run


def count(number: int) -> str:
    return f"{number:,}" if number else "none"


def compiled_ahead(found: dict) -> str:
    known = {"done", "failed", "late", "processes", "seconds"}
    words = [f"{count(found.get('done', 0))} compiled ahead of time"]
    words += [f"{count(found.get('failed', 0))} failed", f"{count(found.get('late', 0))} late"]
    text = ", ".join(words)
    if found.get("processes"):
        text += f"; {found['processes']} processes"
    if found.get("seconds") is not None:
        text += f", {found['seconds']:,} s"
    more = [f"{value} {key.replace('_', ' ')}" for key, value in found.items() if key not in known]
    return "; ".join([text, *more])


def noise(found: dict) -> str:
    return (
        f"the same code timed twice differs by {found['median']:.1%} (median) and by "
        f"{found['max']:.1%} at most, in {found['rows']} rows: those whose kernels take at least "
        f"{units.round_number(units.time(LONG_MS))}, or all where none does"
    )


FORMS = {
    "gpu": ("GPU", str),
    "gpu_memory": ("memory of the GPU", units.size),
    "multiprocessors": ("multiprocessors", str),
    "torch": ("PyTorch", str),
    "triton": ("Triton", str),
    "transformers": ("transformers", str),
    "cuda": ("CUDA", str),
    "python": ("Python", str),
    "date": ("date", str),
    "copy_bytes_s": ("copy, measured in this run", units.bandwidth),
    "matrix_flops_s": ("bf16 matrix product, measured in this run", units.speed),
    "noise": ("noise", noise),
    "rounds": ("rounds, in the last command", str),
    "compiled_ahead": ("work of the last command", compiled_ahead),
    "seconds": ("the last command took", lambda value: f"{value:,} s"),
    "revision": ("revision", None),
    "revision_note": ("about the revision", str),
}


def revisions(text: str) -> str:
    return ", ".join(f"<code>{html.escape(part)}</code>" for part in text.split("; "))


def origin(run: Run) -> str:
    """A folded section: what the run says about itself, and every command."""
    lines = []
    for key in dict.fromkeys([*FORMS, *run.about]):
        value = run.about.get(key)
        if key == "command" or value in (None, {}, ""):
            continue
        name, form = FORMS.get(key, (key.replace("_", " "), str))
        words = html.escape(form(value)) if form else revisions(str(value))
        lines.append(f"<dt>{html.escape(name)}</dt><dd>{words}</dd>")
    commands = [html.escape(line) for line in (run.about.get("command") or "").split("; ") if line]
    listed = "".join(f"<li><code>{line}</code></li>" for line in commands)
    head = f"<h3>{'Command' if len(commands) == 1 else 'Commands'}</h3>"
    return (
        '<details id="origin"><summary>Where these figures come from: machine, versions, '
        f"revision, commands</summary><dl>{''.join(lines)}</dl>\n"
        + (f'{head}<ol class="commands">{listed}</ol>' if commands else "")
        + "</details>"
    )
