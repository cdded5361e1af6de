"""Which parameters and inputs want a gradient, tied and frozen weights, buffers, random numbers,
double backward.
"""

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import fusion_backend

from .harness import BACKEND, SOME, Case, compare, compiled, fused_sites, message
from .models import ONE_GATE, Gate, X, gate, gate_inputs


class FrozenWeight(Gate):
    def __init__(self):
        super().__init__()
        self.a.weight.requires_grad_(False)


class FrozenBias(Gate):
    def __init__(self):
        super().__init__()
        self.b.bias.requires_grad_(False)


class Frozen(Gate):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class TiedInside(Gate):
    """Both halves of the gate share one weight."""

    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


class TiedAcross(nn.Module):
    """Two gates, the weight of one used again by the other and by a linear layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Gate(), Gate(), nn.Linear(16, 16)
        self.second.a.weight = self.first.b.weight
        self.last.weight = self.first.b.weight

    def forward(self, x):
        return self.last(self.second(self.first(x)))


class WeightReturned(Gate):
    def forward(self, x):
        return super().forward(x), self.a.weight, self.b.weight.t()


class TiedNorm(nn.Module):
    """One affine pair for two layer norms."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(F.gelu(self.norm(x)))


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.gate = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), Gate()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        return self.gate(y.mean((2, 3)))


class BufferIsWeight(nn.Module):
    """A layer norm whose weight is a buffer that the call changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        y = F.layer_norm(x, (16,), self.scale)
        self.scale.mul_(0.5)
        return y


class GateWithDropout(Gate):
    def forward(self, x):
        return F.dropout(super().forward(F.dropout(x, 0.3)), 0.3) + torch.rand_like(x)


class Evaluated(GateWithDropout):
    def forward(self, x):
        return F.dropout(super(GateWithDropout, self).forward(x), 0.3, training=False)


class NoiseInNorm(nn.Module):
    """Dropout + residual + layer_norm, and a draw on each side of it."""

    def forward(self, x):
        h = F.layer_norm(F.dropout(x, 0.5) + x, (16,))
        return (h + torch.randn_like(x)) * torch.randint(0, 2, x.shape)


def add_mul_forms(x, row, column, zero, low):
    """Broadcast operands, one tensor in several places, mixed dtypes, a number: each gradient has
    its input's shape.
    """
    return (
        (x + row) * column,
        (column + row) * 3,
        (x + x) * x,
        (x + zero) * zero,
        (x + low) * row,
        (low + low) * row,
    )


def add_mul_inputs(k):
    forms = X(8, 16), X(16), X(8, 1), X(), X(8, 16).bfloat16()
    return tuple(t.detach().requires_grad_() for t in forms)


def gate_and_norm(first, x, w1, b1, w2, b2):
    return F.layer_norm(x, (16,)), gate(first, w1, b1, w2, b2)


def low(inputs):
    return tuple(t.detach().bfloat16().requires_grad_() for t in inputs)


def only(*wanted):
    names = ("x", "w1", "b1", "w2", "b2")
    return lambda k: tuple(
        t.detach().requires_grad_(n in wanted) for n, t in zip(names, gate_inputs(), strict=True)
    )


def x(*shape, grad=True):
    return lambda k: (X(*shape, grad=grad),)


def case(build, inputs=None, fused=ONE_GATE, **kw):
    return Case(kw.pop("name", build.__name__), build, inputs or x(8, 16), fused, **kw)


def function(fn, inputs, **kw):
    return case(lambda: fn, inputs, **kw)


CASES = [
    case(Gate, name="all", generated=True),
    case(Gate, x(8, 16, grad=False), name="parameters_only"),
    case(Gate, x(2, 8, 16), name="three_dimensions"),
    case(Gate, lambda k: (torch.randn(16, 8).t().requires_grad_(),), name="transposed_input"),
    case(
        Gate,
        lambda k: (torch.randn(8, 1, 16).expand(8, 3, 16).requires_grad_(),),
        name="expanded_input",
    ),
    case(lambda: Gate(bias=False), name="no_bias"),
    function(
        gate_and_norm,
        lambda k: (X(0, 16), *gate_inputs()),
        name="no_rows",
        fused={"layer_norm": SOME},
    ),
    function(
        gate_and_norm,
        lambda k: (X(8, 16).bfloat16(), *low(gate_inputs())),
        name="mixed",
        fused={"gated_linear": 1, "layer_norm": 2},
        exact="eager",
    ),
    case(FrozenWeight),
    case(FrozenBias, x(8, 16, grad=False)),
    case(Frozen),
    # one product stands in both halves: the gate is not two any more
    case(TiedInside, fused={"layer_norm": 1}),
    case(TiedAcross, fused={"gated_linear": 2, "layer_norm": 1}),
    case(WeightReturned),
    case(TiedNorm, fused={"norm_act": 1, "layer_norm": 2}),
    case(BatchNorm, x(2, 3, 8, 8), calls=2),
    case(lambda: BatchNorm().eval(), x(2, 3, 8, 8), name="BatchNorm_eval"),
    case(BufferIsWeight, x(8, 16, grad=False), fused={"layer_norm": SOME}, calls=2),
    case(BufferIsWeight, name="BufferIsWeight_trains", fails=True),
    case(GateWithDropout, calls=2, exact="plain"),
    case(Evaluated),
    case(NoiseInNorm, fused={"layer_norm": 2}, calls=2, exact="plain", generated=True),
    case(GateWithDropout, name="fallback_random", config={"fallback_random": True}, exact="eager"),
    function(
        add_mul_forms,
        add_mul_inputs,
        name="forms",
        fused={"add_mul": SOME, "layer_norm": 1},
        exact="eager",
    ),
    function(gate, only("x"), name="grad_x"),
    function(gate, only("b2"), name="grad_b2"),
    function(gate, only("x", "w2", "b1"), name="grad_x_w2_b1"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameters(case):
    compare(case)


def outcome(step):
    """What a function returns, or its error as type and message."""
    try:
        return step()
    except Exception as error:
        return message(error)


def double_backward(call, x):
    (g,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    g.sum().backward()
    return x.grad


def backward_twice(call, x):
    out = call(x).sin().sum()
    out.backward(retain_graph=True)
    out.backward()
    return x.grad


@pytest.mark.usefixtures("eager_kernels")
@pytest.mark.parametrize("step", [double_backward, backward_twice], ids=lambda step: step.__name__)
def test_backward_again(step):
    """Double backward is refused with torch's own words; a retained graph gives what it gives under
    plain Inductor.
    """

    def one(backend):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = Gate(), X(8, 16)
        return outcome(lambda: step(compiled(model, backend), x))

    plain = one("inductor")
    fusion_backend.reset()
    ours = one(BACKEND)
    assert BACKEND != "fusion" or fused_sites(fusion_backend.report())["gated_linear"] == 1
    if isinstance(plain, torch.Tensor):
        torch.testing.assert_close(ours, plain)
    else:
        assert ours == plain
