"""Higher-order operators, functorch levels, checkpointing and custom autograd Functions next to a
fusion.
"""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .harness import SOME, TORCH, Case, compare
from .models import NO_GATE, ONE_GATE, gate, gate_inputs, gate_inputs_no_grad, x_w, x_w_no_grad


class Strange(torch.autograd.Function):
    """A gradient that no retracing of the forward would give."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 100 * x.cos(), g * 7


class GateFunction(torch.autograd.Function):
    """A gated linear layer with a gradient of its own: its inside is nobody's to fuse."""

    @staticmethod
    def forward(ctx, x, w1, w2):
        ctx.save_for_backward(x)
        return torch.sigmoid(x @ w1) * (x @ w2)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3, x.t() @ g, x.t() @ g * 5


def autograd_function(x, w):
    return Strange.apply(x.sin(), x @ w).cos()


def autograd_function_of_gate(x, w1, b1, w2, b2):
    return GateFunction.apply(gate(x, w1, b1, w2, b2), w1, w2)


def checkpointed(x, w1, b1, w2, b2):
    return checkpoint(gate, x, w1, b1, w2, b2, use_reentrant=False).sin()


def checkpoint_nested(x, w1, b1, w2, b2):
    def inner(x):
        return checkpoint(gate, x.cos(), w1, b1, w2, b2, use_reentrant=False) + x

    return checkpoint(inner, checkpoint(inner, x, use_reentrant=False), use_reentrant=False).sin()


def checkpoint_dropout(x, w1, b1, w2, b2):
    def block(x):
        return F.dropout(gate(F.dropout(x, 0.5), w1, b1, w2, b2), 0.5)

    return checkpoint(block, x, use_reentrant=False).sin()


def save_products(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def checkpoint_selective(x, w1, b1, w2, b2):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(gate, x, w1, b1, w2, b2, use_reentrant=False, context_fn=contexts).sin()


def vmapped(x, w1, b1, w2, b2):
    return torch.func.vmap(lambda row: gate(row[None], w1, b1, w2, b2)[0])(x).sin()


def vmap_and_gate(x, w1, b1, w2, b2):
    return torch.func.vmap(torch.sin)(gate(x, w1, b1, w2, b2))


def grad_inside(x, w1, b1, w2, b2):
    return torch.func.grad(lambda a: gate(a, w1, b1, w2, b2).pow(2).sum())(x).sin()


def jvp_inside(x, w1, b1, w2, b2):
    out, tangent = torch.func.jvp(lambda a: gate(a, w1, b1, w2, b2), (x,), (x.cos(),))
    return out + tangent


def per_sample_grad(x, w1, b1, w2, b2):
    def loss(w, row):
        return gate(row[None], w, b1, w2, b2).sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(w1, x)


def conditional(x, w1, b1, w2, b2):
    return torch.cond(
        x.sum() > 0, gate, lambda x, w1, b1, w2, b2: (x @ w1).cos() + 1, (x, w1, b1, w2, b2)
    ).sin()


def nested_region(x, w1, b1, w2, b2):
    region = torch.compiler.nested_compile_region(gate)
    for _ in range(3):
        x = region(x, w1, b1, w2, b2)
    return x.sin()


def flex(q, k, v, bias):
    def score(s, b, h, i, j):
        return s + bias[i] * 0.1

    return flex_attention(q, k, v, score_mod=score)


def flex_causal(q, k, v):
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


def qkv(k):
    return tuple(torch.randn(1, 2, 64, 16) for _ in range(3))


def qkv_bias(k):
    return *qkv(k), torch.randn(64)


def scan(x, w):
    return associative_scan(lambda a, b: a * b, F.linear(x, w), 0, combine_mode="generic")


def loop(x, w):
    start = torch.zeros((), dtype=torch.long), x @ w
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin() * 2), start)[1]


def case(fn, inputs=gate_inputs, **kw):
    return Case(fn.__name__, lambda: fn, inputs, **kw)


CASES = [
    case(autograd_function, x_w, exact="eager"),
    case(autograd_function_of_gate, fused=ONE_GATE, exact="eager"),
    case(checkpointed, fused=ONE_GATE, generated=True),
    case(checkpoint_nested, fused={"gated_linear": SOME, "layer_norm": 1}),
    case(checkpoint_dropout, fused=ONE_GATE, exact="plain"),
    # Inductor 2.15 keeps the statistics of the layer_norm beside it, 64 bytes, which ours computes
    # again.
    case(checkpoint_selective, fused=NO_GATE, same_saved=TORCH < (2, 14)),
    case(vmapped, fused=NO_GATE),
    case(vmap_and_gate, fused=ONE_GATE),
    case(grad_inside, fused=NO_GATE),
    case(jvp_inside, gate_inputs_no_grad, fused=NO_GATE, train=False),
    case(per_sample_grad, fused=NO_GATE),
    case(conditional, fused=ONE_GATE),
    # Inductor (2.11 to 2.15) reuses buffers that nested regions still read: its own gradients are
    # wrong without this
    case(
        nested_region,
        fused={"gated_linear": SOME, "layer_norm": 1},
        config={"allow_buffer_reuse": False},
    ),
    case(flex, qkv_bias, exact="eager", config={"cpp.simdlen": None}, train=False),
    case(flex_causal, qkv, exact="eager", config={"cpp.simdlen": None}, train=False),
    case(scan, x_w_no_grad, train=False),
    case(loop, x_w_no_grad, train=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_higher_order(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(case)
