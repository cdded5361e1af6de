"""Operations and bytes of a pattern, counted from its reference on tensors without data.

A matrix product is 2·m·n·k operations (convolutions and attention as torch.utils.flop_counter has
them). Elsewhere it is one an element: of the result of a pointwise operator, exp, division and
comparison alike, and of what a reduction reads. Casts, copies, selections and views are none. What
is counted is the reference's arithmetic, forward and, when training, autograd's backward: a kernel
that computes something twice, or less, gets no other number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fusion_backend.compat.torch import TorchDispatchMode, decomposition_table

aten = torch.ops.aten
COMPOUND = (  # counted by the operators that they decompose into
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward "
    "nll_loss_backward gelu gelu_backward silu silu_backward"
).split()
COMPOUND = {getattr(aten, name).default for name in COMPOUND if hasattr(aten, name)}
REDUCTIONS = dict.fromkeys("sum mean amax amin max min prod cumsum".split(), 1)
REDUCTIONS |= dict(linalg_vector_norm=2, logsumexp=3, var=3, var_mean=3, std=3, std_mean=3)
# Of images: three for each of the three lines between two pixels; a product and a sum for each of
# the four pixels that a gradient goes to; and one for each element of a window.
IMAGES = {
    "upsample_bilinear2d": lambda args, out: 9 * out.numel(),
    "upsample_bilinear2d_backward": lambda args, out: 8 * args[0].numel(),
    "max_pool2d_with_indices": lambda args, out: math.prod(args[1]) * out[0].numel(),
    "max_pool2d_with_indices_backward": lambda args, out: args[0].numel(),
}
FREE = "clone copy_ fill fill_ zero_ where masked_fill masked_fill_ _to_copy".split()


class Operations(TorchDispatchMode):
    """Counts what runs inside."""

    def __init__(self):
        super().__init__()
        self.count, self.random = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func in COMPOUND:
            with self:
                return decomposition_table[func](*args, **kwargs)
        out, name = func(*args, **kwargs), func.overloadpacket.__name__
        if func.overloadpacket in flop_registry:
            self.count += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        elif name == "_int_mm":  # of integers, which torch's registry leaves out
            self.count += 2 * args[0].shape[1] * out.numel()
        elif name in IMAGES:
            self.count += IMAGES[name](args, out)
        elif name in REDUCTIONS:
            self.count += args[0].numel() * REDUCTIONS[name]
        elif torch.Tag.pointwise in func.tags and name not in FREE:
            self.count += out.numel()
        return out


def operations(fn: Callable, args: list, train: bool) -> int:
    """Of `fn(*args)`, arguments on the meta device, and with `train` of its gradients."""
    with Operations() as counted, torch.set_grad_enabled(train):
        gradients(fn, args) if train else fn(*args)
    return counted.count


def draws(fn: Callable, args: list) -> bool:
    """Does it use random numbers?"""
    with Operations() as counted, torch.no_grad():
        fn(*args)
    return counted.random


def size_of(fn: Callable, args: list, train: bool) -> int:
    """Bytes of arguments and results, and with `train` of their gradients: every implementation
    moves these.
    """
    with torch.set_grad_enabled(train):
        outs, grads = gradients(fn, args) if train else (results(fn(*args)), ())
    moved = [a for a in args if isinstance(a, Tensor)] + outs + [g for g in grads if g is not None]
    moved += [out for out in outs if out.requires_grad]  # their gradients
    return sum(t.numel() * t.itemsize for t in moved)


def results(out) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def gradients(fn: Callable, args: list) -> tuple[list[Tensor], tuple]:
    outs = results(fn(*args))
    reached = [out for out in outs if out.requires_grad]
    wanted = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return outs, torch.autograd.grad(
        reached, wanted, [torch.empty_like(o) for o in reached], allow_unused=True
    )
