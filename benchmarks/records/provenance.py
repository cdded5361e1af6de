"""Which code a number belongs to: the commit it was measured at, and whether the repository's
history has it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# what a number depends on
CODE = ("fusion_backend", "patterns", "benchmarks", ":!benchmarks/results")
TOLD = "FUSION_REVISION"
# Commits that results name and that were squashed, each with the commit of the history that has
# what they changed; it also has what was changed after them.
SQUASHED = {"23f4b4ed7a6b": "e55298f052dd"}


def git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or there is none."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


def history(root: Path = ROOT) -> list[str] | None:
    """The commits that HEAD goes back to; None where they are not at hand: no git, or a shallow
    clone.
    """
    if git(root, "rev-parse", "--is-shallow-repository") != "false":
        return None
    return (git(root, "rev-list", "HEAD") or "").split() or None


def missing(revisions: str | None, root: Path = ROOT) -> list[str]:
    """Of revisions as results name them, "abc1234; def5678", those that the history lacks; none
    where there is none. One that was squashed is not missing.
    """
    known = history(root)
    if known is None or not revisions:
        return []
    names = [name.removesuffix(" (told)") for name in revisions.split("; ")]
    found = {
        name
        for name in names
        if re.fullmatch("[0-9a-f]{7,40}", name)
        and any(c.startswith(SQUASHED.get(name, name)) for c in known)
    }
    return [name for name in names if name not in found]


def revision(root: Path = ROOT) -> str | None:
    """The commit of the checkout, with "+changes" where code differs from it; None outside of git.

    A copy of the files that has no git is told by FUSION_REVISION, which nothing can check there:
    "... (told)". Raises ValueError where there is git, and it says something else.
    """
    head, told = git(root, "rev-parse", "HEAD"), os.environ.get(TOLD, "")
    if head is None:
        return f"{told} (told)" if told else None
    if not head.startswith(told):
        raise ValueError(f"{TOLD} is {told}, and this checkout is at {head[:12]}")
    return head[:12] + ("+changes" if git(root, "status", "--porcelain", "--", *CODE) else "")
