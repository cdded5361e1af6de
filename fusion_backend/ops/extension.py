"""An op whose sites are extensions of the matches of rules."""

from __future__ import annotations

from collections.abc import Callable

from fusion_backend.ops.op import Op

EXTENSIONS: dict[str, Extension] = {}


class Extension(Op):
    """An op that no rule finds: a pass extends the matches of rules, and writes its arguments down.
    A decorator of the reference. Its sites are decided after those of all rules, and only where
    none of these is fused.
    """

    replacement_fn = neighbours_fn = None  # what is asked of a rule at its sites

    def __init__(self, reference: Callable) -> None:
        super().__init__(reference)
        EXTENSIONS[self.name] = self
