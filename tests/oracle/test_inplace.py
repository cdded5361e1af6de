"""In-place code and aliasing: whatever plain Inductor gives, with a fusion next to it
or inside it.
"""

import pytest
import torch
import torch.nn.functional as F

from .harness import BACKEND, Case, compare, compare_results, run
from .models import NO_GATE, ONE_GATE, X, gate, gate_inputs, gate_inputs_no_grad, x_w, x_w_no_grad


def x_w_c(k):
    return X(8, 16), X(16, 16), torch.ones(8, 16)


def seed_function(x, w1, b1, w2, b2):
    r = x @ w1 + b1
    r.sigmoid_()
    r *= x @ w2 + b2
    return r


def relu_inplace(x, w):
    return F.relu(F.linear(x, w), inplace=True)


def masked_fill(x, w):
    return F.linear(x, w).masked_fill_(x > 0, -1e4).softmax(-1)


def residual(x, w):
    r = x
    x = F.gelu(F.linear(x, w))
    x += r
    return F.layer_norm(x, x.shape[-1:])


def setitem(x, w):
    y = F.linear(x, w)
    y[:, 0] = 0
    y[..., 1] = x[:, 2]
    return y.sin()


def view_mutation(x, w):
    y = F.linear(x, w)
    v = y.view(-1)[::2]
    v.mul_(2)
    y.t()[0].add_(1)
    return y.sin(), v


def view_of_mutated(x, w):
    y = F.linear(x, w)
    v = y[0]
    y.tanh_()
    return y * 2, v + 1


def view_later(x, w):
    y = F.linear(x, w)
    y.relu_()
    return y.view(-1)[::2] * 2


def detach_mutation(x, w):
    y = F.linear(x, w)
    y.detach().mul_(3)
    return y.sin()


def input_mutation(x, w, c):
    c.add_(1)
    c[0] = F.linear(x, w)[0].detach()
    return F.linear(x, w) * c


def input_unsqueeze(x, w, c):
    c.unsqueeze_(0)
    return F.linear(x, w) * c


def input_transpose(x, w, c):
    c.transpose_(0, 1)
    return F.linear(x, w) * c.t()


def input_unsqueeze_and_back(x, w, c):
    c.unsqueeze_(0)
    y = x * c
    c.squeeze_(0)
    return F.linear(y, w)


def set_data(x, w, c):
    c.data = F.linear(x, w).detach() * 2
    return x * c


def alias_inputs(x, y):
    x.add_(1)
    return x * y


def out_is_view_of_input(x, w):
    return F.linear(x, w), x.view(-1), x


def out_aliases_out(x, w):
    y = F.linear(x, w)
    return y, y.view(-1), y.t()


def copy_into_empty(x, w):
    o = torch.empty_like(x)
    o.copy_(F.linear(x, w))
    o.clamp_(min=0)
    return o


def constant_tensor(x, w):
    s = torch.tensor([1.0, 2.0])
    s += 1
    return F.linear(x, w) * s.sum() + torch.tensor(2.0)


def out_keyword(x, w):
    o = torch.empty(8, 16)
    torch.mm(x, w, out=o)
    return o.sin()


def late_use(x, w):
    y = F.linear(x, w)
    z = y
    y.add_(1)
    return z * y, z


def late_use_in_vmap(x, w):
    y = F.linear(x, w)
    z = y
    y.add_(1)
    with torch.no_grad():
        q = z.mean()
    return torch.func.vmap(torch.sin)(z) * q, z


def promotion(x, w, d):
    y = F.linear(x, w)
    y *= d
    y += 1
    return y


def contiguous_alias(x, w):
    y = F.linear(x, w)
    z = y.contiguous()
    z.mul_(2)
    return y + z


def contiguous_input(x, w, c):
    z = c.contiguous()
    z.mul_(2)
    return F.linear(x, w) * z


def dropout_inplace(x, w):
    return F.dropout(F.linear(x, w), 0.5, inplace=True) * 2


def chain(x, w):
    return F.linear(x, w).mul_(2).add_(x).clamp_(min=0).sigmoid_()


def no_grad_mutation(x, w):
    y = F.linear(x, w)
    with torch.no_grad():
        y.mul_(2)
    return y.sin()


def requires_grad_inside(x, w):
    y = F.linear(x, w).detach()
    y.requires_grad_()
    return y * 2


def sum_mutated_between(x, y, z):
    s = x + y
    s.sin_()
    return s * z, s


def operand_mutated_between(x, y, z):
    s = x + y
    x.add_(1)
    return s * z


