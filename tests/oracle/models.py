"""Small pieces that the oracle's cases share: tensors, a gated linear layer as a function and as a
module.
"""

import torch
from torch import nn

ONE_GATE = {"gated_linear": 1, "layer_norm": 1}
NO_GATE = {"gated_linear": 0, "layer_norm": 1}


def X(*shape, grad=True):
    return torch.randn(shape, requires_grad=grad)


def x_w(k):
    return X(8, 16), X(16, 16)


def x_w_no_grad(k):
    return X(8, 16, grad=False), X(16, 16, grad=False)


def gate_inputs(k=0, grad=True):
    return tuple(X(*shape, grad=grad) for shape in ((8, 16), (16, 16), (16,), (16, 16), (16,)))


def gate_inputs_no_grad(k):
    return gate_inputs(grad=False)


def gate(x, w1, b1, w2, b2):
    return torch.sigmoid(x @ w1 + b1) * (x @ w2 + b2)


class Gate(nn.Module):
    """sigmoid(a(x)) * b(x)"""

    def __init__(self, width=16, bias=True):
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x):
        return self.a(x).sigmoid() * self.b(x)
