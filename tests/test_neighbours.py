"""Where a kernel stands back: for what is around the site, and in the classes that lost to Inductor
on foreign code.

Decisions of the default gate on fake tensors that pass for CUDA tensors; what won in the committed
results is taken.
"""

import pytest

from tests.test_gate_on_cuda import outcomes_of

BEGIN = """
import fusion_backend.kernels.common.cooperative_rows as shared
import fusion_backend.kernels.common.rows as rows_of
rows_of.multiprocessors = shared.multiprocessors = lambda device: 132
fp32, bf16 = torch.float32, torch.bfloat16

def decided(name, fn, *shapes, dtype=bf16, **how):
    \"\"\"(fused, reason) of the sites of a pattern.\"\"\"
    sites = run(fn, *shapes, dtype=dtype, **how)[2].sites
    return [(s.fused, s.reason) for s in sites if s.pattern == name]

def taken(name, fn, *shapes, **how):
    found = decided(name, fn, *shapes, **how)
    assert found and all(fused for fused, _ in found), found

def left(name, why, fn, *shapes, **how):
    found = decided(name, fn, *shapes, **how)
    assert found and not any(fused for fused, _ in found), found
    assert any(why in told for _, told in found), found
    opened = decided(name, fn, *shapes, **how | {"gate": "always"})
    assert all(fused for fused, _ in opened), opened  # it is the gate that leaves it
"""