def operand_mutated_after(x, y, z):
    r = (x + y) * z
    x.add_(1)
    return r, x * 2


def local_mutated_after(x, w, c):
    h = F.linear(x, w)
    r = (h + c) * x
    h.add_(1)
    return r, h


def gate_used_elsewhere(x, w1, b1, w2, b2):
    g = torch.sigmoid(x @ w1 + b1)
    return g * (x @ w2 + b2), g


def gate_mutated_through_view(x, w1, b1, w2, b2):
    g = torch.sigmoid(x @ w1 + b1)
    g.view(-1)[0] = 0
    return g * (x @ w2 + b2)


def operand_mutated_in_gate(x, w1, b1, w2, b2):
    g = torch.sigmoid(x @ w1 + b1)
    x.mul_(0.5)
    return g * (x @ w2 + b2)


def fused_output_mutated(x, w1, b1, w2, b2):
    r = torch.sigmoid(x @ w1 + b1) * (x @ w2 + b2)
    r.add_(1)
    return r.view(-1)[::2], r


def fused_output_is_only_output(x, w):
    y = F.layer_norm(x, (16,))
    return y, y.view(-1)


def grad_only(*which):
    return lambda k: tuple(X(8, 16, grad=g) for g in which)


def together(functions):
    return lambda *args: [out for f in functions for out in listed(f(*args))]


def listed(out):
    return [out] if isinstance(out, torch.Tensor) else out


def case(fn, inputs=x_w, **kw):
    return Case(kw.pop("name", fn.__name__), lambda: fn, inputs, **kw)


# One compilation for several: what they do to a fresh local does not reach the others.
FRESH = (relu_inplace, masked_fill, chain, setitem, copy_into_empty, constant_tensor)
VIEWED = (
    view_mutation,
    view_of_mutated,
    view_later,
    detach_mutation,
    no_grad_mutation,
    contiguous_alias,
)

CASES = [
    case(together(FRESH), name="fresh_locals"),
    case(together(VIEWED), name="views_of_locals"),
    case(requires_grad_inside),
    case(seed_function, gate_inputs_no_grad, name="seed_inference", train=False, fused=ONE_GATE),
    case(residual, fused={"layer_norm": 2}),
    case(input_mutation, x_w_c, generated=True),
    case(input_unsqueeze, x_w_c),
    case(input_transpose, x_w_c),
    case(input_unsqueeze_and_back, lambda k: (X(8, 16, grad=False), X(16, 16), torch.ones(8, 16))),
    case(set_data, x_w_c),
    case(alias_inputs, lambda k: (torch.ones(8, 16),) * 2),
    case(out_is_view_of_input),
    case(out_aliases_out),
    case(out_keyword, x_w_no_grad, exact="eager"),
    case(late_use, exact="plain"),
    case(late_use_in_vmap, exact="plain"),
    case(promotion, lambda k: (*x_w(k), torch.randn(8, 16).double()), exact="eager"),
    case(contiguous_input, x_w_c),
    case(dropout_inplace, exact="plain"),
    case(sum_mutated_between, grad_only(True, True, True), fused={"add_mul": 0, "layer_norm": 1}),
    case(operand_mutated_between, grad_only(False, True, True), fused={"layer_norm": 1}),
    case(
        operand_mutated_after, grad_only(False, True, True), fused={"add_mul": 0, "layer_norm": 1}
    ),
    case(local_mutated_after, x_w_c),
    case(gate_used_elsewhere, gate_inputs, fused=NO_GATE),
    case(gate_mutated_through_view, gate_inputs, fails=True),
    case(
        gate_mutated_through_view,
        gate_inputs_no_grad,
        name="gate_mutated_through_view_inference",
        train=False,
        fused=NO_GATE,
    ),
    case(operand_mutated_in_gate, gate_inputs_no_grad, train=False, fused=NO_GATE),
    case(fused_output_mutated, gate_inputs, fused=ONE_GATE, generated=True),
    case(fused_output_is_only_output, fused={"layer_norm": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inplace(case):
    compare(case)


def test_seed_function_trains():
    """Neither eager nor plain Inductor can differentiate the in-place spelling; fused, it is the
    out-of-place one.
    """
    inplace = case(seed_function, gate_inputs, fused=ONE_GATE)
    functional = case(gate, gate_inputs)
    assert "modified by an inplace operation" in str(run(inplace, "inductor").error)
    if BACKEND == "fusion":
        compare_results(
            inplace, run(functional, "inductor"), run(inplace, BACKEND), run(functional, "fp64")
        )
