"""Triton code shared by patterns, and the one way to launch a kernel."""

from fusion_backend.kernels.launch import interpreted, interpreting, launch

__all__ = ["interpreted", "interpreting", "launch"]
