"""Reject, the answer of a guard that refuses a site; PatternError, a wrong definition."""

from __future__ import annotations

import dataclasses


class PatternError(Exception):
    """A pattern is defined wrongly. The message names the pattern, its file and its line."""


@dataclasses.dataclass(frozen=True)
class Reject:
    """The answer of a guard, `worthwhile` or library provider that refuses a site.

    reason: a sentence, which a user reads in the report. forward_only, from `worthwhile`: in
    training only the forward is refused. Inductor compiles it as the inlined reference, and the
    backward kernel is still used. Raises PatternError for an empty reason.

        return Reject("rows of more than 65,536 elements have no kernel")
    """

    reason: str
    forward_only: bool = False

    def __post_init__(self):
        if not (isinstance(self.reason, str) and self.reason.strip()):
            raise PatternError(f"a Reject needs its reason, a sentence, not {self.reason!r}")
