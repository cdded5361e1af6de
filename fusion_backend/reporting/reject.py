"""A refusal and its reason, and the error of a definition that is not understood."""

from __future__ import annotations

import dataclasses


class PatternError(Exception):
    """A pattern is defined wrongly. The message names the pattern, its file and its line."""


@dataclasses.dataclass(frozen=True)
class Reject:
    """The answer of a guard, `worthwhile`, `neighbours` or `replacement` that refuses a site.

    reason: a sentence, which a user reads in the report. Raises PatternError where it is missing.

        return Reject("rows of more than 65,536 elements have no kernel")
    """

    reason: str

    def __post_init__(self) -> None:
        if not (isinstance(self.reason, str) and self.reason.strip()):
            raise PatternError(
                f"a {type(self).__name__} needs its reason, a sentence, not {self.reason!r}"
            )


class BackwardOnly(Reject):
    """The answer of `worthwhile` if the kernel is faster in the backward only. In training the
    forward is left to Inductor, as the inlined reference, and the backward kernel is used; in
    inference the site is refused.
    """


class Settled(Reject):
    """A refusal that the GPU's time cannot change: the gate measures no such site."""


class HostTime(Settled):
    """The answer of `worthwhile` if the kernel costs the host more than it gains on the GPU."""


class LessAccurate(Settled):
    """The answer of `worthwhile` if the kernel's results are further from the exact ones than those
    of the code that it replaces.
    """


class Unmeasured(Reject):
    """The answer of `worthwhile` or `neighbours` if nobody has timed the kernel. It leaves the site
    to Inductor as any refusal does, unless the gate measures it (`fusion.measure_s`).
    """
