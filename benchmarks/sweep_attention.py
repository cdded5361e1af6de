"""The configurations of the flash attention kernels that are worth timing, and SDPA beside them. For benchmarks.sweep.

A piece of work says how many operations it is: 4·b·h·n·m·d forward, 2.5 times as many backward, half of them where it
is causal or half of the keys are padding. GFLOP / ms are TFLOP/s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fusion_backend.kernels import flash, flash_backward
from fusion_backend.kernels.flash import Masking

NAMES = ("BM", "BN", "num_warps", "num_stages")
# Work: b, h, n, d and what is masked; configurations of the forward, and of the two kernels of the backward.
D128 = [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4)]
D64 = [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3)]
KEYS_128 = [(32, 128, 8, 3), (64, 128, 8, 2), (64, 64, 8, 2)]
QUERIES_128 = [(128, 64, 8, 2)]
KEYS_64, QUERIES_64 = [(64, 128, 8, 2), (64, 64, 4, 2)], [(128, 64, 8, 3)]
WORK = [
    ((4, 16, 4096, 128), "causal", D128, [(k, q) for k in KEYS_128 for q in QUERIES_128]),
    ((4, 32, 2048, 64), "causal", D64, [(k, q) for k in KEYS_64 for q in QUERIES_64]),
    ((32, 16, 512, 64), "bias", [(128, 64, 8, 3), (64, 64, 4, 3)],
     [((64, 128, 8, 2), (128, 64, 8, 3)), ((64, 64, 4, 2), (64, 64, 4, 2)), ((64, 128, 8, 2), (64, 64, 4, 2))]),
    ((32, 16, 512, 64), "padded", [(128, 128, 8, 3), (64, 64, 4, 3)], [((64, 128, 8, 2), (128, 64, 8, 3))]),
]  # fmt: skip
TINY = [((1, 2, 40, 16), kind, [(32, 16, 4, 1)], [((16, 16, 4, 1),) * 2]) for kind in ("causal", "bias", "padded")]


def words(config: tuple) -> str:
    return " ".join(f"{name.removeprefix('num_')}={number}" for name, number in zip(NAMES, config, strict=True))


def attention(device) -> Iterator[tuple[str, str, Callable[[], object]]]:
    for (b, h, n, d), kind, forwards, backwards in WORK if torch.cuda.is_available() else TINY:
        q, k, v, do = (torch.randn(b, n, h, d, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        bias = torch.randn(1, h, n, n, device=device, dtype=torch.bfloat16) if kind == "bias" else None
        keys = (torch.arange(n, device=device) < n // 2).expand(b, n).contiguous() if kind == "padded" else None
        masking = Masking(bias=bias, keys=keys, low=0 if kind == "causal" else None, scale=d**-0.5)
        gflop = 4e-9 * b * h * n * n * d * (1 if kind == "bias" else 0.5)
        name = f"{kind} B{b} H{h} S{n} D{d}"
        work = f"flash forward {name} ({gflop:.1f} GFLOP)"
        for c in forwards:
            run = functools.partial(flash.forward, q, k, v, masking, True, dict(zip(NAMES, c, strict=True)))
            yield work, words(c), run
        leaves = [t.detach().requires_grad_() for t in ((q, k, v) if bias is None else (q, k, v, bias))]
        mask = leaves[3] if bias is not None else None if keys is None else keys[:, None, None]
        library = functools.partial(
            F.scaled_dot_product_attention, *leaves[:3], mask, is_causal=kind == "causal", scale=d**-0.5
        )
        yield work, "SDPA", library
        work = f"flash backward {name} ({2.5 * gflop:.1f} GFLOP)"
        out, lse = flash.forward(q, k, v, masking, True)
        needs = dict(q=True, k=True, v=True, bias=bias is not None)
        for pair in backwards:
            configs = tuple(dict(zip(NAMES, c, strict=True)) for c in pair)
            run = functools.partial(flash_backward.backward, q, k, v, masking, out, lse, do, needs, configs)
            yield work, f"keys {words(pair[0])}; queries {words(pair[1])}", run
        run = functools.partial(torch.autograd.grad, library(), leaves, do, retain_graph=True)
        yield work, "SDPA", run
