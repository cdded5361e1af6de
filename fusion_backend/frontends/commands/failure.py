"""How a command fails: in a sentence, with an exit status."""

from __future__ import annotations


class Failure(Exception):
    """A sentence for standard error, and the exit status: 1 if the command failed, 2 if it was
    called wrongly.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
