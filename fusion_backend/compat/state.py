"""The state of torch that decides what operators compute, besides their arguments."""

from __future__ import annotations

import torch

# Each is asked as torch.<name>() or torch.backends.<name>. Checked in 2.11, 2.13 and 2.15.
ASKED = (
    "is_grad_enabled",
    "is_inference_mode_enabled",
    "is_autocast_cache_enabled",
    "get_default_dtype",
    "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
)
BACKENDS = (
    "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.enabled",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
)
ATTENTION = ("flash_sdp", "math_sdp", "mem_efficient_sdp", "cudnn_sdp")


def state_of_torch() -> str:
    """Grad mode, autocast, precision, and the kernels that are allowed, as text."""
    parts = [f"{name} {getattr(torch, name)()}" for name in ASKED]
    for device in ("cpu", "cuda"):
        on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        parts.append(f"autocast {device} {on} {dtype}")
    for path in BACKENDS:
        value: object = torch.backends
        for name in path.split("."):
            value = getattr(value, name)
        parts.append(f"{path} {value}")
    parts += [f"{name} {getattr(torch.backends.cuda, f'{name}_enabled')()}" for name in ATTENTION]
    return "\n".join(parts)


def inside_functorch() -> bool:
    """Is a graph compiled inside a vmap, a grad or a jvp that is under way?"""
    return torch._C._functorch.peek_interpreter_stack() is not None
