"""What the gate decides about matrix products where kernels can run, without a GPU; as
tests/test_gate_on_cuda.py does it.
"""

import pytest

from tests.test_gate_on_cuda import outcomes_of

LAYERS = """
def layer(x, w, b):
    return F.gelu(F.linear(x, w, b))
def feed_forward(x, w, b, v, c):
    return F.linear(F.gelu(F.linear(x, w, b)), v, c)
def swiglu(x, w, u, v):
    return F.linear(F.silu(F.linear(x, w)) * F.linear(x, u), v)
def took(record):
    return [(s.pattern, s.forward, s.backward) for s in record.sites if s.fused]
ONE = [(2, 64, 64), (128, 64), (128,)]
TWO = [*ONE, (64, 128), (64,)]
GATED = [(2, 64, 64), (128, 64), (128, 64), (64, 128)]
"""
CASES = {
    "a layer and its activation are one kernel": """
assert took(run(layer, *ONE, gate="always")[2]) == [("linear_act", "kernel", None)]
(site,) = took(run(layer, *ONE, gate="always", grad=True)[2])
assert site == ("linear_act", "kernel", "formula"), site
""",
    "without a measurement the layer is left alone, and gelu is computed as before": """
for grad in (False, True):
    record = run(layer, *ONE, grad=grad)[2]
    (site,) = [s for s in record.sites if s.pattern == "linear_act"]
    assert not site.fused and "has not been timed" in site.reason, record
    assert [s.pattern for s in record.sites if s.fused] == ["gelu"], record
""",
    "a feed-forward block is one site in training, and half of it is in inference": """
record = run(feed_forward, *TWO, gate="always", grad=True)[2]
assert took(record) == [("mlp", "kernel", "kernel")], record
no_bias = lambda x, w, v: feed_forward(x, w, None, v, None)
record = run(no_bias, TWO[0], TWO[1], TWO[3], gate="always", grad=True)[2]
assert took(record) == [("mlp", "kernel", "kernel")], record
record = run(feed_forward, *TWO, gate="always")[2]
assert took(record) == [("linear_act", "kernel", None)], record
(refused,) = [s for s in record.sites if s.pattern == "mlp"]
assert "its first half" in refused.reason, refused
record = run(swiglu, *GATED, gate="always", grad=True)[2]
assert took(record) == [("gated_mlp", "kernel", "kernel")], record
record = run(swiglu, *GATED, gate="always")[2]
assert took(record) == [("gated_linear", "kernel", None)], record
(refused,) = [s for s in record.sites if s.pattern == "gated_mlp"]
assert "its first half" in refused.reason, refused
""",
    "a block with a gate whose product is short has no kernel of its own": """
record = run(swiglu, *GATED, grad=True)[2]
(refused,) = [s for s in record.sites if s.pattern == "gated_mlp"]
assert not refused.fused, refused
assert "for Hopper GPUs, for products of 70 µs or more" in refused.reason, refused
def read(x, w, u, v):
    h = F.silu(F.linear(x, w)) * F.linear(x, u)
    return F.linear(h, v), h
record = run(read, *GATED, gate="always", grad=True)[2]
assert [s[0] for s in took(record)] == ["gated_linear"], record
(refused,) = [s for s in record.sites if s.pattern == "gated_mlp"]
assert "used elsewhere" in refused.reason or "result" in refused.reason, refused
""",
    "a hidden layer that somebody else reads is no inner value": """
def read(x, w, b, v, c):
    h = F.gelu(F.linear(x, w, b))
    return F.linear(h, v, c), h
record = run(read, *TWO, gate="always", grad=True)[2]
assert took(record) == [("linear_act", "kernel", "formula")], record
(refused,) = [s for s in record.sites if s.pattern == "mlp"]
assert "used elsewhere" in refused.reason or "result" in refused.reason, refused
def dropped(x, w, b, v, c):
    return F.linear(F.dropout(F.gelu(F.linear(x, w, b)), 0.1, True), v, c)
record = run(dropped, *TWO, gate="always", grad=True)[2]
assert took(record) == [("dropout_mlp", "kernel", "kernel")], record
def kept_and_dropped(x, w, b, v, c):
    h = F.gelu(F.linear(x, w, b))
    return F.linear(F.dropout(h, 0.1, True), v, c), h
record = run(kept_and_dropped, *TWO, gate="always", grad=True)[2]
assert [s[0] for s in took(record)] == ["linear_act"], record
""",
    "what the kernels cannot read is refused in a sentence": """
for fn, shapes, sentence in (
    (layer, [(64, 60), (128, 60), (128,)], "the rows of x, 60 elements apart, are not aligned"),
    (layer, [(64, 64), (100, 64), (100,)], "the rows of result, 100 elements apart"),
):
    record = run(fn, *shapes, gate="always")[2]
    (site,) = [s for s in record.sites if s.pattern == "linear_act"]
    assert not site.fused and sentence in site.reason, site
record = run(layer, *ONE, dtype=torch.float32, gate="always")[2]
(site,) = [s for s in record.sites if s.pattern == "linear_act"]
assert not site.fused and "fp32 without TF32" in site.reason, site
cut = lambda x, w, b: layer(x, w.narrow(1, 4, 64), b)
record = run(cut, (64, 64), (128, 72), (128,), gate="always")[2]
(site,) = [s for s in record.sites if s.pattern == "linear_act"]
assert not site.fused and "w begins in the middle of 16 bytes" in site.reason, site
record = run(lambda x, w, b: layer(x[:, 4:68], w, b), (64, 72), (128, 64), (128,), gate="always")[2]
assert took(record) == [("linear_act", "kernel", None)], record  # of x there is a copy
""",
    "the library's epilogue is a call of torch, which Inductor launches as it is": """
from unittest import mock
from torch.fx.experimental.proxy_tensor import make_fx
import fusion_backend.patterns.linear_act as room
from fusion_backend.kernels.gemm.library import ACTIVATIONS
patterns()
mode = FakeTensorMode()
with mode:
    x, w, b = (torch.empty(s, dtype=torch.bfloat16) for s in ((2, 64, 64), (64, 128), (128,)))
kernel = room.linear_act.kernel_fn
with mode, mock.patch.object(room, "library_takes", lambda x, w, b, act: act in ACTIVATIONS):
    for act, save in (("relu", False), ("relu", True), ("gelu_tanh", False)):
        traced = make_fx(lambda x, w, b: kernel(x, w, b, act, save)[0])(x, w, b)
        names = [str(n.target) for n in traced.graph.nodes]
        assert "aten._addmm_activation.default" in names, names
        (out,) = [n for n in traced.graph.nodes if n.op == "output"]
        assert out.args[0].meta["val"].shape == (2, 64, 128)
""",
    "up to 16 rows the kernel of few rows is taken, beyond them the library's epilogue": """
from unittest import mock
import fusion_backend.patterns.linear_act as room
patterns()
mode, called = FakeTensorMode(), []
def by(name):
    return mock.patch.object(room, name, lambda x, *_: called.append(name) or x)
def takes(library):
    return mock.patch.object(room, "library_takes", lambda *_: library)
ours, library = "decode", "library_linear"
for rows, can, want in (
    (1, True, ours), (16, True, ours), (17, True, library), (64, True, library),
    (65, True, library), (1, False, ours), (17, False, ours), (64, False, ours),
):
    with mode, by(ours), by(library), takes(can):
        x, w, b = (torch.empty(s, dtype=torch.bfloat16) for s in ((rows, 64), (64, 128), (128,)))
        room.linear_act.kernel_fn(x, w, b, "relu", False)
    assert called.pop() == want and not called, (rows, can)
""",
    "int8 products are scaled back where they are made, and rounded to what follows": """
def scaled(q, s, w, ws, b):
    return (torch._int_mm(q, w.t()).float() * s * ws + b).to(torch.bfloat16)
mode = FakeTensorMode()
with mode:
    q, w = (torch.empty(s, dtype=torch.int8) for s in ((64, 64), (32, 64)))
    s, ws, b = torch.empty(64, 1), torch.empty(32), torch.empty(32)
    gm = fx.symbolic_trace(scaled)
    Examples(gm).run(q, s, w, ws, b)
record = GraphRecord(0)
new, _ = fuse_graph(gm, Options(gate="always"), record, usable(patterns()))
assert [s[:2] for s in took(record)] == [("dequantize_linear", "kernel")], record
(node,) = fused_nodes(new)
assert node.args[-1] == "bfloat16", node.args
""",
}


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of({name: LAYERS + case for name, case in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_decision(outcomes, case):
    assert not outcomes[case], outcomes[case]
