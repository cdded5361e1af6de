"""What the gate decides where kernels can run, without a GPU: fake CPU tensors that pass for CUDA
tensors.

Run in a process of its own, because kernels here must not be interpreted.
"""

import json

import pytest

from tests.without_interpreter import output_of

PRELUDE = """
import torch, torch.nn.functional as F, warnings
from torch import fx, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
import fusion_backend
from fusion_backend import BackwardOnly, Pattern, Reject
from fusion_backend.frontends.loading import patterns, usable
from fusion_backend.pipeline import fuse_graph
from fusion_backend.options import Options
from fusion_backend.reporting.records import GraphRecord
from fusion_backend.testing import fused_nodes, graph_text

import fusion_backend.decide.gate, fusion_backend.ops.operator
fusion_backend.decide.gate.on_gpu = fusion_backend.ops.operator.on_gpu = lambda t: True

class Examples(fx.Interpreter):
    def run_node(self, n):
        out = super().run_node(n)
        n.meta["example_value"] = out
        return out

def run(fn, *shapes, dtype=torch.bfloat16, grad=False, **options):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = [torch.empty(*s, dtype=dtype).requires_grad_(grad) for s in shapes]
        gm = fx.symbolic_trace(fn)
        Examples(gm).run(*inputs)
    record = GraphRecord(0)
    patterns()
    new, decisions = fuse_graph(gm, Options(**options), record, usable(patterns()))
    return gm, new, record

def norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)
"""

