"""torch.compile(model, backend="fusion"): pattern fusion in front of Inductor."""

import time
from typing import TYPE_CHECKING, Any

LOADED_AT = time.time()  # before any other file of ours is read

# ruff: noqa: E402 (the clock is read before any other file of ours)
from fusion_backend.ops.op import Op
from fusion_backend.ops.pattern import Pattern
from fusion_backend.ops.rule import Replacement, Rule, analysis
from fusion_backend.options import disable
from fusion_backend.reporting.reject import (
    BackwardOnly,
    LessAccurate,
    PatternError,
    Reject,
    Unmeasured,
)
from fusion_backend.reporting.report import report, reset

if TYPE_CHECKING:
    from fusion_backend.frontends.explain import explain
    from fusion_backend.frontends.exported import fuse

    __version__: str

__all__ = [
    "BackwardOnly",
    "LessAccurate",
    "Op",
    "Pattern",
    "PatternError",
    "Reject",
    "Replacement",
    "Rule",
    "Unmeasured",
    "analysis",
    "disable",
    "explain",
    "fuse",
    "report",
    "reset",
]


def __getattr__(name: str) -> Any:
    """`explain` and `fuse` import the compiler, and the version reads files: each is looked up when
    it is used.
    """
    if name == "explain":
        from fusion_backend.frontends.explain import explain

        return explain
    if name == "fuse":
        from fusion_backend.frontends.exported import fuse

        return fuse
    if name == "__version__":
        from importlib.metadata import version

        return version("fusion-backend")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
