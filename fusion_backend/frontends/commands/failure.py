"""How a command fails: in a sentence, with an exit status."""

from __future__ import annotations


class Failure(Exception):
    """A sentence for standard error, and the exit status: 1 where what was asked for failed, 2
    where it could not be asked for in this way.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status
