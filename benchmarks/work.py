"""The pieces of work that `benchmarks.patterns` measures: a pattern, sizes and a dtype, and the
floor of each.

A new kernel adds its sizes to WORK, one small one to SMALL, and how often it must move its tensor
to PASSES. Operations are counted from the reference (benchmarks/counting.py), bytes too where
PASSES has no line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.counting import operations, size_of
from fusion_backend.ops.registry import RULES

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

        def tensor(*shape):
            return torch.randn(shape, device=device, dtype=self.dtype)

        if self.mask:
            b, h, n = (self.case[name] for name in "bhn")
            x, mask = tensor(b, h, n, n).requires_grad_(self.train), tensor(b, 1, n, n)
            masks = (
                (mask, None, None) if self.mask == "additive" else (None, mask > 1, float("-inf"))
            )
            return [x, 0.125, *masks]
        args = list(RULES[self.pattern].inputs_fn(tensor, **self.case))
        if self.pattern == "gated_linear":
            for i in (1, 3):
                args[i] *= self.case["k"] ** -0.5
        if self.linear:
            for i in (1, 3) if self.pattern == "gated_linear" else (1,):
                args[i] = args[i].t().contiguous().t()
        for i, value in PLAIN.get(self.pattern, {}).items():
            args[i] = value
        return [
            a.requires_grad_(self.train and a.is_floating_point()) if isinstance(a, Tensor) else a
            for a in args
        ]

    @property
    def function(self) -> Callable:
        """What is measured: the reference, or what surrounds it in a model, where masks and indices
        are made.
        """
        if self.pattern == "relative_bias":
            return of_t5
        return windowed(**self.case) if "window" in self.case else RULES[self.pattern].reference

    def floor_ms(self, bandwidth: float, matrix: float) -> float:
        """The least time, given bytes and matrix operations a second."""
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
        if self.pattern in PASSES:
            return self.size * item * PASSES[self.pattern][self.train]
        args = self.arguments(torch.device("meta"))
        return size_of(self.function, args, self.train)

    @property
    def size(self) -> int:
        """Elements of the tensor that counts."""
        if "c" in self.case:  # [b, c, n, n]
            return self.case["b"] * self.case["c"] * self.case["n"] ** 2
        if self.pattern == "relative_bias":
            return self.case["h"] * self.case["n"] * self.case["m"]
        return self.case.get("size") or self.case["rows"] * self.case.get("n", self.case.get("v"))

    @property
    def flops(self) -> int:
        if self.pattern == "attention":
            b, h, n, d = (self.case[name] for name in "bhnd")
            return int(4 * b * h * n * n * d * attended(self.case) * (3.5 if self.train else 1))
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
    return RULES["relative_bias"].reference(row, weight).contiguous()


def windowed(window: int, **case) -> Callable:
    """Attention to the `window` keys up to the query's own that are no padding, by a mask made in
    the graph.
    """

    def attention(q, k, v, mask, bias, keep, *rest):
        apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(
            k.shape[2], device=q.device
        )
        band = (apart >= 0) & (apart < window)
        return RULES["attention"].reference(
            q, k, v, mask, bias, band if keep is None else band & keep, *rest
        )

    return attention


def attended(case: dict) -> float:
    """The share of the scores that attention must compute."""
    n = case["n"]
    end = n // 2 if case.get("padded") else n
    window = case.get("window", n if case.get("causal") else None)
    if window is None:
        return end / n
    return sum(max(0, min(i + 1, end) - max(0, i + 1 - window)) for i in range(n)) / n**2


# How often a tensor of the size is read or written, at least: forward alone, and with the backward.
PASSES = {
    "add_mul": (4, 4), "add_mul_exp": (3, 3), "layer_norm": (2, 5), "rms_norm": (2, 5),
    "softmax": (2, 5),
    "add_rms_norm": (4, 8), "add_layer_norm": (4, 8), "cross_entropy": (1, 3),
    "l2_norm": (2, 5), "batch_norm": (2, 4), "group_norm": (2, 5), "bias_act": (2, 5),
    "dropout_add": (3, 5), "dropout_add_layer_norm": (4, 9), "relative_bias": (1, 2),
    "gelu": (2, 5),
}  # fmt: skip
# Arguments (by position) in the form that is measured: no mask, no offset, no smoothing.
PLAIN = {
    "softmax": dict.fromkeys((1, 2, 3, 4)), "rms_norm": {2: None}, "rms_norm_quantize": {2: None},
    "add_rms_norm": {3: None}, "cross_entropy": {3: 0.0}, "linear_cross_entropy": {2: None, 5: 0.0},
}  # fmt: skip
ROWS = [(16384, 4096), (8192, 8192), (2048, 32768), (64, 131072)]
FEW = [(192, 5120), (16, 8192), (4096, 768)]
# of models, and the longest that is shared
WIDTHS = [(16384, 3072), (8192, 5120), (4096, 12288), (1024, 65536)]
OTHER_DTYPES = {
    **dict.fromkeys(("layer_norm", "softmax", "add_rms_norm"), dict(rows=16384, n=4096)),
    "cross_entropy": dict(rows=4096, v=128256),
    "quantize_per_token": dict(rows=8192, n=4096),
    "group_norm": dict(b=64, c=320, n=32, groups=32),
}
POINTWISE = ("add_mul", "add_mul_exp", "quantize_int8")
WORK = [
    *(Work(name, dict(size=size), F32) for name in POINTWISE for size in (100_000, 1_000_000)),
    Work("add_mul", dict(size=20_000_000), F32),
    Work("add_mul_exp", dict(size=20_000_000), F32),
    Work("add_mul_exp", dict(size=100_000_000), F32),
    Work("quantize_int8", dict(size=10_000_000), F32),
    Work("quantize_int8", dict(size=50_000_000), F32),
    Work("quantize_int8", dict(size=64_000_000), BF16),
    *(Work("layer_norm", dict(rows=rows, n=n), BF16) for rows, n in ROWS),
    *(Work("layer_norm", dict(rows=rows, n=n), BF16, train=True) for rows, n in ROWS),
    *(
        Work("softmax", dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in ROWS[:3]
    ),
    *(
        Work("softmax", dict(b=b, h=h, n=n), BF16, train, mask=mask)
        for train in (False, True)
        for mask in ("additive", "boolean")
        for b, h, n in ((4, 32, 2048), (32, 16, 512))
    ),
    *(
        Work("add_rms_norm", dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in ROWS[:3]
    ),
    *(
        Work(name, dict(rows=16384, n=4096), BF16, train)
        for train in (False, True)
        for name in ("rms_norm", "add_layer_norm")
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in FEW
        for name in ("layer_norm", "softmax", "add_rms_norm")
    ),
    *(
        Work("l2_norm", dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in ROWS[:3]
    ),
    *(Work("batch_norm", dict(b=b, c=c, n=n), BF16) for b, c, n in ((64, 256, 56), (256, 2048, 7))),
    *(
        Work("group_norm", dict(b=b, c=c, n=n, groups=32), BF16, train)
        for train in (False, True)
        for b, c, n in ((16, 480, 64), (64, 320, 32), (2, 512, 128))
    ),
    Work("bias_act", dict(rows=16384, n=4096), BF16),
    *(
        Work("gelu", dict(rows=16384, n=4096) | form, BF16, train)
        for train in (False, True)
        for form in ({}, dict(tanh=1))
    ),
    *(
        Work("dropout_add_layer_norm", dict(rows=rows, n=n), BF16, train=True)
        for rows, n in (*ROWS[:3], *FEW[::2])
    ),
    *(Work("dropout_add", dict(rows=rows, n=n), BF16, train=True) for rows, n in (ROWS[0], FEW[2])),
    *(
        Work(name, dict(rows=rows, n=n), BF16)
        for name in ("quantize_per_token", "rms_norm_quantize")
        for rows, n in ((8192, 4096), (16384, 8192), (8192, 2048), (256, 4096))
    ),
    Work("cross_entropy", dict(rows=8192, v=128256), BF16, train=True),
    Work("cross_entropy", dict(rows=16384, v=50257), BF16, train=True),
    Work("linear_cross_entropy", dict(rows=8192, k=4096, v=128256), BF16, train=True, linear=True),
    Work("linear_cross_entropy", dict(rows=8192, k=1024, v=151936), BF16, train=True, linear=True),
    Work("linear_cross_entropy", dict(rows=8192, k=4096, v=128256), BF16, linear=True),
    Work("attention", dict(b=4, h=16, n=4096, d=128, causal=1), BF16),
    Work("attention", dict(b=4, h=32, n=2048, d=64, causal=1), BF16),
    *(
        Work("attention", dict(b=32, h=16, n=512, d=64, bias=1), BF16, train)
        for train in (False, True)
    ),
    *(
        Work("attention", dict(b=32, h=16, n=512, d=64, padded=1), BF16, train)
        for train in (False, True)
    ),
    *(
        Work("attention", dict(b=b, h=h, n=n, d=d) | mask, BF16, train)
        for train in (False, True)
        for b, h, n, d, mask in (
            (4, 16, 4096, 128, dict(window=4096, hand=1)),
            (4, 32, 2048, 64, dict(window=2048)),
            (8, 16, 2048, 128, dict(bias=1)),
            (8, 16, 2048, 128, dict(padded=1)),
            (4, 16, 4096, 128, dict(window=1024)),
            (4, 32, 2048, 64, dict(window=256)),
            (4, 32, 2048, 64, dict(window=2048, padded=1)),
            (4, 16, 2048, 128, dict(window=2048, cap=50)),
            (32, 16, 512, 64, dict(padded=1, drop=1)),
            (32, 16, 512, 64, dict(bias=1, drop=1)),
            (8, 16, 2048, 128, dict(padded=1, drop=1)),
            (8, 16, 2048, 128, dict(bias=1, drop=1)),
        )
    ),
    *(
        Work("relative_bias", dict(n=n, m=n, h=16), BF16, train)
        for train in (False, True)
        for n in (512, 2048)
    ),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16, linear=True),
    Work("gated_linear", dict(m=16384, k=1024, n=4096), BF16, train=True, linear=True),
    Work("gated_linear", dict(m=16384, k=512, n=2048), BF16, linear=True),
    Work("gated_linear", dict(m=8192, k=4096, n=14336), BF16, linear=True),
    Work("gated_linear", dict(m=16, k=4096, n=14336), BF16, linear=True),
    *(
        Work("patch_embedding", dict(b=b, c=c, n=n, p=p, o=o), BF16, train)
        for train in (False, True)
        for b, c, n, p, o in (
            (128, 3, 224, 16, 1024),
            (32, 3, 224, 14, 1024),
            (1, 3, 224, 16, 768),
            (16, 16, 128, 2, 3072),
        )
    ),
    Work("batch_norm", dict(b=256, c=512, n=14), BF16),
    *(
        Work("group_norm", dict(b=1, c=512, n=128, groups=32), BF16, train)
        for train in (False, True)
    ),
    *(
        Work(name, case, dtype, train)
        for train in (False, True)
        for dtype in (F32, F16)
        for name, case in OTHER_DTYPES.items()
        if not (train and name == "quantize_per_token")
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16, train)
        for train in (False, True)
        for rows, n in WIDTHS
        for name in ("layer_norm", "rms_norm", "softmax", "add_rms_norm", "dropout_add_layer_norm")
        if train or name != "dropout_add_layer_norm"
    ),
    *(
        Work(name, dict(rows=rows, n=n), BF16)
        for rows, n in ((4096, 16384), (3072, 20480))
        for name in ("layer_norm", "rms_norm", "add_rms_norm")
    ),
]
SMALL = [
    Work("add_mul", dict(size=10_000), F32),
    Work("add_mul_exp", dict(size=10_000), F32),
    Work("quantize_int8", dict(size=10_000), F32),
    Work("layer_norm", dict(rows=64, n=256), BF16),
    Work("layer_norm", dict(rows=64, n=256), BF16, train=True),
    *(
        Work(name, dict(rows=64, n=256), BF16, train=True)
        for name in ("softmax", "rms_norm", "add_rms_norm")
    ),
    *(
        Work("softmax", dict(b=2, h=3, n=64), BF16, train=True, mask=mask)
        for mask in ("additive", "boolean")
    ),
    Work("add_layer_norm", dict(rows=64, n=256), BF16, train=True),
    Work("l2_norm", dict(rows=64, n=256), BF16, train=True),
    Work("batch_norm", dict(b=2, c=6, n=8), BF16),
    Work("group_norm", dict(b=2, c=6, n=8, groups=2), BF16, train=True),
    Work("bias_act", dict(rows=64, n=256), BF16),
    Work("gelu", dict(rows=64, n=256), BF16, train=True),
    *(
        Work(name, dict(rows=64, n=256), BF16, train=True)
        for name in ("dropout_add", "dropout_add_layer_norm")
    ),
    Work("quantize_per_token", dict(rows=64, n=256), F32),
    Work("rms_norm_quantize", dict(rows=64, n=256), F32),
    Work("cross_entropy", dict(rows=64, v=1000), BF16, train=True),
    Work("linear_cross_entropy", dict(rows=600, k=32, v=256), F32, train=True, linear=True),
    *(
        Work("attention", dict(b=2, h=2, n=40, d=16) | {mask: 1}, F32, train=True)
        for mask in ("bias", "padded")
    ),
    Work("attention", dict(b=2, h=2, n=40, d=16, window=9), F32, train=True),
    Work("relative_bias", dict(n=16, m=24, h=4), F32, train=True),
    Work("patch_embedding", dict(b=2, c=3, n=11, p=4, o=10), F32, train=True),
    Work("gated_linear", dict(m=64, k=64, n=64), F32),
    Work("gated_linear", dict(m=64, k=64, n=64), F32, train=True, linear=True),
]
