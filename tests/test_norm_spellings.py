"""Norms over channels, and rows of unit length, found in other words than those of their patterns;
and what comes close and is left alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.testing import assert_fuses, fused_nodes, rewritten
from tests.kernel_checks import FLOATS, runs_kernels
from tests.spelled import check_spelling, leaves

pytestmark = pytest.mark.usefixtures("poisoned_empties")
ALWAYS = {"fusion.gate": "always"}


# Instance normalisation is group normalisation with each channel for a group.


INSTANCE = {
    "F.instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b, True, 0.1, 1e-3),
    "torch.instance_norm": lambda x, w, b: torch.instance_norm(
        x, w, b, None, None, True, 0.1, 1e-3, False
    ),
    "its weight by hand": lambda x, w, b: (
        F.instance_norm(x, eps=1e-3) * w[:, None, None] + b.view(1, -1, 1, 1)
    ),
    "with silu": lambda x, w, b: F.silu(F.instance_norm(x, weight=w, bias=b, eps=1e-3)),
}


@runs_kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("words", INSTANCE)
def test_instance_norm(words, needs, dtype):
    inputs = leaves((2, 5, 3, 7), (5,), (5,), dtype=dtype, needs=needs)
    node = check_spelling("group_norm", INSTANCE[words], *inputs)
    assert node.args[1] == 5 and node.kwargs["save"] == needs


@runs_kernels
@pytest.mark.parametrize("shape", [(3, 1, 2), (1, 7, 33), (2, 3, 5, 1, 3), (2, 3, 1, 2)])
def test_instance_norm_of_other_sizes(shape):
    node = check_spelling("group_norm", lambda x: F.instance_norm(x, eps=0.1), *leaves(shape))
    assert node.args[1] == shape[1]


@pytest.mark.parametrize("module", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_modules(module, training, affine):
    x = torch.randn(2, 6, *[5, 3, 4][: int(module.__name__[-2])], requires_grad=True)
    assert_fuses(module(6, affine=affine).train(training), x, pattern="group_norm")


@pytest.mark.parametrize("training", [True, False])
def test_instance_norm_with_running_statistics_is_left_alone(training):
    """It updates them, or reads them."""
    norms = [nn.InstanceNorm2d(6, track_running_stats=True).train(training) for _ in range(2)]
    x = torch.randn(2, 6, 5, 3)
    assert_fuses(norms[0], x, pattern="group_norm", count=0)
    torch.compiler.reset()
    norms[0](x)
    norms[1](x)
    torch.compile(norms[1], backend="fusion", options=ALWAYS)(x)
    norms[0](x)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norms[1], name), getattr(norms[0], name))


def test_one_channel_is_one_group():
    (node,) = fused_nodes(
        rewritten(lambda x: F.instance_norm(x.flatten(1)[:, None]), *leaves((2, 6, 5)))
    )
    assert node.args[1] == 1


def test_an_instance_norm_that_is_read_twice_keeps_its_act_outside():
    fn = lambda x: (lambda y: F.silu(y) + y)(F.instance_norm(x))  # noqa: E731
    (node,) = fused_nodes(rewritten(fn, *leaves((2, 6, 5, 3))))
    assert "identity" in node.args


def test_instance_norm_of_other_batches_needs_no_other_graph(eager_kernels):
    fn = lambda x, w: F.instance_norm(x, weight=w)  # noqa: E731
    x, w = torch.randn(3, 6, 5), torch.randn(6)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(fn, backend="fusion", options=ALWAYS)
    assert_fuses(fn, x, w, pattern="group_norm")
    for b in 3, 7, 2:
        y = torch.randn(b, 6, 5)
        torch._dynamo.mark_dynamic(y, 0)
        with torch._dynamo.config.patch(error_on_recompile=b != 3):
            torch.testing.assert_close(compiled(y, w), fn(y, w))