CASES = {
    "batch_norm beside a convolution": """
x, k, c = (64, 256, 56, 56), (256, 256, 3, 3), (256,)
norm = lambda x, c: F.batch_norm(x, c, c, c, c)
conv = lambda x, k: F.conv2d(x, k, padding=1)
beside = "layout of conv2d"
left("batch_norm", beside, lambda x, k, c: norm(conv(x, k), c), x, k, c)
left("batch_norm", beside, lambda x, k, c: norm(conv(x, k), c).relu(), x, k, c)
left("batch_norm", beside, lambda x, k, c: conv(norm(x, c).relu(), k), x, k, c)
transposed = lambda x, k, c: norm(F.conv_transpose2d(x, k, padding=1), c)
left("batch_norm", "layout of conv_transpose2d", transposed, x, k, c)
left("batch_norm", "neighbour", lambda x, k, c: norm(x, c) + x, x, k, c)
taken("batch_norm", lambda x, c: norm(x, c), x, c)
taken("batch_norm", lambda x, c: norm(x, c).relu(), x, c)
""",
    "gelu before what reduces": """
x = (8, 32, 64, 64)
before = {
    "avg_pool2d": lambda x: F.avg_pool2d(F.gelu(x), 2),
    "max_pool2d": lambda x: F.max_pool2d(F.gelu(x), 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(F.gelu(x), 1),
    "group_norm": lambda x: F.group_norm(F.gelu(x), 8),
    "layer_norm": lambda x: F.layer_norm(F.gelu(x), (64,)),
    "mean": lambda x: F.gelu(x).mean((2, 3)),
    "max": lambda x: (F.gelu(x, approximate="tanh") * 2 + 1).max(1)[0],
    "sum": lambda x: F.gelu(x).float().flatten(1).sum(),
    "softmax": lambda x: torch.softmax(F.gelu(x), -1),
}
for reader, fn in before.items():
    for grad in (False, True):
        left("gelu", f"before {reader} ", fn, x, grad=grad)
for fn in (
    lambda x: F.gelu(x),
    lambda x: F.gelu(x) * 2,
    lambda x: torch.max(F.gelu(x), x),  # of two tensors, element by element
    lambda x: (F.gelu(x) @ x).sum(),  # a product reads it from memory in any case
    # so do two readers, as in Whisper
    lambda x: (lambda h: F.layer_norm(h, (64,)) + h)(F.gelu(x).transpose(1, 2) + 1),
):
    taken("gelu", fn, x)
    taken("gelu", fn, x, grad=True)
""",
    "group_norm behind a gelu": """
x, c = (64, 128, 64, 64), (128,)
norm = lambda x, c: F.group_norm(x, 8, c, c)
left("group_norm", "the gelu in front of it", lambda x, c: norm(F.gelu(x), c), x, c, grad=True)
taken("group_norm", norm, x, c, grad=True)
taken("group_norm", lambda x, c: norm(x.tanh(), c), x, c, grad=True)
""",
    "gelu around a transposed convolution": """
x, k, p = (8, 32, 64, 64), (32, 32, 4, 4), (32, 32, 3, 3)
around = "around conv_transpose2d"
left("gelu", around, lambda x, k: F.gelu(F.conv_transpose2d(x, k)), x, k)
left("gelu", around, lambda x, k: F.gelu(F.softmax(F.conv_transpose2d(x, k) * 0.5, -1)), x, k)
left("gelu", around, lambda x, k: F.conv_transpose2d(F.gelu(x) * 2, k), x, k)
taken("gelu", lambda x, k: F.gelu(F.conv2d(x, k)), x, p)
taken("gelu", lambda x, k: F.conv2d(F.gelu(x), k), x, p)
taken("gelu", lambda x, k: F.gelu(F.conv2d(F.conv_transpose2d(x, k), k)), x, p)  # far away
""",
    "a sum that nobody reads": """
x, w = (16384, 4096), (4096,)
layer = lambda h, w: F.layer_norm(h, (4096,), w, w)
rms = lambda h, w: F.rms_norm(h, (4096,), w)
for name, norm in (("add_layer_norm", layer), ("add_rms_norm", rms)):
    alone = lambda x, r, w: norm(x + r, w)
    both = lambda x, r, w: (lambda h: (norm(h, w), h))(x + r)
    left(name, "nobody reads the sum", alone, x, x, w)
    taken(name, both, x, x, w)
    for fn in (alone, both):  # backward reads it
        taken(name, fn, x, x, w, grad=True)
    sites = run(alone, x, x, w)[2].sites
    # nor is the norm of the sum, which Inductor makes one with it
    assert not any(s.fused for s in sites), str(sites)
    # where it is taken all the same the sum is not written, unless backward reads it
    def layers(x, r, w):
        a = alone(x, r, w)
        b, h = both(x, a, w)
        return alone(a, b, w), h
    for fn, grad, unread in (
        (alone, False, ["1"]), (both, False, [None]), (alone, True, [None]),
        (layers, False, ["1", None, "1"]), (layers, True, [None] * 3),
    ):
        nodes = fused_nodes(run(fn, x, x, w, grad=grad, gate="always")[1])
        assert {str(n.target) for n in nodes} == {f"fusion.{name}.default"}, nodes
        assert [n.kwargs.get("unread") for n in nodes] == unread, (name, grad, nodes)
""",
    "rows of softmax that no program holds": """
softmax = lambda x: x.softmax(-1)
for grad in (False, True):
    for dtype, shape in (
        (fp32, (64, 131072)), (fp32, (2048, 131072)), (bf16, (2048, 131072)), (bf16, (64, 65536))
    ):
        left("softmax", "are read twice", softmax, shape, dtype=dtype, grad=grad)
    taken("softmax", softmax, (1024, 65536), grad=grad)  # 16 bits, programs that share a row
    taken("softmax", softmax, (2048, 16384), dtype=fp32, grad=grad)
    taken("softmax", softmax, (2048, 32768), grad=grad)
""",
    "fp32": """
shape, w = (8192, 4096), (4096,)
layer = lambda x, w: F.layer_norm(x, (4096,), w, w)
rms = lambda x, w: F.rms_norm(x, (4096,), w)
added = lambda norm: lambda x, w, r: (lambda h: (norm(h, w), h))(x + r)
for small in ((64, 4096), (2048, 4096)):
    for name, fn in (("layer_norm", layer), ("rms_norm", rms)):
        left(name, "small training steps in fp32", fn, small, w, dtype=fp32, grad=True)
        taken(name, fn, small, w, grad=True)
        taken(name, fn, shape, w, dtype=fp32, grad=True)
        name, fn = f"add_{name}", added(fn)
        left(name, "small training steps in fp32", fn, small, w, small, dtype=fp32, grad=True)
        taken(name, fn, shape, w, shape, dtype=fp32, grad=True)
normalised = lambda x: F.normalize(x, dim=-1)
for grad in (False, True):
    left("l2_norm", "0.97 of Inductor", normalised, (16384, 4096), dtype=fp32, grad=grad)
    taken("l2_norm", normalised, (16384, 4096), grad=grad)
""",
    "what won is taken": """
import json
from benchmarks.workloads.work import DTYPES, Work
CONCERNED = [
    "batch_norm", "gelu", "add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm", "l2_norm",
    "softmax",
]
def sites(work):
    graph = fx.Graph()
    with FakeTensorMode():
        args = [
            graph.placeholder(f"t{i}") if isinstance(a, Tensor) else a
            for i, a in enumerate(work.arguments("cpu"))
        ]
        tensors = [a for a in work.arguments("cpu") if isinstance(a, Tensor)]
    graph.output(graph.call_function(work.function, tuple(args)))
    gm = fx.GraphModule({}, graph)
    with tensors[0].fake_mode:
        Examples(gm).run(*tensors)
    record = GraphRecord(0)
    fuse_graph(gm, Options(), record, usable(patterns()))
    return [s for s in record.sites if s.fused]
looked_at, lost = 0, []
for row in json.load(open("benchmarks/results/h200.json"))["rows"]:
    found = {c["name"]: c for c in row["contenders"]}
    before = [s for s in found["fusion"]["sites"] if s["fused"]]
    if row["pattern"] not in CONCERNED or not before:
        continue
    mask = row["name"].split()[-2] if row["name"].endswith(" mask") else ""
    dtype = DTYPES[row["dtype"]]
    work = Work(row["pattern"], row["case"], dtype, row["train"], row["linear"], mask)
    now = [*map(vars, sites(work))]
    looked_at += 1
    key = lambda sites: [(s["pattern"], s["forward"], s["backward"]) for s in sites]
    if key(now) != key(before):
        lost.append((row["name"], key(before), key(now)))
assert looked_at > 50 and not lost, (looked_at, lost)
""",
}


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of({name: BEGIN + case for name, case in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_decision(outcomes, case):
    assert not outcomes[case], outcomes[case]
