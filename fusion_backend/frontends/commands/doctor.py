"""`fusion doctor`: is everything there that the backend needs, and does a kernel compile?"""

from __future__ import annotations

import argparse
import json

from fusion_backend.frontends.commands.checks import Check, all_checks

DESCRIPTION = """Check the installation, and print what a bug report needs: versions, the GPU, the
caches, the compilers, one kernel that is compiled now, and the state of each pattern. The last line
says "ready", or what to do; then the exit status is 1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    checks = all_checks()
    broken = [c for c in checks if not c.ok]
    if arguments.json:
        rows = [dict(name=c.name, ok=c.ok, found=c.found, advice=c.advice) for c in checks]
        print(json.dumps(dict(ready=not broken, checks=rows), indent=1))
    else:
        print("\n".join([*map(line, checks), verdict(checks)]))
    return 1 if broken else 0


def line(check: Check) -> str:
    return f"{'' if check.ok else 'BROKEN  '}{check.name}: {check.found}"


def verdict(checks: list[Check]) -> str:
    """The last line: "ready", or what to do about what is broken."""
    broken = [c for c in checks if not c.ok]
    if broken:
        todo = "; ".join(f"{c.name}: {c.advice}" for c in broken)
        return f"not ready: {todo}"
    notes = [c.advice for c in checks if c.advice]
    return "; ".join(["ready", *notes])
