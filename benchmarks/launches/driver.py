"""A GPU of sm_90 that Triton compiles for, where there is none."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from fusion_backend.compat.triton import SM_90


class Driver:
    """Stands for a GPU that is asked what it is, and never to do anything."""

    def get_current_target(self):
        return SM_90

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def pretended_gpu():
    """PyTorch is told that there is a GPU of sm_90. A build with CUDA would look for its driver."""
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    ):
        yield