CASES = {
    "a patch embedding is a product where that was timed": """
def embed(x, w, b):
    return F.conv2d(x, w, b, stride=8).flatten(2).transpose(1, 2)
def site(x=(4, 3, 256, 256), o=768, **options):
    (site,) = run(embed, x, (o, x[1], 8, 8), (o,), **options)[2].sites
    return site
for grad in (False, True):
    found = site(grad=grad)
    assert found.fused and "one matrix product" in found.reason, str(found)
    assert (found.forward, found.backward) == ("reference", "vjp" if grad else None), str(found)
assert "TF32" in site(dtype=torch.float32).reason
assert site(dtype=torch.float16).fused and not site(dtype=torch.float64).fused
lying = lambda x, w, b: embed(x.permute(0, 3, 1, 2), w, b)
(found,) = run(lying, (4, 256, 256, 3), (768, 3, 8, 8), (768,))[2].sites
for found in (found, site((1, 3, 32, 32)), site((4, 96, 256, 256)), site(o=64)):
    assert not found.fused and "has not been timed" in found.reason, str(found)
""",
    "layer norm in fp32 is taken whole, or not at all": """
shapes = (16384, 4096), (4096,), (4096,)
for grad in (False, True):
    (site,) = run(norm, *shapes, dtype=torch.float32, grad=grad)[2].sites
    wanted = ("kernel", "kernel") if grad else (None, None)
    assert (site.forward, site.backward) == wanted, str(site)
""",
    "the forward of norms is Inductor's where that was as fast, by the length of a row": """
import fusion_backend.kernels.common.cooperative_rows as shared
shared.multiprocessors = lambda device: 132
def rms(x, w, b):
    return F.rms_norm(x, (x.shape[-1],), w)
def summed(x, w, r):
    h = x + r
    return F.rms_norm(h, (x.shape[-1],), w), h
def by_kernel(fn, rows, n):
    last = (rows, n) if fn is summed else (n,)
    found = [s for s in run(fn, (rows, n), (n,), last, grad=True)[2].sites if s.fused]
    assert [s.backward for s in found] == ["kernel"], found
    return found[0].forward == "kernel"
lengths = 8192, 12288, 16384, 20480, 32768, 65536
assert [by_kernel(norm, 4096, n) for n in lengths] == [True, True, False, True, True, True]
assert [by_kernel(rms, 4096, n) for n in lengths] == [True, False, False, False, False, True]
assert [by_kernel(summed, 4096, n) for n in lengths] == [True] * 6
assert not by_kernel(rms, 512, 65536)  # few rows: nobody shares them
assert not by_kernel(rms, 256, 8192)
""",
    "layer norm runs kernels, forward and backward": """
shapes = (64, 4096), (4096,), (4096,)
def norm_tanh(x, w, b):
    return F.layer_norm(x, (4096,), w, b).tanh()
gm, new, record = run(norm_tanh, *shapes, grad=True, gate="always")
(site,) = record.sites
assert site.fused and (site.forward, site.backward) == ("kernel", "kernel"), str(site)
(node,) = fused_nodes(new)
assert node.kwargs == {"forward": "kernel", "backward": "kernel", "save": True}
""",
    "an argument that Inductor would compute again is marked for it": """
def marked(fn, grad=True):
    shapes = (64, 4096), (4096,), (4096,)
    model = lambda x, w, b: fn(x, lambda h: F.layer_norm(h, (4096,), w, b))
    gm, new, record = run(model, *shapes, grad=grad, gate="always")
    assert any(s.fused and s.pattern == "layer_norm" for s in record.sites), record
    return [n.name for n in new.graph.nodes if n.meta.get("recompute") is not None]
def check(found, wanted):
    assert found == wanted, found
check(marked(lambda x, norm: norm(F.silu(x))), ["silu"])
check(marked(lambda x, norm: norm(F.gelu(x))), ["branchless_gelu_default"])
check(marked(lambda x, norm: norm(x.cos() * 2 + 1)), ["cos", "mul", "add"])
check(marked(lambda x, norm: norm(F.silu(x)) + F.silu(x).sin()), ["silu"])
check(marked(lambda x, norm: norm(x.relu())), [])  # its own result is kept in any case
check(marked(lambda x, norm: norm(x * 2)), [])
check(marked(lambda x, norm: norm(x)), [])
def product(x, norm):
    h = x.cos()
    return norm(h) @ (h.t() @ h)  # kept for the product
check(marked(product), [])
check(marked(lambda x, norm: norm(x.detach().cos())), [])  # nothing is kept for it
check(marked(lambda x, norm: norm(F.silu(x)), grad=False), [])
# computed with its product, by one kernel, which backward is not to run once more
def activated(x, norm):
    return norm(F.gelu(F.linear(x, x.t() @ x)))
check(marked(activated), [])
gm, new, record = run(lambda x, w, b: activated(x, lambda h: norm(h, w, b)), (64, 4096), (4096,),
                      (4096,), grad=True, gate="always")
assert {s.pattern for s in record.sites if s.fused} == {"linear_act", "layer_norm"}, record
""",
    "kernels of channels, groups and rows of unit length are taken when asked for": """
plane, c = (4, 32, 16, 16), (32,)
for fn, shapes, backward in (
    (lambda x, w, b: F.silu(F.group_norm(x, 8, w, b)), (plane, c, c), "kernel"),
    (lambda x: F.normalize(x, dim=-1), ((64, 256),), "kernel"),
    (lambda x, m, v, w, b: F.relu(F.batch_norm(x, m.detach(), v.detach(), w, b)),
     (plane, c, c, c, c), "vjp"),
    (lambda x, b: F.gelu(x + b), ((64, 256), (256,)), "vjp"),
    (lambda x, b: F.silu(x + b[:, None, None]), (plane, c), "vjp"),
):
    for grad in (False, True):
        gm, new, record = run(fn, *shapes, grad=grad, gate="always")
        (site,) = (s for s in record.sites if s.fused)
        assert (site.forward, site.backward) == ("kernel", backward if grad else None), str(site)
        sites = run(fn, *shapes, grad=grad, skip=("gelu",))[2].sites
        reason = sites[0].reason
        sentences = "has not been timed", "as fast", "branchless gelu"
        told = any(words in reason for words in sentences)
        assert not any(s.fused for s in sites) and told, str(sites)
""",
    "next to a convolution a kernel of ours stands alone in any case": """
shapes = (64, 64, 1024), (64, 64, 1), (1024,), (1024,)
(site,) = run(lambda x, k, w, b: norm(F.conv1d(x, k), w, b), *shapes)[2].sites
assert site.forward == "kernel", str(site)
(site,) = run(lambda x, k, w, b: norm(F.conv1d(x, k).relu(), w, b), *shapes)[2].sites
assert "Inductor fuses it" in site.reason, str(site)
""",
    "attention with a bias runs kernels, forward and backward": """
shapes = (2, 4, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32), (1, 4, 64, 64)
def attention(q, k, v, bias):
    out = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    return out.transpose(1, 2).reshape(2, 64, 128)
for grad in (True, False):
    gm, new, record = run(attention, *shapes, grad=grad, gate="always")
    (site,) = record.sites
    wanted = "kernel", "kernel" if grad else None
    assert site.fused and (site.forward, site.backward) == wanted, str(site)
    (node,) = fused_nodes(new)
    assert str(node.target) == "fusion.masked_attention.default" and node.kwargs["save"] is grad
    # all that is saved besides the result
    assert node.meta["example_value"][1].numel() == (2 * 4 * 2 * 64 if grad else 0)
    assert [str(a) for a in node.args] == ["q", "k", "v", "bias", *["None"] * 5]
drops = lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias, 0.1, enable_gqa=True)
gm, new, record = run(drops, *shapes, grad=True, gate="always")
seed = fused_nodes(new)[0].args[6]
assert record.sites[0].fused and seed.target is torch.ops.aten.randint.low, record
gm, new, record = run(attention, *shapes, grad=True)
assert not record.sites[0].fused and "has not been timed" in record.sites[0].reason, record
shapes = [(*s[:3], 300) for s in shapes[:3]] + [shapes[3]]
wide = lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
gm, new, record = run(wide, *shapes, gate="always")
(site,) = record.sites
assert not site.fused and "heads of 300; the kernel takes 16 to 256" in site.reason, record
""",
    "the last linear layer and its loss, with a bias and without": """
for bias in (False, True):
    def loss(x, w, b):
        logits = x @ w + b if bias else x @ w
        return F.cross_entropy(logits, (x.sum(1) > 0).long()) + b.sum()
    record = run(loss, (512, 64), (64, 1024), (1024,), grad=True, gate="always")[2]
    (site,) = (s for s in record.sites if s.pattern == "linear_cross_entropy")
    assert site.fused and (site.forward, site.backward) == ("kernel", "kernel"), str(site)
""",
    "a norm of embeddings is left to Inductor in training, whole": """
def model(ids, words, places, w, b):
    return norm(F.embedding(ids.long(), words) + F.embedding(ids.long() * 0, places), w, b)
shapes = (64, 128), (500, 1024), (2, 1024), (1024,), (1024,)
def told(fn, **how):
    sites = run(fn, *shapes, **how)[2].sites
    return [(s.fused, "gradient with that of the embedding" in s.reason) for s in sites]
def check(found, wanted):
    assert found == wanted, found
check(told(model, grad=True), [(False, True)] * 2)  # with its sum, and alone
check(any(no for _, no in told(model)), False)
# the sum has a reader besides the norm, and its gradients are added up
def before(ids, words, places, w, b):
    h = F.embedding(ids.long(), words) + F.embedding(ids[:1].long() * 0, places)
    return norm(h, w, b) + h * 2
check(any(no for _, no in told(before, grad=True)), False)
def features(ids, words, places, w, b):  # one summand is no embedding
    return norm(F.embedding(ids.long(), words) + ids[:1, :, None] @ w[None], w, b)
check(any(no for _, no in told(features, grad=True)), False)
check(told(model, grad=True, gate="always")[0], (True, False))
""",
    "inference saves nothing": """
shapes = (64, 4096), (4096,), (4096,)
gm, new, record = run(lambda x, w, b: F.layer_norm(x, (4096,), w, b), *shapes, gate="always")
(node,) = fused_nodes(new)
assert node.kwargs["save"] is False and record.sites[0].backward is None
""",
    "a guard's sentence is the reason": """
double = dict(dtype=torch.float64, gate="always")
gm, new, record = run(lambda x, y: torch.exp((x + y) * 2), (8, 8), (8, 8), **double)
assert new is gm and "float64" in record.sites[0].reason, record
""",
    "a kernel that fails is refused with a warning that names the pattern": """
@Pattern
def doubled_cosine(x: Tensor) -> Tensor:
    return torch.cos(x) * 2
@doubled_cosine.kernel
def _(x):
    raise RuntimeError("no such instruction")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    gm, new, record = run(lambda x: x.cos() * 2, (8, 8))
assert new is gm and "no such instruction" in record.sites[0].reason, record
assert [w for w in caught if "doubled_cosine" in str(w.message)], caught
""",
    "a guard or worthwhile that answers anything else refuses its sites with a warning": """
@Pattern
def doubled_sign(x: Tensor) -> Tensor:
    return torch.sign(x) * 2
@doubled_sign.kernel
def _(x):
    return torch.empty_like(x)
answers = []
doubled_sign.guard(lambda x: answers[0])
doubled_sign.worthwhile(lambda x, training: answers[1])
def fused(*given, **options):
    answers[:] = given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fusion_backend.reset()
        (site,) = run(lambda x: x.sign() * 2, (8, 8), **options)[2].sites
    assert site.fused or site.reason in str(caught[0].message), (site, caught)
    return site.fused or site.reason
assert fused(None, None) is True
assert "its guard at line 9 returned False" in fused(False, None)
assert "its guard at line 9 returned 'too small'" in fused("too small", None, gate="always")
assert "its worthwhile at line 10 returned True" in fused(None, True)
assert fused(None, True, gate="always") is True
""",
    "worthwhile may ask for the backward alone": """
@Pattern
def doubled_sine(x: Tensor) -> Tensor:
    return torch.sin(x) * 2
@doubled_sine.worthwhile
def _(x, training):
    return BackwardOnly("Inductor is as fast")
@doubled_sine.kernel
def _(x):
    return torch.empty_like(x)
@doubled_sine.backward
def _(saved, dy):
    return dy * saved.x.cos() * 2
gm, new, record = run(lambda x: x.sin() * 2, (8, 8), grad=True)
(site,) = record.sites
assert (site.forward, site.backward) == ("reference", "kernel"), str(site)
assert "as fast" in site.reason, str(site)
gm, new, record = run(lambda x: x.sin() * 2, (8, 8))
assert new is gm and record.sites[0].reason == "Inductor is as fast"
""",
    "a result with other strides is not copied before that was measured": """
@Pattern
def doubled_tangent(x: Tensor) -> Tensor:
    return torch.tan(x) * 2
@doubled_tangent.kernel
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).mT.contiguous().mT
fn = lambda x: x.tan() * 2
from unittest import mock
from fusion_backend.measure.judge import Judge
for asked in (True, False):
    with mock.patch.object(Judge, "active", asked):
        gm, new, record = run(fn, (8, 4))
    assert new is gm and "would be copied, for the strides" in record.sites[0].reason, record
gm, new, record = run(fn, (8, 4), gate="always")
assert record.sites[0].fused and "clone" in graph_text(new), record
(value,) = [n.meta["example_value"] for n in new.graph.nodes if "clone" in str(n.target)]
assert value.stride() == (4, 1)
""",
    "pointwise patterns stand back where Inductor fuses their neighbours": """
@Pattern(inductor="pointwise")
def tangent_of_sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.tan(x + y)
@tangent_of_sum.kernel
def _(x, y):
    return torch.empty_like(x)
def alone(x, y):
    return torch.tan(x + y)
def between(x, y):
    return torch.tan(x.sin() + y)
def before(x, y):
    return torch.tan(x + y).sum()
def after_a_product(x, y):
    return torch.tan(x @ y + y) @ x
for fn, taken in ((alone, True), (between, False), (before, False), (after_a_product, True)):
    gm, new, record = run(fn, (8, 8), (8, 8))
    (site,) = [s for s in record.sites if s.pattern == "tangent_of_sum"]
    assert site.fused is taken and (taken or "neighbour" in site.reason), str(site)
gm, new, record = run(alone, (8, 8), (8, 8), grad=True)
assert new is gm and "in training" in record.sites[0].reason
gm, new, record = run(lambda x, y: torch.exp((x + y) * 2), (8, 8), (8, 8), grad=True, gate="always")
assert record.sites[0].backward == "formula"
gm, new, record = run(lambda x, y: torch.exp((x + y) * 2), (8, 8), (8, 8))
assert new is gm and "benchmarks/results" in record.sites[0].reason
""",
    "a norm next to pointwise code keeps its backward kernel": """
def block(x, w, b):
    return F.layer_norm(x.sin(), (1024,), w, b) @ w[:, None]
shapes = (1024, 1024), (1024,), (1024,)
gm, new, record = run(block, *shapes, grad=True)
(site,) = [s for s in record.sites if s.pattern == "layer_norm"]
assert (site.forward, site.backward) == ("reference", "kernel"), str(site)
assert "neighbour" in site.reason, str(site)
gm, new, record = run(block, *shapes)
assert new is gm
def norm_product(x, w, b):
    return F.layer_norm(x, (1024,), w, b) @ w[:, None]
gm, new, record = run(norm_product, *shapes, grad=True)
(site,) = [s for s in record.sites if s.pattern == "layer_norm"]
assert (site.forward, site.backward) == ("kernel", "kernel"), str(site)
""",
    "softmax next to pointwise code is left whole to Inductor, unless that code is its mask": """
def decided(fn, *shapes):
    sites = run(fn, *shapes, grad=True)[2].sites
    return [(s.fused, s.forward, s.reason) for s in sites]
((fused, _, reason),) = decided(lambda x: (x.sin().softmax(-1)), (16384, 4096))
assert not fused and reason.startswith("Inductor fuses it with its neighbour"), reason
((fused, forward, _),) = decided(lambda x: x.softmax(-1), (16384, 4096))
assert fused and forward == "kernel"
def scores(q, k, mask):
    return (q @ k.mT * 0.125 + mask).softmax(-1)
sites = decided(scores, (4, 32, 2048, 64), (4, 32, 2048, 64), (4, 1, 2048, 2048))
assert [s[:2] for s in sites if s[0]] == [(True, "kernel")], sites
sites = decided(scores, (1, 2, 512, 64), (1, 2, 512, 64), (1, 1, 512, 512))
assert not any(s[0] for s in sites) and any("has not been timed" in s[2] for s in sites), sites
""",
    "dropout draws a seed for each site, and is refused without a seeded reference": """
site = lambda x, r: F.dropout(F.dropout(x, 0.1, True) + r, 0.2, True) + r
gm, new, record = run(site, (64, 64), (64, 64), grad=True, gate="always")
found = [(s.pattern, s.forward, s.backward) for s in record.sites if s.fused]
assert found == [("dropout_add", "kernel", "kernel")] * 2, record
draws = [n for n in new.graph.nodes if n.target is torch.ops.aten.randint.low]
assert [n.args[-1] for n in fused_nodes(new)] == draws and len(set(draws)) == 2
gm, new, record = run(site, (64, 64), (64, 64), grad=True)
assert new is gm and "has not been timed" in record.sites[0].reason, record
pattern = next(p for p in patterns() if p.name == "dropout_add")
seeded, pattern.seeded_fn = pattern.seeded_fn, None
gm, new, record = run(site, (64, 64), (64, 64), grad=True, gate="always")
pattern.seeded_fn = seeded
assert new is gm and "no seeded reference" in record.sites[0].reason, record
""",
    "the five kernels take ordinary inputs": """
for fn, shapes, name in (
    (lambda x, y, z: (x + y) * z, [(64, 64)] * 3, "add_mul"),
    (lambda x, y: torch.exp((x + y) * 2), [(64, 64)] * 2, "add_mul_exp"),
    (lambda x: torch.clamp(torch.round(x / 0.1 + 3.0), -128, 127).to(torch.int8),
     [(64, 64)], "quantize_int8"),
    (lambda x, w, b: F.layer_norm(x, (64,), w, b), [(64, 64), (64,), (64,)], "layer_norm"),
    (lambda x, a, b, c, d: torch.sigmoid(F.linear(x, a, b)) * F.linear(x, c, d),
     [(2, 64, 64), (128, 64), (128,), (128, 64), (128,)], "gated_linear"),
):
    for grad in (False, name != "quantize_int8"):
        gm, new, record = run(fn, *shapes, grad=grad, gate="always")
        by_kernel = [s.pattern for s in record.sites if s.fused and s.forward == "kernel"]
        assert by_kernel == [name], record
""",
}


def outcomes_of(cases: dict[str, str]) -> dict[str, str]:
    """Run all cases in one process; a case's outcome is its traceback, or nothing."""
    loop = "\n".join(
        [
            PRELUDE,
            "import json, sys, traceback",
            "outcomes = {}",
            "for name, case in json.load(sys.stdin).items():",
            "    try:",
            "        exec(case, dict(globals()))",
            "        outcomes[name] = ''",
            "    except Exception:",
            "        outcomes[name] = traceback.format_exc()",
            "print(json.dumps(outcomes))",
        ]
    )
    return json.loads(output_of("-c", loop, given=json.dumps(cases)).splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes():
    return outcomes_of(CASES)


@pytest.mark.parametrize("case", CASES)
def test_decision(outcomes, case):
    assert not outcomes[case], outcomes[case]
