"""Triton code that patterns share.

Comes in: tensors.
Goes out: kernel launches.
May import: reporting, compat.
"""

from fusion_backend.kernels.common.launch import interpreted, interpreting, launch

__all__ = ["interpreted", "interpreting", "launch"]
