"""A refusal and its reason, and the error of a definition that is not understood."""

from __future__ import annotations

import dataclasses


class PatternError(Exception):
    """A pattern is defined wrongly. The message names the pattern, its file and its line."""


@dataclasses.dataclass(frozen=True)
class Reject:
    """The answer "no" of a guard, with its reason: a sentence that a user reads in the report.

    With `forward_only`, from `worthwhile`: in training the forward is left to Inductor as the
    inlined reference and the backward kernel is used all the same.
    """

    reason: str
    forward_only: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.reason, str) and self.reason.strip()):
            raise PatternError(f"a Reject needs its reason, a sentence, not {self.reason!r}")
