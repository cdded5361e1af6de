"""What benchmarks.match_cost matches: graphs of any size, as Dynamo hands them over, without the
time that it takes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusion_backend.compat.torch import FakeTensorMode

HEADS, WIDTH, HIDDEN = 4, 64, 128
SHAPES = [(2, 16, WIDTH), (WIDTH,), *[(WIDTH, WIDTH)] * 4, *[(HIDDEN, WIDTH)] * 2, (WIDTH, HIDDEN)]


def norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def block(x, w, wq, wk, wv, wo, wg, wu, wd) -> Tensor:
    """A decoder layer by hand: 36 calls, of which RMS norms, attention and a gated MLP can be
    recognised.
    """
    h = norm(x, w)
    q, k, v = (
        F.linear(h, p).view(2, 16, HEADS, WIDTH // HEADS).transpose(1, 2) for p in (wq, wk, wv)
    )
    a = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
    x = x + F.linear(a.transpose(1, 2).reshape(2, 16, WIDTH), wo)
    h = norm(x, w)
    return x + F.linear(F.silu(F.linear(h, wg)) * F.linear(h, wu), wd)


def decoder(layers: int) -> fx.GraphModule:
    def model(x, w, wq, wk, wv, wo, wg, wu, wd):
        for _ in range(layers):
            x = block(x, w, wq, wk, wv, wo, wg, wu, wd)
        return x

    return graph(model, SHAPES)


def chain(step: Callable[[Tensor, Tensor], Tensor], length: int) -> fx.GraphModule:
    """x = step(x, y), again and again."""

    def model(x, y):
        for _ in range(length):
            x = step(x, y)
        return x

    return graph(model, [(8, 8)] * 2)


class Remember(fx.Interpreter):
    """Every node's value, where Dynamo keeps it."""

    def run_node(self, n: fx.Node):
        out = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = out
        return out


def graph(fn: Callable, shapes: list[tuple[int, ...]]) -> fx.GraphModule:
    gm = fx.symbolic_trace(fn)
    with FakeTensorMode():
        Remember(gm).run(*(torch.empty(shape) for shape in shapes))
    return gm
