"""A norm in fp32 that is read in 16 bits alone, as by linear layers under autocast, is written in
16 bits; of a residual sum one part may be in 16 bits and the other in fp32.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusion_backend.decide.gate
from fusion_backend.frontends.explain import Collector
from fusion_backend.kernels.common.rows import Config
from fusion_backend.kernels.norm import backward as norms_backward
from fusion_backend.kernels.norm import forward as norms
from fusion_backend.kernels.norm import forward_split as norms_split
from fusion_backend.ops.operator import operator_of
from fusion_backend.ops.registry import FUSION_RULES
from fusion_backend.reporting.reject import Reject
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import PART, Kernels, check, distance, randn, runs_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N = 100


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


@pytest.fixture(params=["few", "many", "long", "split"])
def each_kernel(request, monkeypatch):
    """The kernels of few rows and of many, of rows that no program holds, and of few such rows."""
    if request.param != "few":
        monkeypatch.setattr(norms_backward, "FEW_ROWS", 0)
    if request.param in ("long", "split"):
        monkeypatch.setattr(norms, "forward_config", lambda *how: Config(*PART))
        monkeypatch.setattr(norms_backward, "MAX_HELD_BACKWARD", 64)
    if request.param == "split":
        monkeypatch.setattr(norms_split, "few_long_rows", lambda *how: True)
        monkeypatch.setattr(norms_split, "PIECE", 64)


def norm_of(x):
    return F.layer_norm(x, (N,))


def two_layers(x, w):
    y = norm_of(x)
    with torch.autocast("cpu", BF16):
        return F.linear(y, w) + F.linear(y, w[:7]).sum()


NARROW = {
    "a cast": lambda x, w: norm_of(x).to(BF16) * 2,
    "a cast to fp16": lambda x, w: norm_of(x).half() * 2,
    "two layers under autocast": two_layers,
    "casts of views": lambda x, w: [(y := norm_of(x)).view(-1).to(BF16) * 2, y[:, 1:].to(BF16) * 2],
    "of a sum": lambda x, w: [F.layer_norm(h := x + x.to(BF16), (N,)).to(BF16) * 2, h],
    "of bf16 with a weight in fp32": lambda x, w: (
        F.layer_norm(x.to(BF16).float(), (N,), w[0]).to(BF16).mul(2)
    ),
    "of an RMS norm": lambda x, w: F.rms_norm(x, (N,)).to(BF16) * 2,
    "modulated": lambda x, w: (norm_of(x) * (1 + w[:2, None]) + w[2:4, None]).to(BF16) * 2,
}
WIDE = {
    "computed twice, another site reads it": lambda x, w: [
        norm_of(x).to(BF16) * 2,
        F.rms_norm(norm_of(x), (N,)) * 2,
    ],
    "computed twice, read in fp32": lambda x, w: [norm_of(x) * 3, norm_of(x).to(BF16) * 2],
    "expanded": lambda x, w: norm_of(x)[:, :1].expand(2, 3, N).half() * 2,
    "in bf16, expanded": lambda x, w: norm_of(x)[:, :1].expand(2, 3, N).to(BF16) * 2,
    "returned": lambda x, w: norm_of(x),
    "read in fp32, too": lambda x, w: [(y := norm_of(x)).to(BF16) * 2, y * 2],
    "read as a view in fp32, too": lambda x, w: [(y := norm_of(x)).to(BF16) * 2, y.view(-1) * 2],
    "two 16-bit dtypes": lambda x, w: [(y := norm_of(x)).to(BF16) * 2, y.to(FP16) * 2],
    "a cast to fp64": lambda x, w: norm_of(x).double() * 2,
    "a cast to integers and on": lambda x, w: norm_of(x).int().to(BF16) * 2,
    "written to": lambda x, w: [(y := norm_of(x)).to(BF16) * 2, y.mul_(2)],
    "its dtype asked for": lambda x, w: [(y := norm_of(x)).to(BF16) * 2, x.half().type_as(y) * 2],
    "in bf16 already": lambda x, w: norm_of(x.to(BF16)) * 2,
    "in bf16, read in fp32": lambda x, w: norm_of(x.to(BF16)).float() * 2,
}
CASES = [(fn, True) for fn in NARROW.values()] + [(fn, False) for fn in WIDE.values()]


@pytest.mark.parametrize("fn, narrow", CASES, ids=[*NARROW, *WIDE])
@pytest.mark.parametrize("train", [False, True])
def test_which_are(fn, narrow, train):
    x, w = torch.randn(2, 3, N, requires_grad=train), torch.randn(N, N, requires_grad=train)
    collector = collect(fn, x, w, options={"fusion.gate": "always", "fusion.skip": "norm_linear"})
    (graph,) = collector.graphs
    nodes = [n for n in fused_nodes(graph) if "norm" in str(n.target)]
    assert nodes and all(bool(n.kwargs.get("narrow")) is narrow for n in nodes)


def test_gradients_of_several_readers_are_not_added_up_in_fp16():
    """Their sum may be larger than any number that fp16 has."""

    def fn(x):
        y = norm_of(x)
        return y.half() * 2, y.half() * 3

    for train in (False, True):
        x = torch.randn(2, 3, N, requires_grad=train)
        torch.compiler.reset()
        (graph,) = collect(fn, x, options={"fusion.gate": "always"}).graphs
        (node,) = fused_nodes(graph)
        assert node.kwargs.get("narrow") == (None if train else "float16")


SOME = {k: WIDE[k] for k in ("read in fp32, too", "computed twice, another site reads it")}


@runs_kernels
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("fn", [*NARROW.values(), *SOME.values()], ids=[*NARROW, *SOME])
def test_values_and_gradients(fn):
    """With the kernels, as near to fp64 as eager is."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, N, requires_grad=True), torch.randn(N, N, requires_grad=True)
    backend = Kernels({"fusion.gate": "always", "fusion.skip": "norm_linear"})

    def run(f, *args):
        out = f(*args)
        many = out if isinstance(out, list) else [out]
        total = sum((o.double() * torch.linspace(1, 2, o.shape[-1])).sum() for o in many)
        return [o.detach() for o in many], torch.autograd.grad(total, args, allow_unused=True)

    (got, mine), (eager, its) = run(torch.compile(fn, backend=backend), x, w), run(fn, x, w)
    torch.compiler.reset()
    assert backend.report.fused
    for g, e in zip(got, eager, strict=True):
        assert g.dtype == e.dtype and distance(g, e) < (8e-3 if g.dtype != FP32 else 1e-6)
    for g, e in zip(mine, its, strict=True):
        assert (g is None) == (e is None)
        assert g is None or distance(g, e) < 2e-2


