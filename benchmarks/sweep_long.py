"""Configurations of the norms of rows of 64 KB, forward and backward, for benchmarks.sweep."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import triton

from fusion_backend.kernels import norms, norms_backward
from fusion_backend.kernels.rows import Config

Call = tuple[str, str, Callable[[], object]]  # the work, the configuration in words, a call


def said(c: Config) -> str:
    """block=4096 rows=1 ...: what benchmarks.tune reads."""
    return " ".join(f"{k}={int(v)}" for k, v in c._asdict().items() if v)


def long_norms(device) -> Iterator[Call]:
    """Rows of 64 KB: weight and bias, twice as much as a row, kept in L1 or read from L2; backward in slabs."""
    big = torch.cuda.is_available()
    rows, n = (2048, 32768) if big else (5, 9000)
    x, dy, dh, out = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for _ in range(4))
    w, b = torch.randn(2, n, device=device, dtype=torch.bfloat16)
    layer, rms = norms.Norm(w, b, None, 1e-5, True), norms.Norm(w, None, None, 1e-5, False)
    block = triton.next_power_of_2(n)
    walks = [(8192, 1, 16), (8192, 1, 32), (4096, 1, 16), (4096, 1, 8), (16384, 1, 32), (8192, 1, 16, 0, 3)]
    held = [(block, 1, 16), (block, 1, 32), (block, 1, 16, 1, 1), (block, 1, 32, 1, 3)]
    forward = [Config(*c, in_l1=in_l1) for c in walks + held for in_l1 in (False, True)]
    for c in forward:
        yield f"layer_norm {rows}x{n}", said(c), functools.partial(norms.forward, x, None, layer, True, c)
    for c in (c for c in forward if c.block in (block, 8192) and c.stages == 0):
        yield f"add_rms_norm {rows}x{n}", said(c), functools.partial(norms.forward, x, dy, rms, True, c)
    _, _, mean, rstd = norms.forward(x, None, layer, True)
    backward = [(2048, 1, 8, 4, 3), (1024, 1, 4, 4, 4)]  # two kernels
    backward += [(2048, slab, 8, parts, 3) for slab in (32, 64, 128) for parts in (4, 8)]
    backward += [(1024, slab, 4, parts, 3) for slab in (32, 64, 128) for parts in (4, 8)] + [(2048, 64, 8, 4, 1)]
    for c in (Config(*c) for c in backward):
        for name, norm, more in (("layer_norm", layer, None), ("add_rms_norm", rms, dh)):
            args = dy, more, x, mean if norm.centred else None, rstd, norm, (True, True, norm.centred), out, None, c
            words = f"{name} backward by columns {rows}x{n}"
            yield words, said(c), functools.partial(long_backward, *args)


def long_backward(*args):
    """With its sums added up, for configurations leave different numbers of them."""
    norms_backward.add_up(norms_backward.backward_long(*args), torch.bfloat16, True, args[3] is not None)
