"""Measured answers as text: one line for each, or all details of one."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

from fusion_backend.frontends.commands.failure import Failure
from fusion_backend.frontends.commands.gate_store import (
    counted,
    elsewhere,
    for_whom,
    shipped,
    stems,
    trouble,
)
from fusion_backend.measure.answer_text import reason
from fusion_backend.measure.store import Answer, store
from fusion_backend.reporting.records import computed_by

SHORT = 8  # characters of a key
VERDICTS = {
    "faster": "faster than Inductor",
    "same": "no gain that counts",
    "slower": "slower than Inductor",
}
HEAD = (
    f"{'key':{SHORT}}  {'date':10}  {'GPU':20}  {'Inductor / ours':20}  {'ms, Inductor ms':16}  "
    "sites, and who computes them"
)


def listed(names: list[str], with_seed: bool, as_json: bool) -> str:
    """The answers of this user's store, and with `with_seed` those that ship; with `names` only
    those that have a site of one of these patterns. Raises Failure if the store cannot be read and
    nothing else is asked for.
    """
    held = store()
    why = trouble(held)
    if why and not with_seed:
        raise Failure(why, 1)
    own = [] if why else [*held.all()]
    damaged = 0 if why else len(stems(held) - {a.key for a in own})
    found = [a for a in (*own, *(shipped() if with_seed else ())) if chosen(a, names)]
    if as_json:
        away = {id(a) for a in elsewhere(found)}
        rows = [{**dataclasses.asdict(a), "here": id(a) not in away} for a in found]
        return json.dumps({"folder": str(held.folder), "problem": why, "answers": rows}, indent=1)
    lines = [HEAD, *map(line, found), ""] if found else []
    asked = f" with {' or '.join(names)}" if names else ""
    lines.append(for_whom(found) + asked)
    lines.append(why or f"folder: {held.folder}")
    if damaged:
        lines.append(f"{counted(damaged, 'file')} there cannot be read as an answer")
    return "\n".join(lines)


def chosen(a: Answer, names: list[str]) -> bool:
    return not names or bool({*names} & {*a.sites})


def line(a: Answer) -> str:
    if a.plain_ms:
        ratio, times = ratio_of(a), f"{a.ours_ms:.3f}, {a.plain_ms:.3f}"
    else:
        ratio, times = "not timed", ""
    row = f"{a.key[:SHORT]}  {a.date:10}  {gpu_of(a):20}  {ratio:20}  {times:16}  {sites_of(a)}"
    return f"{row}{' (ships with the package)' if a.seed else ''}"


def ratio_of(a: Answer) -> str:
    """The ratio, with its interval if there were enough rounds for one."""
    certain = a.low > 0 and a.high < 1e6
    return f"{a.ratio:.2f}" + (f" ({a.low:.2f} to {a.high:.2f})" if certain else "")


def gpu_of(a: Answer) -> str:
    return str(a.about.get("gpu", "unknown GPU"))


def sites_of(a: Answer) -> str:
    """ "layer_norm ×2: forward kernel; gelu: Inductor"."""
    parts = Counter(zip(a.sites, map(who, a.take), strict=True))
    return "; ".join(f"{s}{f' ×{n}' if n > 1 else ''}: {by}" for (s, by), n in parts.items())


def who(take: str) -> str:
    """Who computes a site, from "kernel/vjp", or "" for Inductor; "channels-last" stays."""
    if take and "/" not in take:
        return take
    forward, _, backward = take.partition("/")
    return computed_by(forward, "" if backward == "None" else backward) if take else "Inductor"


def shown(a: Answer) -> str:
    """All that is known of one answer."""
    away = " (not the GPU and the versions that are here)" if elsewhere([a]) else ""
    versions = [f"{name} {a.about[name]}" for name in ("torch", "triton") if name in a.about]
    rows = [
        ("of", ", ".join([gpu_of(a), *versions]) + away),
        ("mode", "training: forward and backward" if a.about.get("training") else "inference"),
        *(("site", f"{s}: {who(take)}") for s, take in zip(a.sites, a.take, strict=True)),
        ("times", times_of(a)),
        ("memory", memory_of(a)),
        ("operators", operators_of(a)),
        ("why", a.why),
    ]
    together = len(a.sites) > 1
    rows += [("report", text) for text in dict.fromkeys(reason(a, t, together) for t in a.take)]
    ships = "; ships with the package" if a.seed else ""
    lines = [f"  {name:10} {text}" for name, text in rows if text]
    return "\n".join([f"{a.key}: measured on {a.date or 'an unknown date'}{ships}", *lines])


def times_of(a: Answer) -> str:
    if not a.plain_ms:
        return "none: it was not timed"
    verdict = VERDICTS.get(a.verdict, "undecided")
    times = f"the region takes {a.ours_ms:.4f} ms, with Inductor alone {a.plain_ms:.4f} ms"
    return f"{times}; ratio {ratio_of(a)}: {verdict}"


def memory_of(a: Answer) -> str:
    """The memory kept from forward to backward, compared with plain Inductor."""
    if not a.about.get("training") or not a.about.get("operators"):
        return ""
    more = "more" if a.more_bytes > 0 else "less"
    if not a.more_bytes:
        return "as much is kept for backward as with Inductor"
    return f"{abs(a.more_bytes) / 1e6:.1f} MB {more} kept for backward than with Inductor"


def operators_of(a: Answer) -> str:
    operators = a.about.get("operators")
    if not isinstance(operators, dict):
        return ""
    return ", ".join(f"{name}{f' ×{n}' if n != 1 else ''}" for name, n in operators.items())
