"""Progress of a long run, on stderr: a bar by rich where it is installed, else a line a step; nothing in a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """Gives `begin(name)`, to be called before each of `total` steps."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield plain(total, what)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # A table that goes to a file must not be drawn into the terminal with the bar.
    on_screen = sys.stdout.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=on_screen) as bar:
        task, begun = bar.add_task(what, total=total), 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=f"{what}: {name}")
            begun += 1

        yield begin
        bar.update(task, completed=begun)


def plain(total: int, what: str) -> Callable[[str], None]:
    begun = 0

    def begin(name: str) -> None:
        nonlocal begun
        begun += 1
        print(f"{what} {begun}/{total}: {name}", file=sys.stderr)

    return begin
