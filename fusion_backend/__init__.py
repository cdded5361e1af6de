"""torch.compile(model, backend="fusion"): pattern fusion in front of Inductor."""

import time

LOADED_AT = time.time()  # before any other file of ours is read

# ruff: noqa: E402 (the clock is read before any other file of ours)
from fusion_backend.options import disable
from fusion_backend.pattern import LibraryCall, Pattern, Reject
from fusion_backend.reporting import report, reset

__all__ = ["LibraryCall", "Pattern", "Reject", "disable", "explain", "fuse", "report", "reset"]


def __getattr__(name: str):
    """explain and fuse pull in the compiler: import them when they are used."""
    if name == "explain":
        from fusion_backend.collect import explain

        return explain
    if name == "fuse":
        from fusion_backend.export import fuse

        return fuse
    raise AttributeError(name)
