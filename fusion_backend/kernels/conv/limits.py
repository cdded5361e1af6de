"""Where cuDNN may compute a convolution with relu in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_backend.compat.torch import inductor_config
from fusion_backend.kernels.common.inputs import same_sizes
from fusion_backend.kernels.common.rows import UNMEASURED
from fusion_backend.kernels.conv.library import deterministic, windows_of
from fusion_backend.reporting.reject import HostTime, Reject

# cuDNN's call has no gradient.
ONLY_INFERENCE = Reject("its gradient would compute the convolution again")


def worth_it() -> Reject:
    """Without CUDA graphs the time of the host counts: on an H100 a call of a ResNet-18 in fp32
    took 2.78 ms with six such sites and 2.18 ms without, though the GPU took 1.77 and 2.05 ms.
    """
    if inductor_config.triton.cudagraphs:
        return UNMEASURED
    return HostTime(
        "it takes the host longer than plain Inductor's calls, except under CUDA graphs "
        '(mode="reduce-overhead"); fusion.gate=always takes it'
    )


def reject_vectors_of(o: int, **vectors: Tensor | None) -> Reject | None:
    """Refuse what is not one number for each of the o channels of the result."""
    for name, t in vectors.items():
        if t is not None and not same_sizes(t.shape, (o,)):
            return Reject(f"{name} has shape {tuple(t.shape)}, not ({o},)")


def reject_residual(x: Tensor, weight: Tensor, z: Tensor | None, windows: str) -> Reject | None:
    """cuDNN adds a tensor of the result's shape and dtype, and broadcasts none."""
    if z is None:
        return None
    y = windows_of(windows).convolve(x, weight.to(x.dtype), None)
    if not same_sizes(z.shape, y.shape) or z.dtype != y.dtype:
        return Reject(f"z is {z.dtype} {tuple(z.shape)}, the result {y.dtype} {tuple(y.shape)}")


def reject_settings(x: Tensor, windows: str) -> Reject | None:
    """Refuse where cuDNN is off, or where the same bits are asked for each time."""
    if windows_of(windows).groups > 1:
        # much slower than plain Inductor's, and in TF32 even where that is computed in fp32
        return Reject("of convolutions in groups cuDNN has no good kernels with relu")
    if not x.is_cuda:
        return None
    if not torch.backends.cudnn.is_available() or not torch.backends.cudnn.enabled:
        return Reject("there is no cuDNN, or torch.backends.cudnn.enabled is off")
    if deterministic():
        return Reject("this call of cuDNN is not deterministic, and that is asked for")
