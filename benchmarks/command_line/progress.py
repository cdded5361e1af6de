"""Progress of a long run, on stderr: a bar by rich where it is installed, else a line a step;
nothing in a pipe.
"""

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
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError:
        yield plain(total, what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # A table that goes to a file must not be drawn into the terminal with the bar. A bar that
    # redraws itself in a thread would take the host's time from what is measured.
    how = dict(transient=True, redirect_stdout=sys.stdout.isatty(), auto_refresh=False)
    with Progress(*columns, console=Console(stderr=True), **how) as bar:
        task, begun = bar.add_task(what, total=total), 0

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=f"{what}: {name}")
            bar.refresh()
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
