"""The fenced blocks of the documents, and what they say that their code prints.

A ```text block is what the block of code before it prints. It may leave lines out.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^>]+) -->\n\n?)?"
    r"^```(?P<kind>.*)\n(?P<text>(?:(?!```).*\n)*)```$",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: the line of its fence, its language, its text, and why it is not run."""

    line: int
    kind: str
    text: str
    why: str | None


def blocks(page: Path, *kinds: str) -> list[Block]:
    """The blocks of a page, those of some languages alone; every fence must be understood."""
    text = page.read_text()
    found = [
        Block(text[: m.start("kind")].count("\n") + 1, m["kind"], m["text"], m["why"])
        for m in BLOCK.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.M)), (
        f"{page.name}: a block that is not closed"
    )
    assert text.count("<!-- not run") == sum(b.why is not None for b in found), (
        f"{page.name}: a comment that belongs to no block"
    )
    return [b for b in found if not kinds or b.kind in kinds]


def to_run(page: Path, kind: str) -> list[Block]:
    return [b for b in blocks(page, kind) if b.why is None]


def shown(page: Path, kind: str) -> dict[int, str]:
    """What the page says that its blocks of a language print, by the line of the block."""
    found, before = {}, None
    for block in blocks(page):
        if block.kind == "text" and before.kind == kind:
            found[before.line] = block.text
        before = block if block.kind != "text" else before
    return found


def placed(printed: str, page: Path) -> str:
    """With places as a reader has them: the line in the block, in a file of the block's name."""

    def of_line(number: int) -> tuple[str, int]:
        block = [b for b in blocks(page, "python") if b.line < number][-1]
        named = re.match(r"# (\w+\.py)\n", block.text)
        return named[1] if named else "mine.py", number - block.line

    def place(found) -> str:
        name, line = of_line(int(found[1]))
        return f"{name}:{line}"

    printed = re.sub(r"[\w./-]*page_\w+\.py:(\d+)", place, printed)
    return re.sub(r"at line (\d+)", lambda m: f"at line {of_line(int(m[1]))[1]}", printed)


def plainly(line: str) -> str:
    """Without times and columns."""
    return " ".join(re.sub(r"\d+\.\d\d\b", "TIME", line).split())


def assert_printed(page: Path, block: Block, printed: str) -> None:
    """What the page says that a block prints is there. With EXPECTTEST_ACCEPT=1 the page is made to
    say it, from the first line that it shows of it, unless it marks with "..." what it leaves out.
    Where that moves other blocks, the next run goes on.
    """
    said = shown(page, block.kind).get(block.line, "")
    lines = [*map(plainly, printed.splitlines())]
    missing = [x for x in said.splitlines() if x != "..." and plainly(x) not in lines]
    if missing and os.environ.get("EXPECTTEST_ACCEPT") and "..." not in said.splitlines():
        first = said.partition(":")[0]
        now = printed[printed.index(first) :].strip() + "\n"
        page.write_text(page.read_text().replace(f"```text\n{said}```", f"```text\n{now}```", 1))
    else:
        assert not missing, f"{page.name}:{block.line}: {missing}\nnot in\n{printed}"