DTYPES = [(BF16, FP32), (FP32, BF16), (FP16, FP32)]


@runs_kernels
@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("narrow", [None, BF16, FP16])
@pytest.mark.parametrize("x, residual", DTYPES)
@pytest.mark.parametrize("needs", [None, ["residual"], ["x"], ["weight"]], ids=str)
def test_a_sum_of_two_dtypes(x, residual, narrow, needs):
    x, r = randn(5, N, dtype=x), randn(5, N, dtype=residual)
    w, b = randn(N), randn(N)
    how = dict(narrow=narrow, needs=needs)
    check("add_rms_norm", x, r, w, 1.0, 1e-5, **how)
    check("add_layer_norm", x, r, w, b, 1e-5, **how)
    if r.dtype == FP32:
        check("dropout_add_layer_norm", x, r, w, b, 0.3, 1e-5, **how)


@runs_kernels
@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("narrow", [BF16, FP16])
def test_the_other_norms(narrow):
    x, w, b = randn(2, 3, N), randn(N), randn(N)
    check("layer_norm", x, w, b, 1e-5, narrow=narrow)
    check("rms_norm", x, w, 1.0, 1e-5, narrow=narrow)
    scale, shift = randn(2, 1, N, dtype=narrow), randn(2, 1, N, dtype=narrow)
    check("modulated_norm", x, w, b, scale, shift, 1e-5, "layer", narrow=narrow)


@runs_kernels
@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("narrow", [None, BF16, FP16])
@pytest.mark.parametrize("last", [False, True])
def test_vectors_in_fp32_beside_16_bits(narrow, last):
    """As a norm under autocast has them that reads the result of a linear layer or convolution."""
    x, w, b, how = randn(2, 3, N, dtype=BF16), randn(N), randn(N), dict(narrow=narrow)
    check("layer_norm", x, w, b, 1e-5, **how)
    check("layer_norm", x, None, b, 1e-5, **how)
    check("rms_norm", x, w, 1.0, 1e-5, **how)
    x = randn(2, 12, 5, 7, dtype=BF16)
    x = x.to(memory_format=torch.channels_last) if last else x
    check("group_norm", x, 3, randn(12), randn(12), 1e-5, "silu", like=x, **how)
    check("group_norm", x, 3, None, randn(12), 1e-5, "silu", like=x, **how)


