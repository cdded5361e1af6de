"""The configurations of the flash attention kernels that are worth timing, and SDPA beside them. For benchmarks.sweep.

A piece of work says how many operations it is: 4·b·h·n·m·d forward, 2.5 times as many backward, of those scores alone
that the mask leaves: half of them where it is causal or half of the keys are padding. GFLOP / ms are TFLOP/s. SDPA has
the same mask: as an argument of it where it is causal, else dense, as models make it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import masked_attention, masking_of

from benchmarks.work import attended
from fusion_backend.kernels import flash, flash_backward

NAMES = ("BM", "BN", "num_warps", "num_stages")
# Work: b, h, n, d and what is masked; configurations of the forward, and of the two kernels of the backward.
D128 = [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4)]
D64 = [(128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3)]
KEYS_128 = [(32, 128, 8, 3), (64, 128, 8, 2), (64, 64, 8, 2)]
KEYS_64 = [(64, 128, 8, 2), (64, 64, 4, 2)]
BACK_128 = [(keys, (128, 64, 8, 2)) for keys in KEYS_128]
BACK_64 = [(keys, (128, 64, 8, 3)) for keys in KEYS_64]
# With a tile of a bias too.
WIDE_128, WIDE_64 = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)], [(128, 64, 8, 3), (64, 64, 4, 3)]
WIDE_BACK_128 = [
    ((32, 64, 8, 2), (128, 64, 8, 2)), ((64, 64, 8, 2), (64, 64, 4, 2)), ((32, 128, 8, 2), (64, 64, 8, 2)),
]  # fmt: skip
WIDE_BACK_64 = [
    ((64, 128, 8, 2), (128, 64, 8, 3)), ((64, 64, 4, 2), (64, 64, 4, 2)), ((64, 128, 8, 2), (64, 64, 4, 2)),
]  # fmt: skip
DROP_BACK_64 = [
    ((64, 128, 8, 2), (128, 64, 8, 3)), ((32, 128, 8, 2), (128, 64, 8, 3)), ((32, 128, 8, 3), (64, 64, 4, 3)),
]  # fmt: skip
LONG_128, LONG_64, MIDDLE_128, SHORT_64 = (4, 16, 4096, 128), (4, 32, 2048, 64), (8, 16, 2048, 128), (32, 16, 512, 64)
WORK = [
    (LONG_128, dict(causal=1), D128, BACK_128),
    (LONG_64, dict(causal=1), D64, BACK_64),
    (SHORT_64, dict(bias=1), WIDE_64, WIDE_BACK_64),
    (SHORT_64, dict(padded=1), [(128, 128, 8, 3), (64, 64, 4, 3)], BACK_64[:1]),
]
WIDE = [
    (LONG_128, dict(window=1024), [D128[1], D128[2], (64, 64, 4, 3)], BACK_128),
    (LONG_64, dict(window=256), [*D64, (64, 64, 4, 3)], BACK_64),
    (MIDDLE_128, dict(bias=1), WIDE_128, WIDE_BACK_128),
    (MIDDLE_128, dict(padded=1), D128[1:3], BACK_128),
]
DROPOUT = [
    (SHORT_64, dict(padded=1, drop=1), [(128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)], DROP_BACK_64),
    (SHORT_64, dict(bias=1, drop=1), WIDE_64, DROP_BACK_64),
    (MIDDLE_128, dict(padded=1, drop=1), D128[1:3], BACK_128),
    (MIDDLE_128, dict(bias=1, drop=1), WIDE_128[:2], WIDE_BACK_128),
]
# Causal: forward, keys, queries.
CAUSAL = [
    (
        LONG_128,
        [
            *((128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 8, 3)),
        ],
        [(32, 64, 4, 3), (32, 64, 4, 2), (32, 64, 4, 4), (64, 64, 4, 2), (64, 64, 4, 3)],
        [(128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 3), (128, 32, 8, 4), (64, 32, 4, 3)],
    ),
    (
        LONG_64,
        [(128, 64, 4, 3), (128, 64, 4, 4), (64, 64, 4, 3), (64, 64, 4, 4), (128, 128, 8, 3), (64, 128, 4, 3)],
        [(64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3), (32, 64, 4, 3), (128, 64, 4, 2)],
        [(128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3), (128, 32, 4, 3), (64, 128, 4, 2)],
    ),
]


def tiny(work: list) -> list:
    """The same masks for the interpreter."""
    return [
        ((1, 2, 40, 16), kind | (dict(window=9) if "window" in kind else {}), [(32, 16, 4, 1)], [((16, 16, 4, 1),) * 2])
        for _, kind, _, _ in work
    ]


def words(config: tuple) -> str:
    return " ".join(f"{name.removeprefix('num_')}={number}" for name, number in zip(NAMES, config, strict=True))


def sizes(config: tuple) -> dict:
    return dict(zip(NAMES, config, strict=True))


def calls(work: list, device) -> Iterator[tuple[str, str, Callable[[], object]]]:
    def tensor(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    for (b, h, n, d), kind, forwards, backwards in work if torch.cuda.is_available() else tiny(work):
        q, k, v, *rest = masked_attention.inputs_fn(tensor, b, h, n, d, **kind)
        masking, do = masking_of(*rest), tensor(b, n, h, d).transpose(1, 2)
        gflop = 4e-9 * b * h * n * n * d * attended(dict(n=n) | kind)
        name = " ".join(f"{word} {size}" if size > 1 else word for word, size in kind.items())
        name = f"{name} B{b} H{h} S{n} D{d}"
        run, leaves = library(q, k, v, masking)
        title = f"flash forward {name} ({gflop:.1f} GFLOP)"
        for c in forwards:
            yield title, words(c), functools.partial(flash.forward, q, k, v, masking, True, sizes(c))
        yield title, "SDPA", run
        title = f"flash backward {name} ({2.5 * gflop:.1f} GFLOP)"
        out, lse = flash.forward(q, k, v, masking, True)
        args = q, k, v, masking, out, lse, do, dict(q=True, k=True, v=True, bias=masking.bias is not None)
        for keys, queries in backwards:
            back = functools.partial(flash_backward.backward, *args, (sizes(keys), sizes(queries)))
            yield title, f"keys {words(keys)}; queries {words(queries)}", back
        yield title, "SDPA", functools.partial(torch.autograd.grad, run(), leaves, do, retain_graph=True)


def causal(device) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Causal attention: forward, and the two kernels of the backward apart, each with the sums of its rows."""

    def tensor(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    small = ((1, 2, 40, 16), *[[(32, 16, 4, 1)]] * 3)
    for (b, h, n, d), forwards, keys, queries in CAUSAL if torch.cuda.is_available() else [small]:
        q, k, v, *rest = masked_attention.inputs_fn(tensor, b, h, n, d, causal=1)
        masking, do = masking_of(*rest), tensor(b, n, h, d).transpose(1, 2)
        gflop, name = 4e-9 * b * h * n * n * d * attended(dict(n=n, causal=1)), f"causal B{b} H{h} S{n} D{d}"
        run, leaves = library(q, k, v, masking)
        back = functools.partial(torch.autograd.grad, run(), leaves, do, retain_graph=True)
        want = [run(), *back()]
        title = f"flash forward {name} ({gflop:.1f} GFLOP)"
        for c in forwards:
            call = functools.partial(flash.forward, q, k, v, masking, True, sizes(c))
            yield title, words(c), call
            agree(words(c), call()[:1], want[:1])
        yield title, "SDPA", run
        args = q, k, v, masking, *flash.forward(q, k, v, masking, True), do
        for part, configs, needs in (("keys", keys, "kv"), ("queries", queries, "q")):
            title = f"flash backward {name}, {part} ({(2 if part == 'keys' else 1.5) * gflop:.1f} GFLOP)"
            for c in configs:
                asked = {which: which in needs for which in ("q", "k", "v", "bias")}
                call = functools.partial(flash_backward.backward, *args, asked, (sizes(c), sizes(c)))
                yield title, words(c), call
                agree(words(c), [g for g in call() if g is not None], want[2:] if part == "keys" else want[1:2])
        title = f"flash backward {name} ({2.5 * gflop:.1f} GFLOP)"
        asked = dict(q=True, k=True, v=True, bias=False)
        for pair in ((keys[0], queries[0]), (keys[-1], queries[-1])):
            call = functools.partial(flash_backward.backward, *args, asked, (sizes(pair[0]), sizes(pair[1])))
            yield title, f"keys {words(pair[0])}; queries {words(pair[1])}", call
        yield title, "SDPA", back


def agree(name: str, found, wanted) -> None:
    """Say so if results are not those of SDPA: a fast wrong kernel is none."""
    for x, y in zip(found, wanted, strict=True):
        error = ((x.float() - y.float()).norm() / y.float().norm()).item()
        if not error < 0.02:
            print(f"WRONG: {name} differs from SDPA by {error:.3g}", flush=True)


def library(q, k, v, masking: flash.Masking) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """SDPA with the same mask, and what has a gradient."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v, masking.bias) if t is not None]
    mask = None if masking.keys is None else masking.keys[:, None, None]
    if masking.bias is not None:
        mask = leaves[3]
    causal = masking.low is not None and masking.high is None
    if masking.high is not None:
        apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(k.shape[2], device=q.device)
        mask = (apart >= masking.low) & (apart <= masking.high)
    p = 0.0 if masking.dropout is None else masking.dropout.p
    return functools.partial(
        F.scaled_dot_product_attention, *leaves[:3], mask, p, is_causal=causal, scale=masking.scale
    ), leaves


def attention(device):
    return calls(WORK, device)


def attention_causal(device):
    """What an H200 must decide about causal attention."""
    return causal(device)


def attention_wide(device):
    """Heads of 128 with a window, a bias or padding; heads of 64 with a window."""
    return calls(WIDE, device)


def attention_dropout(device):
    return calls(DROPOUT, device)
