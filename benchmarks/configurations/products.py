"""The tiles of the kernels of matrix products that are worth timing, and the library beside them.
For benchmarks.sweep.

GFLOP / ms are TFLOP/s. "product alone" is the library's product without an epilogue, the speed to
compare with; "library" is its product with the epilogue, where it has one. Each result is compared
with that of the first that runs: a fast wrong kernel is none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.configurations.attention import checked
from benchmarks.configurations.running import Call
from fusion_backend.compat.torch import int8_product
from fusion_backend.kernels.gemm.decode import decode, sizes
from fusion_backend.kernels.gemm.gated_gradient import gated_gradient
from fusion_backend.kernels.gemm.hidden_gradient import hidden_gradient
from fusion_backend.kernels.gemm.library import ACTIVATIONS, library_linear
from fusion_backend.kernels.gemm.linear import linear
from fusion_backend.kernels.gemm.tiles import (
    SINGLE,
    SPECIALISED,
    Tile,
    candidates,
    seconds,
    tile_for,
)

# m, k, n: of GPT-2 and BERT and ViT, of the models of the table, of Llama
LINEAR = [(16384, 768, 3072), (16384, 1024, 4096), (16384, 2048, 8192), (8192, 4096, 14336)]
GATED = [(16384, 512, 2048), *LINEAR]
# of a batch of one text, and of four
FEWER_ROWS = [(m, *size) for m in (512, 2048, 4096) for size in ((768, 3072), (1024, 4096))]
FEW = [(m, 4096, 14336) for m in (1, 2, 4, 16, 64)]
FEW += [(m, *size) for size in ((4096, 4096), (768, 3072)) for m in (1, 16)]
FEW_BY_INPUTS = [(16, 768, 3072), (16, 4096, 4096), (16, 4096, 14336)]
# beside those that the launcher chooses from
MORE = {
    1: [
        Tile(128, 256, 64, 8, 3, 1, 1),
        Tile(128, 256, 64, 8, 4, 1, 2),
        Tile(128, 128, 64, 4, 3, 2, 2, group=16),
        Tile(256, 64, 64, 4, 3, 2, 1),
    ],
    2: [
        Tile(128, 128, 64, 8, 3, 1, 1),
        Tile(128, 64, 64, 4, 3, 2, 2),
        Tile(128, 64, 64, 4, 3, 2, 1, group=16),
        Tile(256, 64, 64, 8, 3, 1, 1),
    ],
}
INT8 = [
    Tile(256, 128, 128, 8, 3, 1, 2),
    Tile(128, 256, 128, 8, 3, 1, 1),
    Tile(128, 256, 64, 8, 4, 1, 2),
    Tile(128, 128, 64, 4, 4, 2, 2),
    Tile(128, 128, 128, 4, 3, 2, 2, group=16),
]


def tiles(weights: int, m: int, k: int, n: int) -> list[Tile]:
    """All that are worth timing, those first that the model of the cost prefers."""
    found = candidates(weights, 2) + MORE[weights]
    return sorted(found, key=lambda t: seconds(t, m, k, n, weights, 2, 132))


def words(tile: Tile) -> str:
    return " ".join(f"{name}={number}" for name, number in tile._asdict().items())


def operands(m: int, k: int, n: int, device, weights: int = 1) -> tuple[Tensor, list, list]:
    """x, weights as linear layers have them, and biases."""

    def tensor(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    return (
        tensor(m, k),
        [(tensor(n, k) * k**-0.5).t() for _ in range(weights)],
        [tensor(n) for _ in range(weights)],
    )


def sized(shapes: list) -> list[tuple[int, int, int]]:
    return shapes if torch.cuda.is_available() else [(64, 64, 64)]


def same(call: Callable[[], Tensor], name: str, want: dict) -> Callable[[], object]:
    return checked(lambda: dict(out=call()), name, want)


def linears(device, acts=("gelu", "gelu_tanh", "relu")) -> Iterator[Call]:
    for m, k, n in sized(LINEAR):
        x, (w,), (b,) = operands(m, k, n, device)
        for act in acts:
            work, want = f"linear {act} m={m} k={k} n={n} ({2e-9 * m * n * k:.1f} GFLOP)", {}
            if act in ACTIVATIONS and torch.cuda.is_available():
                call = functools.partial(library_linear, x, w, b, act)
                yield Call(work, "library", same(call, "library", want))
            for tile in tiles(1, m, k, n):

                def call(tile=tile, act=act, x=x, w=w, b=b):
                    return linear(x, w, b, act, tile=tile)[0]

                yield Call(work, words(tile), same(call, words(tile), want))
            yield Call(work, "product alone", functools.partial(torch.mm, x, w))


def gates(device, acts=("sigmoid", "silu")) -> Iterator[Call]:
    for m, k, n in sized(GATED):
        x, (w, w2), (b, b2) = operands(m, k, n, device, 2)
        for act in acts:
            work, want = f"gated {act} m={m} k={k} n={n} ({4e-9 * m * n * k:.1f} GFLOP)", {}
            for tile in tiles(2, m, k, n):

                def call(tile=tile, act=act, x=x, w=w, b=b, w2=w2, b2=b2):
                    return linear(x, w, b, act, w2=w2, b2=b2, tile=tile)[0]

                yield Call(work, words(tile), same(call, words(tile), want))
            both = torch.cat([w, w2], 1).t().contiguous().t()
            yield Call(work, "product alone", functools.partial(torch.mm, x, both))


def specialised(device) -> Iterator[Call]:
    """Warps of their own for the epilogue, beside what was fastest without them. Works of fewer
    rows are named differently: the table has none.
    """
    for weights, sizes_asked in ((1, LINEAR), (2, GATED)):
        for act in ("gelu", "gelu_tanh", "relu") if weights == 1 else ("sigmoid", "silu"):
            for size in sized(sizes_asked):
                yield from beside_the_fastest(device, "", weights, act, *size)
    for m, k, n in sized(FEWER_ROWS):
        yield from beside_the_fastest(device, "fewer rows ", 1, "gelu", m, k, n)
        yield from beside_the_fastest(device, "fewer rows ", 2, "silu", m, k, n)


def beside_the_fastest(
    device, kind: str, weights: int, act: str, m: int, k: int, n: int
) -> Iterator[Call]:
    x, ws, bs = operands(m, k, n, device, weights)
    more = {} if weights == 1 else dict(w2=ws[1], b2=bs[1])
    what = f"{kind}{'linear' if weights == 1 else 'gated'} {act}"
    work, want = f"{what} m={m} k={k} n={n} ({2e-9 * weights * m * n * k:.1f} GFLOP)", {}
    if act in ACTIVATIONS and torch.cuda.is_available():
        call = functools.partial(library_linear, x, ws[0], bs[0], act)
        yield Call(work, "library", same(call, "library", want))
    groups = (8,) if kind else (8, 16)
    tried = [SPECIALISED[weights]._replace(group=group) for group in groups]
    for tile in [tile_for(x, m, k, n, weights, act), *tried * torch.cuda.is_available()]:

        def call(tile=tile):
            return linear(x, ws[0], bs[0], act, tile=tile, **more)[0]

        yield Call(work, words(tile), same(call, words(tile), want))
    yield Call(work, "product alone", functools.partial(torch.mm, x, torch.cat(ws, 1)))


def hidden_gradients(device) -> Iterator[Call]:
    """Of an MLP whose outer width is k: dy `[m, k]` times W₂ᵀ `[k, n]`."""
    for m, k, n in sized(LINEAR):
        dy, (w,), _ = operands(m, k, n, device)
        w = w.contiguous()  # nn.Linear's, transposed once more
        pre = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        work, want = f"hidden gradient m={m} k={k} n={n}", {}
        tried = [SPECIALISED[1]._replace(group=group) for group in (8, 16)]
        for tile in tried * torch.cuda.is_available() + tiles(1, m, k, n):

            def call(tile=tile, dy=dy, w=w, pre=pre):
                return hidden_gradient(dy, w, pre, None, "gelu", True, tile)[0]

            yield Call(work, words(tile), same(call, words(tile), want))
        yield Call(work, "product alone", functools.partial(torch.mm, dy, w))


def gated_gradients(device) -> Iterator[Call]:
    """Of a block with a gate whose outer width is k, beside the library's product and Inductor's
    kernel for the rest.
    """
    for m, k, n in sized(GATED):
        dy, (w,), _ = operands(m, k, n, device)
        w = w.contiguous()  # nn.Linear's, transposed once more
        gate, up = (torch.randn(m, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        work, want = f"gated gradient m={m} k={k} n={n}", {}
        plain = torch.compile(gated_gradient, dynamic=False)

        def call(compute, tile, args=(dy, w, gate, None, up, None, "silu", True)):
            return dict(zip(("gate", "up", "hidden"), compute(*args, tile), strict=True))

        tried = [SPECIALISED[1]._replace(group=group) for group in (8, 16)]
        for tile in tried * torch.cuda.is_available():
            run = checked(functools.partial(call, gated_gradient, tile), words(tile), want)
            yield Call(work, words(tile), run)
        run = checked(functools.partial(call, plain, SINGLE[0]), "library", want)
        yield Call(work, "library", run)
        yield Call(work, "product alone", functools.partial(torch.mm, dy, w))


def int8(device) -> Iterator[Call]:
    for m, k, n in sized(LINEAR):
        q, w = (
            torch.randint(-127, 128, shape, device=device, dtype=torch.int8)
            for shape in ((m, k), (n, k))
        )
        rows, columns = torch.rand(m, device=device), torch.rand(n, device=device)
        work, want = f"int8 m={m} k={k} n={n} ({2e-9 * m * n * k:.1f} GFLOP)", {}
        scales = dict(row_scale=rows, column_scale=columns, dtype=torch.bfloat16)
        for tile in candidates(1, 1) + INT8:

            def call(tile=tile, q=q, w=w, scales=scales):
                return linear(q, w.t(), None, "identity", tile=tile, **scales)[0]

            yield Call(work, words(tile), same(call, words(tile), want))
        yield Call(work, "product alone", functools.partial(int8_product, q, w.t()))


def few_rows(device, sizes_asked: list = FEW, by_inputs: bool = False) -> Iterator[Call]:
    for m, k, n in sized(sizes_asked):
        x, (w, w2), (b, b2) = operands(m, k, n, device, 2)
        if by_inputs:
            w, w2 = w.contiguous(), w2.contiguous()
        for act, more in (("gelu", (None, None)), ("silu", (w2, b2))):
            weights = 1 if more[0] is None else 2
            own = sizes(m, k, n, weights, 2, 132, not by_inputs)
            kind = ("linear" if weights == 1 else "gated") + (" by inputs" if by_inputs else "")
            work, want = f"few rows {kind} m={m} k={k} n={n}", {}
            others = [*blocks(m, by_inputs), *vectors(m, k, weights, by_inputs)]
            for constants in (own, *(c for c in others if c != own)):
                text = " ".join(f"{key}={value}" for key, value in constants.items())

                def call(constants=constants, act=act, more=more, x=x, w=w, b=b):
                    return decode(x, w, b, act, *more, constants)

                yield Call(work, text, same(call, text, want))
            yield Call(work, "product alone", functools.partial(F.linear, x, w.t(), b))


def few_rows_by_inputs(device) -> Iterator[Call]:
    """Weights as of GPT-2, a row of memory for each input."""
    yield from few_rows(device, FEW_BY_INPUTS, True)


def blocks(m: int, by_inputs: bool) -> Iterator[dict[str, int]]:
    """Columns, depth, stages and warps of the kernel with tensor cores."""
    columns = (32, 64, 128) if by_inputs else (16, 32, 64)
    depths = (32, 64, 128) if by_inputs else (128, 256, 512)
    rows = next(r for r in (16, 32, 64) if m <= r)
    for bn, bk, stages, warps in itertools.product(columns, depths, (2, 4), (2, 4, 8)):
        if 2 * bn * bk * 2 * stages <= 200 << 10 and bn * bk // warps <= 8192:
            yield dict(BM=rows, BN=bn, BK=bk, num_warps=warps, num_stages=stages)


def vectors(m: int, k: int, weights: int, by_inputs: bool) -> Iterator[dict[str, int]]:
    """Columns, depth and warps of the kernel without tensor cores, which has one row."""
    if m > 1 or by_inputs:
        return
    for bn, bk, warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (2, 4, 8)):
        if 4 <= weights * bn * bk // (32 * warps) <= 128 and bk < 2 * k:
            yield dict(BN=bn, BK=bk, num_warps=warps)