@pytest.mark.parametrize(
    "name, rest", [("add_layer_norm", (None, 1e-5)), ("dropout_add_layer_norm", (None, 0.1, 1e-5))]
)
def test_dtypes_that_the_kernels_do_not_take(name, rest):
    def refused(x, residual, weight):
        args = randn(4, N, dtype=x), randn(4, N, dtype=residual), randn(N, dtype=weight)
        return isinstance(FUSION_RULES[name].guard_fn(*args, *rest), Reject)

    assert not refused(BF16, FP32, FP32) and not refused(BF16, BF16, BF16)
    assert refused(BF16, FP32, BF16) and refused(BF16, FP16, FP32) and refused(BF16, BF16, FP32)
    assert refused(FP32, BF16, FP32) == (name == "dropout_add_layer_norm")


@pytest.mark.parametrize("backward", ["kernel", "vjp"])
def test_a_reference_is_rounded_as_well(backward):
    """Where Inductor computes the forward, or the gradient."""
    leaves = [randn(4, N).requires_grad_(), randn(4, N, dtype=BF16).requires_grad_()]
    op, rest = operator_of(FUSION_RULES["add_layer_norm"]), (None, None, 1e-5)
    decision = dict(forward="reference", backward=backward, save=True, narrow="bfloat16")
    y, h, *_ = op.overload(*leaves, *rest, **decision)
    want = F.layer_norm(leaves[0] + leaves[1], (N,))
    assert y.dtype == BF16 and h.dtype == FP32 and torch.equal(y, want.to(BF16))
    factor = torch.linspace(1, 2, N)
    got, right = (torch.autograd.grad((o * factor).sum(), leaves) for o in (y, want))
    for g, r in zip(got, right, strict=True):
        assert g.dtype == r.dtype and distance(g, r) < 1e-2


class Block(nn.Module):
    """A residual stream in fp32 under autocast."""

    def __init__(self, p: float):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(N), nn.Linear(N, 32), nn.Linear(32, N)
        self.p = p

    def forward(self, x):
        branch = self.down(F.relu(self.up(self.norm(x))))
        return x + F.dropout(branch, self.p, self.training)


@runs_kernels
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("p, name", [(0.0, "add_layer_norm"), (0.3, "dropout_add_layer_norm")])
def test_blocks_under_autocast(p, name):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(p) for _ in range(3)), nn.LayerNorm(N)), torch.randn(2, 9, N)
    factor = torch.randn(N)
    backend = Kernels({"fusion.gate": "always", "fusion.only": f"layer_norm, {name}"})

    def gradients(run):
        with torch.autocast("cpu", BF16):
            loss = (run(x) * factor).mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    got = gradients(torch.compile(model, backend=backend, dynamic=False))
    assert sorted(s.pattern for s in backend.report.fused) == [name] * 3 + ["layer_norm"]
    (graph,) = backend.graphs
    narrow = [n.kwargs.get("narrow") for n in fused_nodes(graph)]
    assert narrow == ["bfloat16"] * 3 + [None]  # the last one's result is returned
    if not p:  # with dropout every run has other gradients
        for mine, its in zip(got, gradients(model), strict=True):
            assert mine.dtype == its.dtype
            assert distance(mine, its) < 6e-2  # the interpreter rounds by cutting off


def test_another_backend_reads_the_wide_value():
    """The graph's readers have the dtype that they had, whatever compiles it."""
    x = torch.randn(4, N)
    collector = Collector({"fusion.gate": "always"})
    out = torch.compile(NARROW["a cast"], backend=collector)(x, None)
    (graph,) = collector.graphs
    (node,) = fused_nodes(graph)
    (result,) = node.users
    (wide,) = result.users
    assert result.meta["example_value"].dtype == BF16 and wide.meta["example_value"].dtype == FP32
    assert torch.equal(out, NARROW["a cast"](x, None))
