"""The passes trace with autograd. Hooks on saved tensors, and checkpoints, which count what is
saved, see nothing of that when they surround the first call of a compiled function.
"""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusion_backend
from fusion_backend import remembered

pytestmark = pytest.mark.usefixtures("eager_kernels")
X = torch.randn(2, 3, 8, 6)


@pytest.fixture(autouse=True)
def decided_anew(monkeypatch):
    monkeypatch.setattr(remembered, "USED", False)


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())


@pytest.mark.parametrize("gate", ["auto", "never", "always"])
def test_a_compiled_block_in_a_checkpoint(gate):
    found = []
    for options in (None, {"fusion.gate": gate}):
        model, x = block(), X.clone().requires_grad_()
        fn = model if options is None else torch.compile(model, backend="fusion", options=options)
        y = checkpoint(fn, x, use_reentrant=False)
        found.append(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def saved_by(fn, *inputs) -> list[str]:
    """The classes of what hooks see during a call."""
    seen = []

    def pack(t):
        seen.append(type(t).__name__)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        fn(*inputs)
    return seen


def test_hooks_see_what_those_of_inductor_see():
    x, counts = X.clone().requires_grad_(), []
    for backend in ("inductor", "fusion"):
        torch._dynamo.reset()
        counts.append(saved_by(torch.compile(block(), backend=backend), x))
    assert counts[0] == counts[1] and counts[0]


def test_explain_is_unseen():
    model, x = block(), X.clone().requires_grad_()
    options = {"fusion.gate": "always"}
    seen = saved_by(lambda: fusion_backend.explain(model, x, options=options))
    assert "FakeTensor" not in seen
