"""On a GPU: causal attention whose result leaves the graph as it is, as at the end of a part that
Dynamo has cut. Its gradient then comes in the layout of the result, [b, s, h, d] in memory.
"""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, ROWS, HEADS, SIZE = 16, 1024, 16, 64
WIDTH = HEADS * SIZE


def attend(x, w, mask):
    q, k, v = (
        t.view(BATCH, ROWS, HEADS, SIZE).transpose(1, 2)
        for t in (x.view(-1, WIDTH) @ w).view(BATCH, ROWS, 3 * WIDTH).split(WIDTH, -1)
    )
    return F.scaled_dot_product_attention(q, k, v, mask)


def two_layers(x, first, second):
    at = torch.arange(ROWS, device=x.device)
    mask = (at[:, None] >= at[None, :]).expand(BATCH, 1, ROWS, ROWS)
    y = attend(x, first, mask).transpose(1, 2).reshape(x.shape)
    return attend(y, second, mask)


def operands(dtype):
    generator = torch.Generator(DEVICE).manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, device=DEVICE, generator=generator)

    x, weights = drawn(BATCH, ROWS, WIDTH), (drawn(WIDTH, 3 * WIDTH) * WIDTH**-0.5 for _ in "ab")
    tensors = [t.bfloat16().to(dtype).requires_grad_() for t in (x, *weights)]
    gradient = drawn(BATCH, ROWS, HEADS, SIZE).bfloat16().to(dtype)
    return tensors, gradient.transpose(1, 2)


def passed(call, tensors, gradient):
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient)]


@pytest.mark.parametrize("as_result", [True, False])
@pytest.mark.parametrize("gate", ["auto", "always"])
def test_its_gradients_are_as_near_to_fp64_as_those_of_eager_code(gate, as_result):
    torch._dynamo.reset()
    fusion_backend.reset()
    options = {"fusion.gate": gate, "fusion.measure_s": 60}
    call = torch.compile(two_layers, backend="fusion", options=options)
    tensors, gradient = operands(torch.bfloat16)
    gradient = gradient if as_result else gradient.contiguous()
    ours, eager = passed(call, tensors, gradient), passed(two_layers, tensors, gradient)
    sites = [s for s in fusion_backend.report().sites if s.pattern == "attention"]
    assert len(sites) == 2
    assert not [s.reason for s in sites if "not those of Inductor" in s.reason]
    assert gate == "auto" or all(s.fused for s in sites)
    exact, gradient = operands(torch.float64)
    for mine, theirs, want in zip(ours, eager, passed(two_layers, exact, gradient), strict=True):
        far = [(t.double() - want).norm() / want.norm() for t in (mine, theirs)]
        assert far[0] <= 1.5 * far[1] + 1e-3
