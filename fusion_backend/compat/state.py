"""The state of torch that decides what operators compute, besides their arguments."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import attrgetter

import torch

# Each is asked as torch.<name>() or torch.backends.<name>. Checked in 2.11 and 2.14.
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
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
)
ATTENTION = ("flash_sdp", "math_sdp", "mem_efficient_sdp", "cudnn_sdp")


def state_of_torch() -> str:
    """Grad mode, autocast, precision, and the kernels that are allowed, as text."""
    parts = [f"{name} {asked(getattr(torch, name))}" for name in ASKED]
    for device in ("cpu", "cuda"):
        on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        parts.append(f"autocast {device} {on} {dtype}")
    for path in BACKENDS:
        parts.append(f"{path} {asked(lambda path=path: attrgetter(path)(torch.backends))}")
    parts += [f"{name} {getattr(torch.backends.cuda, f'{name}_enabled')()}" for name in ATTENTION]
    return "\n".join(parts)


def asked(question: Callable[[], object]) -> object:
    """The answer. The older names of settings raise an exception where a user has set them by their
    newer ones, which are asked as well.
    """
    try:
        return question()
    except Exception as error:
        return type(error).__name__


def state_of_compilers() -> str:
    """What decides whether Triton can compile a kernel, besides its version. Inductor names the
    ptxas that torch brings along in a variable of Triton's when it first compiles a kernel.
    """
    own = os.path.dirname(torch.__file__) + os.sep
    names = sorted(n for n in os.environ if n.startswith("TRITON_") and "CACHE" not in n)
    told = [(n, os.environ[n]) for n in names if not os.environ[n].startswith(own)]
    return repr((torch.version.cuda, told))


def inside_functorch() -> bool:
    """Is a graph compiled inside a vmap, a grad or a jvp that is under way?"""
    return torch._C._functorch.peek_interpreter_stack() is not None
