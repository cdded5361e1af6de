"""The line on stderr that says what a long run is doing."""

from __future__ import annotations

import sys
import time


class Status:
    """What goes on, on stderr: one line that changes on a terminal, a line each elsewhere."""

    def __init__(self):
        self.start, self.head, self.live = time.perf_counter(), "", sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        line = f"{time.perf_counter() - self.start:5.0f} s  {self.head}: {what}"
        print(
            f"\r\033[K{line}" if self.live else line,
            end="" if self.live else "\n",
            file=sys.stderr,
            flush=True,
        )

    def clear(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
