"""What norms save where Inductor computes the forward: statistics that are computed once."""

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_backend.frontends.loading import patterns
from fusion_backend.ops.registry import FUSION_RULES

patterns()
aten = torch.ops.aten
REDUCTIONS = aten.mean.dim, aten.sum.dim_IntList, aten.var.correction, aten.var_mean.correction


def expression(value):
    """What a node computes, whichever node it is."""
    if not isinstance(value, fx.Node):
        return str(value)
    return (
        value.name
        if value.op == "placeholder"
        else (str(value.target), *map(expression, value.args))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"])
def test_statistics_are_those_of_the_forward(name, dtype):
    """Decomposed as for Inductor, both reduce the same values: one reduction is left of the two."""
    pattern = FUSION_RULES[name]
    x, weight = torch.randn(2, 5, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    args = [x, torch.randn_like(x)] if name.startswith("add") else [x]
    args += [weight, torch.randn_like(weight)] if "layer" in name else [weight, None]

    def both(*args):
        return pattern.reference(*args, 1e-6), pattern.saved_fn(*args, 1e-6)

    graph = make_fx(both, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *args
    ).graph
    found = [expression(n) for n in graph.nodes if n.target in REDUCTIONS]
    assert len(found) == 2 and len(set(found)) == 1, graph


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"])
def test_statistics_of_permuted_rows(name):
    """[rows] in the order of the rows, whatever the strides."""
    pattern = FUSION_RULES[name]
    x = torch.randn(5, 3, 64, dtype=torch.bfloat16).transpose(0, 1)
    args = [x, torch.randn_like(x)] if name.startswith("add") else [x]
    rows = (x if len(args) == 1 else x + args[1]).double().reshape(-1, 64)
    mean = rows.mean(1) if "layer" in name else 0 * rows[:, 0]
    rstd = ((rows - mean[:, None]).square().mean(1) + 1e-6).rsqrt()
    saved = pattern.saved_fn(*args, None, None, 1e-6)
    *found_mean, found = saved if isinstance(saved, tuple) else (saved,)
    assert found.shape == rstd.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), rstd, rtol=1e-5, atol=0)
    for one in found_mean:
        torch.testing.assert_close(one.double(), mean, rtol=1e-5, atol=1e-6)
