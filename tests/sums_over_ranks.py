"""Sums over ranks as if the ranks reached each other's memory."""

import contextlib
from unittest import mock

from fusion_backend.patterns import all_reduce_norm as pattern


@contextlib.contextmanager
def within_reach():
    """The ranks are taken to reach each other's memory, and the op's reference for its kernel."""
    op = pattern.all_reduce_norm
    reach = dict.fromkeys(("unsupported", "out_of_reach"), lambda group: "")
    with mock.patch.multiple(pattern, **reach):
        with mock.patch.object(op, "kernel_fn", None), mock.patch.object(op, "guard_fn", None):
            yield
