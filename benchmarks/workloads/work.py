"""A piece of work that benchmarks.patterns measures: a pattern, sizes and a dtype, and its floor.

A new kernel adds to PASSES how often it must move its tensor. Operations are counted from the
reference (measure/counting.py), and so are bytes where PASSES has no line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.measure.library import FUSION_RULES
from benchmarks.workloads.documents import of_documents

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
L2 = 48e6  # bytes; work that moves fewer may stay in the L2 of the GPUs this is for (50 to 60 MB)


class Work(NamedTuple):
    pattern: str
    case: dict[str, int]
    dtype: torch.dtype
    train: bool = False
    linear: bool = False  # weights lie in memory as those of nn.Linear do
    mask: str = ""  # of a softmax of scores [b, h, n, n]: "additive" or "boolean", [b, 1, n, n]

    def to_json(self) -> str:
        return json.dumps(self._asdict() | dict(dtype=NAMES[self.dtype]))

    @classmethod
    def from_json(cls, line: str) -> Work:
        fields = json.loads(line)
        return cls(**fields | dict(dtype=DTYPES[fields["dtype"]]))

    @property
    def name(self) -> str:
        words = " ".join(f"{k}={v}" for k, v in self.case.items())
        notes = (
            " train" * self.train + " linear" * self.linear + f" {self.mask} mask" * bool(self.mask)
        )
        return f"{self.pattern} {NAMES[self.dtype]} {words}{notes}"

    def arguments(self, device: torch.device) -> list:
        """Fresh random arguments; weights scaled so that outputs are of order one."""

        dtype, case = self.dtype, dict(self.case)
        if autocast := case.pop("autocast", 0):
            dtype = torch.float32

        def tensor(*shape):
            return torch.randn(shape, device=device, dtype=dtype)

        if self.mask:
            b, h, n = (self.case[name] for name in "bhn")
            x, mask = tensor(b, h, n, n).requires_grad_(self.train), tensor(b, 1, n, n)
            masks = (
                (mask, None, None) if self.mask == "additive" else (None, mask > 1, float("-inf"))
            )
            return [x, 0.125, *masks]
        args = list(FUSION_RULES[self.pattern].inputs_fn(tensor, **case))
        for i in FROM_LINEAR[self.pattern] if autocast else ():
            args[i] = args[i].to(self.dtype)
        for i in WEIGHTS.get(self.pattern, ()):
            args[i] *= args[i].shape[0] ** -0.5
        if self.linear:
            for i in WEIGHTS.get(self.pattern, (1,)):
                args[i] = args[i].t().contiguous().t()
        for i, value in PLAIN.get(self.pattern, {}).items():
            if value is not None or not self.case.get("weighted"):
                args[i] = value
        for i, a in enumerate(args):
            if isinstance(a, Tensor) and i not in CONSTANT.get(self.pattern, ()):
                a.requires_grad_(self.train and a.is_floating_point())
        return args

    @property
    def function(self) -> Callable:
        """What is measured: the reference, or what surrounds it in a model, where masks and indices
        are made.
        """
        if self.pattern in AS_WRITTEN:
            return AS_WRITTEN[self.pattern]
        if "channels_last" in self.case:
            return read_by_convolution(FUSION_RULES[self.pattern].reference)
        if "autocast" in self.case:
            return read_by_linear(FUSION_RULES[self.pattern].reference, self.dtype)
        if "documents" in self.case and self.pattern == "attention":
            return of_documents()
        return (
            windowed(**self.case) if "window" in self.case else FUSION_RULES[self.pattern].reference
        )

    def floor_ms(self, bandwidth: float, matrix: float) -> float:
        """The least time, given bytes and matrix operations a second, which are those of 16 bits:
        of int8 there are twice as many.
        """
        matrix *= 2 if self.pattern == "dequantize_linear" else 1
        return max(self.bytes / bandwidth, self.flops / matrix) * 1e3

    @property
    def bytes(self) -> int:
        """What must be read and written, at least."""
        item = self.dtype.itemsize
        if self.pattern == "linear_cross_entropy":
            rows, k, v = (self.case[name] for name in ("rows", "k", "v"))
            return (rows * k + k * v) * item * (2 if self.train else 1)
        if self.pattern == "gated_linear":
            m, k, n = (self.case[name] for name in "mkn")
            return (m * k + 2 * k * n + m * n) * item * (3 if self.train else 1)
        if self.mask:
            b, h, n = (self.case[name] for name in "bhn")
            # one that drops, in backward too
            once = b * n * n * (item if self.mask == "additive" else 1 + self.train)
            return b * h * n * n * item * PASSES[self.pattern][self.train] + once
        if self.pattern in ("quantize_int8", "quantize_per_token", "rms_norm_quantize"):
            return self.size * (item + 1)
        if "autocast" in self.case:
            return self.size * UNDER_AUTOCAST[self.pattern][self.train]
        if self.pattern in PASSES:
            return self.size * item * PASSES[self.pattern][self.train]
        from benchmarks.measure.counting import size_of  # what an older revision need not support

        args = self.arguments(torch.device("meta"))
        return size_of(self.function, args, self.train)

    @property
    def size(self) -> int:
        """Elements of the tensor that counts."""
        if "c" in self.case:  # [b, c, n, n]
            return self.case["b"] * self.case["c"] * self.case["n"] ** 2
        if self.pattern == "norm_rotary":
            return math.prod(self.case[name] for name in "bhnd")
        if self.pattern == "relative_bias":
            return self.case["h"] * self.case["n"] * self.case["m"]
        if self.pattern == "token_log_probs":
            return math.prod(self.case[name] for name in "bsv")
        if "t" in self.case:  # [b, t, n]
            return self.case["b"] * self.case["t"] * self.case["n"]
        return self.case.get("size") or self.case["rows"] * self.case.get("n", self.case.get("v"))

    @property
    def flops(self) -> int:
        if self.pattern == "attention":
            b, h, n, d = (self.case[name] for name in "bhnd")
            e = self.case.get("e", d)
            size = 8 * d + 6 * e if self.train else 2 * d + 2 * e  # of seven products, or of two
            return int(b * h * n * n * size * attended(self.case))
        from benchmarks.measure.counting import operations

        return operations(self.function, self.arguments(torch.device("meta")), self.train)

    @property
    def small(self) -> bool:
        """Does it fit in the L2?"""
        return self.bytes <= L2


def of_t5(index: Tensor, weight: Tensor) -> Tensor:
    """A relative bias with T5's own index, of the same shape, computed in the graph; laid out as
    attention reads it.
    """
    n, m = index.shape
    apart = torch.arange(m, device=index.device) - torch.arange(n, device=index.device)[:, None]
    half = weight.shape[0] // 2
    near, exact = apart.abs(), half // 2
    far = exact + (torch.log(near.float() / exact) / math.log(128 / exact) * (half - exact)).long()
    row = (apart > 0).long() * half + torch.where(near < exact, near, far.clamp(max=half - 1))
    return FUSION_RULES["relative_bias"].reference(row, weight).contiguous()


def of_int8(q, w, scale, w_scale, b, dtype) -> Tensor:
    """A linear layer of int8 as it is written for a GPU: the reference multiplies in fp64."""
    from fusion_backend.compat.torch import int8_product  # which an older revision lacks

    return int8_product(q, w).to(w_scale.dtype) * scale * w_scale + b


def windowed(window: int, **case) -> Callable:
    """Attention to the `window` keys up to the query's own that are no padding, by a mask made in
    the graph.
    """

    def attention(q, k, v, mask, bias, keep, *rest):
        apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(
            k.shape[2], device=q.device
        )
        band = (apart >= 0) & (apart < window)
        return FUSION_RULES["attention"].reference(
            q, k, v, mask, bias, band if keep is None else band & keep, *rest
        )

    return attention


def read_by_linear(reference: Callable, dtype: torch.dtype) -> Callable:
    """With the cast of its first result that a linear layer inserts under autocast."""

    def norm(*args):
        out = reference(*args)
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = first.to(dtype) if first.dtype == torch.float32 else first
        return (first, *rest) if rest else first

    return norm


def read_by_convolution(reference: Callable) -> Callable:
    """With the result in the layout of x, which a convolution reads; in eager it may be another."""
    return lambda *args: reference(*args).contiguous(memory_format=torch.channels_last)


def attended(case: dict) -> float:
    """The share of the scores that attention must compute."""
    n = case["n"]
    if documents := case.get("documents"):
        return (n / documents + 1) / 2 / n
    end = n // 2 if case.get("padded") else n
    window = case.get("window", n if case.get("causal") else None)
    if window is None:
        return end / n
    return sum(max(0, min(i + 1, end) - max(0, i + 1 - window)) for i in range(n)) / n**2


# What surrounds a pattern in a model, or how it is written there, if not as its reference.
AS_WRITTEN = {"relative_bias": of_t5, "dequantize_linear": of_int8}
# Arguments (by position) that are weights of products.
WEIGHTS = {"linear_act": (1,), "gated_linear": (1, 3), "gated_mlp": (1, 3, 5)}
WEIGHTS |= {"mlp": (1, 3), "dropout_mlp": (1, 3), "dropout_gated_mlp": (1, 3, 5)}
# Arguments (by position) that get no gradient: made of positions, weights of classes, and what
# logits are compared with.
CONSTANT = {"norm_rotary": (4, 5), "channel_cross_entropy": (2,)}
CONSTANT |= {"soft_cross_entropy": (1,), "distillation_loss": (1,), "cross_entropy": (2,)}
# How often a tensor of the size is read or written, at least: forward alone, and with the backward.
PASSES = {
    "add_mul": (4, 4),
    "add_mul_exp": (3, 3),
    "layer_norm": (2, 5),
    "rms_norm": (2, 5),
    "norm_rotary": (2, 5),
    "softmax": (2, 5),
    "modulated_norm": (2, 5),
    "add_rms_norm": (4, 8),
    "add_layer_norm": (4, 8),
    "cross_entropy": (1, 3),
    "token_log_probs": (1, 3),
    "soft_cross_entropy": (2, 5),
    "distillation_loss": (2, 5),
    "norm_act": (2, 5),
    "gated_norm": (3, 8),
    "channel_norm": (2, 5),
    "channel_softmax": (2, 5),
    "channel_cross_entropy": (1, 3),
    "l2_norm": (2, 5),
    "batch_norm": (2, 4),
    "group_norm": (2, 5),
    "bias_act": (2, 5),
    "dropout_add": (3, 5),
    "dropout_add_layer_norm": (4, 9),
    "relative_bias": (1, 2),
    "gelu": (2, 5),
}
# Under autocast: the arguments (by position) that come from a linear layer, in 16 bits, beside
# others in fp32, and the bytes of an element that are moved at least: forward alone, and with the
# backward.
FROM_LINEAR = {"layer_norm": (), "rms_norm": (), "modulated_norm": (3, 4)}
FROM_LINEAR |= dict.fromkeys(("add_layer_norm", "add_rms_norm", "dropout_add_layer_norm"), (0,))
UNDER_AUTOCAST = {
    **dict.fromkeys(("layer_norm", "rms_norm", "modulated_norm"), (6, 16)),
    **dict.fromkeys(("add_layer_norm", "add_rms_norm", "dropout_add_layer_norm"), (12, 28)),
}
# Arguments (by position) in the form that is measured: no mask, no offset, no smoothing, no weight
# of a norm that is modulated.
PLAIN = {
    "softmax": dict.fromkeys((1, 2, 3, 4)),
    "rms_norm": {2: None},
    "norm_rotary": {2: None},
    "rms_norm_quantize": {2: None},
    "add_rms_norm": {3: None},
    "modulated_norm": {1: None, 2: None},
    "cross_entropy": {2: None, 4: 0.0},
    "linear_cross_entropy": {2: None, 5: 0.0},
    "channel_cross_entropy": {2: None, 4: 0.0},
    "soft_cross_entropy": {2: None, 3: 1.0, 4: None},
}
