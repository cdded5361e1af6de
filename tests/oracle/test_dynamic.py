"""Dynamic shapes: the guards and recompiles of plain Inductor, sizes known only at run time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .harness import SOME, Case, compare
from .models import Gate

BOTH = {"gated_linear": SOME, "layer_norm": SOME}
SIZES = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}


class Block(nn.Module):
    """Norm, gate, residual; the number of rows enters the result."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(16), Gate()

    def forward(self, x):
        return (self.gate(self.norm(x)) + x) * x.shape[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        batch, length, width = x.shape
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        h = x.view(batch, length, 2, width // 2).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return self.gate(h.transpose(1, 2).reshape(batch, length, width))


class Branch(Gate):
    """Python control flow on a size."""

    def forward(self, x):
        y = super().forward(x)
        return y.sin() if x.shape[0] > 5 else y.cos()


class Reshape(Gate):
    def forward(self, x):
        return super().forward(x).softmax(-1).view(x.shape[0] * x.shape[1], -1)


class Scalar(Gate):
    """A Python number as an input."""

    def forward(self, x, n):
        return (super().forward(x) + x) * n


class Item(Gate):
    """A row count read from a tensor."""

    def forward(self, x, n):
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[0])
        return super().forward(x), F.layer_norm(x[:k], (16,)).sum(0)


class GateOfItem(Gate):
    """The gate itself has a row count read from a tensor."""

    def forward(self, x, n):
        k = n.item()
        torch._check(k >= 2)
        torch._check(k <= 8)
        return super().forward(x.narrow(0, 0, k)).sum(0), F.layer_norm(x, (16,))


class ItemFloat(Gate):
    def forward(self, x, n):
        return super().forward(x) * n.item() + 1


class Nonzero(Gate):
    def forward(self, x):
        i = x.relu().nonzero()
        return super().forward(x), x.new_ones(i.shape[0]) * 2, i


class MaskedSelect(Gate):
    def forward(self, x):
        y = super().forward(x)
        return y, F.gelu(y[y > 0]).sum()


class MaskedRows(Gate):
    """Norm and gate of the rows that a mask selects."""

    def forward(self, x):
        rows = x[x[:, 0] > 0]
        return super().forward(x), F.layer_norm(super().forward(rows), (16,)).sum(0)


def rows(*counts):
    return lambda k: (torch.randn(counts[k], 16, requires_grad=True),)


def images(*shapes):
    return lambda k: (torch.randn(*shapes[k], requires_grad=True),)


def counted(*pairs):
    return lambda k: (torch.randn(pairs[k][0], 16), torch.tensor(pairs[k][1]))


def mark(dim, mark_fn=torch._dynamo.mark_dynamic):
    return lambda inputs: mark_fn(inputs[0], dim)


def case(build, inputs, calls, name=None, fused=BOTH, **kw):
    return Case(name or build.__name__, build, inputs, fused, calls, **kw)


ALL = {"dynamic": True}
SHAPES = ((2, 7, 16), (3, 9, 16), (2, 32, 16))
CASES = [
    case(Block, rows(8, 9), 2, "dynamic", compile=ALL, generated=True),
    case(Block, rows(8, 9, 1), 3, "dynamic_to_one", compile=ALL),
    case(Block, rows(8, 9, 10, 1), 4, "automatic"),
    case(Block, rows(8, 9), 2, "mark_dynamic", before=mark(0)),
    case(
        Block, rows(8, 9), 2, "mark_static", before=mark(0, torch._dynamo.mark_static), compile=ALL
    ),
    case(
        Block,
        rows(8, 9),
        2,
        "mark_unbacked",
        before=mark(0, torch._dynamo.decorators.mark_unbacked),
    ),
    case(Attention, images(*SHAPES), 3, "attention_automatic"),
    case(Branch, rows(8, 4, 9), 3, "branch", compile=ALL),
    # two numbers a row: the partitioner keeps (h, max, sum) where plain Inductor keeps softmax's
    # result
    case(Reshape, images(*SHAPES), 3, "reshape", compile=ALL, slack=512),
    case(Scalar, lambda k: (torch.randn(8, 16), (2, 3, 4)[k]), 3, "int_input"),
    case(Scalar, lambda k: (torch.randn(8, 16), (2.5, 3.5, 4.5)[k]), 3, "float_input"),
    case(Item, counted((8, 3), (8, 5)), 2, dynamo=SIZES),
    case(Item, counted((8, 3), (9, 5)), 2, "Item_dynamic", dynamo=SIZES, compile=ALL),
    case(
        Item,
        counted((8, 3), (8, 5)),
        2,
        "Item_graph_break",
        dynamo={"capture_scalar_outputs": False},
    ),
    case(
        GateOfItem,
        counted((8, 3), (8, 5)),
        2,
        fused={"layer_norm": SOME},
        dynamo=SIZES,
    ),
    case(ItemFloat, counted((8, 2.5), (8, 3.5)), 2, dynamo=SIZES),
    case(Nonzero, rows(8, 8), 2, dynamo=SIZES),
    # one number a row: the partitioner keeps (y, mean, rstd) where plain Inductor keeps (y - mean,
    # rstd)
    case(MaskedSelect, rows(8, 8), 2, dynamo=SIZES, slack=32),
    case(MaskedRows, rows(8, 9), 2, dynamo=SIZES),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dynamic(case):
    compare(case)
