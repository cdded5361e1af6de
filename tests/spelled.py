"""One site of a pattern in code of a user: run with the kernels, against fp64."""

import inspect

import torch

from fusion_backend.testing import fused_nodes, rewritten, with_kernels
from tests.kernel_checks import CLOSE, distance, randn


def leaves(*shapes, dtype=torch.float32, needs=True):
    return [randn(*shape, dtype=dtype).requires_grad_(needs) for shape in shapes]


def computed(fn, inputs, dy):
    """The result of a function, and the gradients of the inputs that need one."""
    out = fn(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    wanted = [t for t in inputs if t.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, dy.to(out.dtype)) if wanted else ()


def exact(t):
    return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t


def check_spelling(pattern, fn, *inputs, factor=1):
    """One site, and value and gradients as near to fp64 as the kernels are. Returns its node."""
    gm = rewritten(fn, *inputs)
    (node,) = fused_nodes(gm)
    assert str(node.target) == f"fusion.{pattern}.default"
    named = {f"l_{k}_": t for k, t in zip(inspect.signature(fn).parameters, inputs, strict=True)}
    kernels, order = with_kernels(gm), [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    plain = fn(*inputs)
    dy, dtype = randn(*plain.shape), inputs[0].dtype
    want, gradients = computed(fn, [exact(t) for t in inputs], dy)
    got, found = computed(lambda *_: kernels(*(named[name] for name in order)), inputs, dy)
    assert got.dtype == plain.dtype and distance(got, want) < 2 * factor * CLOSE[dtype]
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == dtype and distance(one, other) < 6 * factor * CLOSE[dtype]
    return node
