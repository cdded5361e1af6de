"""The configurations of the flash attention kernels that are worth timing, and SDPA beside them.
For benchmarks.sweep.

A piece of work says how many operations it is: 2·b·h·n·m·(d + e) forward, about 2.5 times as many
backward, of those scores alone that the mask leaves: half of them where it is causal or half of the
keys are padding. GFLOP / ms are TFLOP/s. SDPA has the same mask: as an argument of it where it is
causal, else dense, as models make it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import masked_attention, masking_of
from torch import Tensor

from benchmarks.configurations.running import Call, compiling
from benchmarks.workloads.work import attended
from fusion_backend.kernels.attention import backward as flash_backward
from fusion_backend.kernels.attention import forward as flash

LONG_128, LONG_64, MIDDLE_128, SHORT_64 = (
    (4, 16, 4096, 128),
    (4, 32, 2048, 64),
    (8, 16, 2048, 128),
    (32, 16, 512, 64),
)
# b, h, n, d, and what is masked.
WORK = [
    (LONG_128, dict(causal=1)),
    (LONG_64, dict(causal=1)),
    (SHORT_64, dict(bias=1)),
    (SHORT_64, dict(padded=1)),
]
WIDE = [
    (LONG_128, dict(window=1024)),
    (LONG_64, dict(window=256)),
    (MIDDLE_128, dict(bias=1)),
    (MIDDLE_128, dict(padded=1)),
]
DROPOUT = [
    (size, mask | dict(drop=1))
    for size in (SHORT_64, MIDDLE_128)
    for mask in (dict(padded=1), dict(bias=1))
]
LATENT = [((4, 16, 4096, 192), dict(e=128, causal=1))]
SHORT = [
    ((4096, 3, 49, 32), dict(bias=1)),
    ((256, 12, 49, 32), dict(bias=1)),
    ((512, 12, 64, 64), dict(padded=1)),
    ((512, 12, 64, 64), dict(bias=1, drop=1)),
    ((256, 12, 128, 64), dict(bias=1)),
    ((256, 12, 128, 64), dict(padded=1)),
]
# Queries and keys a block, warps and stages, to be timed beside the kernels' own choice, for heads
# of 64, of 128, and of 192 with values of 128.
FORWARD = {
    64: [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 4, 3)],
    128: [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 3)],
    192: [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 8, 2)],
}
KEYS = {
    64: [(32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2)],
    128: [(32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 3)],
    192: [(64, 64, 8, 2), (64, 64, 8, 1), (64, 32, 8, 2), (32, 32, 8, 1)],
}
QUERIES = {
    64: [(128, 64, 4, 3), (64, 64, 4, 3)],
    128: [(128, 32, 8, 3), (128, 64, 8, 3)],
    192: [(128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 64, 4, 2)],
}


def candidates(own: dict, others: dict[int, list], d: int) -> list[dict]:
    size = min((size for size in others if d <= size), default=max(others))
    found = [flash.config_of(*sizes) for sizes in others[size]]
    return [own, *(config for config in found if config != own)]


def words(config: dict) -> str:
    return " ".join(f"{name.removeprefix('num_')}={number}" for name, number in config.items())


class Attention(NamedTuple):
    """A piece of work: its name and operations, what it reads, and SDPA with the same mask."""

    name: str
    gflop: float
    operands: tuple  # q, k, v and the masking
    do: Tensor
    run: Callable[[], Tensor]
    back: Callable[[], tuple]
    needs: tuple[str, ...]  # what has a gradient
    want: dict[str, Tensor]  # the results; empty where the library drops other probabilities


def prepared(work: list, device) -> Iterator[Attention]:
    def tensor(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    for size, kind in work:
        if not torch.cuda.is_available():  # the same masks for the interpreter
            small = dict(window=9, e=24)
            size, kind = (1, 2, 40, 16), {name: small.get(name, x) for name, x in kind.items()}
        b, h, n, d = size
        e = kind.get("e", d)
        q, k, v, *rest = masked_attention.inputs_fn(tensor, b, h, n, d, **kind)
        masking, do = masking_of(*rest), tensor(b, n, h, e).transpose(1, 2)
        gflop = 2e-9 * b * h * n * n * (d + e) * attended(dict(n=n) | kind)
        name = " ".join(f"{word} {number}" if number > 1 else word for word, number in kind.items())
        run, leaves = library(q, k, v, masking)
        back = functools.partial(torch.autograd.grad, run(), leaves, do, retain_graph=True)
        needs = ("q", "k", "v", "bias")[: len(leaves)]
        want = {} if masking.dropout else dict(zip(("out", *needs), (run(), *back()), strict=True))
        name = f"{name} B{b} H{h} S{n} D{d}"
        yield Attention(name, gflop, (q, k, v, masking), do, run, back, needs, want)


def calls(work: list, device) -> Iterator[Call]:
    """Forward; the two kernels of the backward apart, each with the sums of its rows; and both, as
    they are chosen.
    """
    for name, gflop, operands, do, run, back, all_of, want in prepared(work, device):
        q, _, v, masking = operands
        d = q.shape[3]
        title = f"flash forward {name} ({gflop:.1f} GFLOP)"
        for config in candidates(flash.config_for(q, v, masking), FORWARD, d):
            call = functools.partial(forward, *operands, config)
            yield Call(title, words(config), checked(call, words(config), want))
        yield Call(title, "SDPA", run)
        args = *operands, *flash.forward(*operands, True), do
        own = by_keys, by_queries = flash_backward.configs_for(q, v, masking)
        for part, needs, times, configs in (
            ("keys", ("k", "v"), 2, candidates(by_keys, KEYS, d)),
            ("queries", ("q",), 1.5, candidates(by_queries, QUERIES, d)),
        ):
            for config in configs:
                call = functools.partial(backward, args, needs, (config, config))
                title = f"flash backward {name}, {part} ({times * gflop:.1f} GFLOP)"
                yield Call(title, words(config), checked(call, words(config), want))
        title = f"flash backward {name} ({2.5 * gflop:.1f} GFLOP)"
        call = functools.partial(backward, args, all_of, own)
        both = f"keys {words(by_keys)}; queries {words(by_queries)}"
        yield Call(title, both, checked(call, both, want))
        yield Call(title, "SDPA", back)


def short_calls(work: list, device) -> Iterator[Call]:
    """All scores of a head as one tile, the kernels for any lengths, and SDPA."""
    for name, gflop, operands, do, run, back, needs, want in prepared(work, device):
        q, _, v, masking = operands
        title, blocks = f"flash forward {name} ({gflop:.1f} GFLOP)", flash.config_for(q, v, masking)
        for what, config in (("as chosen", None), ("in blocks", blocks)):
            call = functools.partial(forward, *operands, config)
            yield Call(title, what, checked(call, what, want))
        yield Call(title, "SDPA", run)
        args, title = (*operands, *flash.forward(*operands, True), do), f"flash backward {name}"
        title = f"{title} ({2.5 * gflop:.1f} GFLOP)"
        apart = flash_backward.configs_for(q, v, masking)
        for what, configs in (("as chosen", None), ("kernel by kernel", apart)):
            call = functools.partial(backward, args, needs, configs)
            yield Call(title, what, checked(call, what, want))
        yield Call(title, "SDPA", back)


def forward(q, k, v, masking: flash.Masking, config: dict | None) -> dict[str, Tensor]:
    return dict(out=flash.forward(q, k, v, masking, True, config)[0])


def backward(
    args: tuple, needs: tuple[str, ...], configs: tuple[dict, dict] | None
) -> dict[str, Tensor]:
    asked = {name: name in needs for name in ("q", "k", "v", "bias", "sinks")}
    grads = zip(asked, flash_backward.backward(*args, asked, configs), strict=True)
    return {name: grad for name, grad in grads if grad is not None}


def checked(call: Callable[[], dict], name: str, want: dict[str, Tensor]) -> Callable[[], object]:
    """The call, which the first time says so if a result is not what is wanted: a fast wrong kernel
    is none. A result that is not known yet becomes wanted.
    """
    before: list[bool] = []

    def run():
        found = call()
        if not before and not compiling():
            before.append(True)
            for which, x in found.items():
                y = want.setdefault(which, x)
                error = ((x.float() - y.float()).norm() / y.float().norm()).item()
                if not error < 0.02:
                    print(f"WRONG: {which} of {name} differs by {error:.3g}", flush=True)
        return found

    return run


def library(q, k, v, masking: flash.Masking) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """SDPA with the same mask, and what has a gradient."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v, masking.bias) if t is not None]
    mask = None if masking.keys is None else masking.keys[:, None, None]
    if masking.bias is not None:
        mask = leaves[3]
    causal = masking.low is not None and masking.high is None
    if masking.high is not None:
        apart = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(
            k.shape[2], device=q.device
        )
        mask = (apart >= masking.low) & (apart <= masking.high)
    p = 0.0 if masking.dropout is None else masking.dropout.p
    return functools.partial(
        F.scaled_dot_product_attention, *leaves[:3], mask, p, is_causal=causal, scale=masking.scale
    ), leaves


def attention(device):
    return calls(WORK, device)


def attention_wide(device):
    """Heads of 128 with a window, a bias or padding; heads of 64 with a window."""
    return calls(WIDE, device)


def attention_latent(device):
    """Heads of 192 with values of 128."""
    return calls(LATENT, device)


def attention_short(device):
    """Up to 128 queries and keys."""
    return short_calls(SHORT, device)


def attention_dropout(device):
    return calls(DROPOUT, device)
