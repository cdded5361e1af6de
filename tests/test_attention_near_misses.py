"""What comes close to attention as other people write it, and stays: heads folded otherwise, other
axes, masks and factors, values that are used again or written to.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion_backend
import fusion_backend.decide.gate
from fusion_backend.capture.attention import brought_to_form
from fusion_backend.capture.tracer import capture
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import DEVICE, randn
from tests.test_attention_spellings import B, D, H, S, causal, joined, split

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="these decisions are for fake tensors")


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


def one(q, k):
    return q @ k.mT / 4


def folded(q, k):
    return torch.bmm(split(q), split(k).mT) / 4


# What is another function, or cannot be told: no attention is fused.
CLOSE = {
    "the softmax over the queries": ("one", lambda q, k, v: one(q, k).softmax(-2) @ v),
    "the softmax over the batch": ("one", lambda q, k, v: one(q, k).softmax(0) @ v),
    "the softmax over the batch, seen with heads": (
        "folded", lambda q, k, v: joined(torch.bmm(folded(q, k).softmax(0), split(v)))),
    "the softmax over the queries, seen with heads": (
        "folded", lambda q, k, v: joined(torch.bmm(folded(q, k).softmax(1), split(v)))),
    "the softmax over heads": (
        "folded", lambda q, k, v: joined(
            folded(q, k).view(B, H, S, S).softmax(1).view(B * H, S, S) @ split(v))),
    "other heads than were folded": (
        "folded", lambda q, k, v: joined(
            (folded(q, k).view(H, B, S, S) + causal()).transpose(0, 1).reshape(B * H, S, S)
            .softmax(-1) @ split(v))),
    "the mask after the softmax": (
        "one", lambda q, k, v: (one(q, k).softmax(-1) * causal()) @ v),
    "weights that are filled": (
        "one", lambda q, k, v: one(q, k).softmax(-1).masked_fill(~causal(), 0.0) @ v),
    "the weights are returned": (
        "one", lambda q, k, v: (lambda p: (p @ v, p))(one(q, k).softmax(-1))),
    "the folded weights are used again": (
        "folded", lambda q, k, v: (lambda p: joined(p @ split(v)) + p.sum())(
            folded(q, k).softmax(-1))),
    "the scores with heads are returned": (
        "folded", lambda q, k, v: (lambda s: (
            joined(s.view(B * H, S, S).softmax(-1) @ split(v)), s))(
                folded(q, k).view(B, H, S, S) + 1.0)),
    "scores that are written to": (
        "one", lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s.add_(1.0)))(one(q, k))),
    "k that is written to in between": (
        "one", lambda q, k, v: (lambda p: p @ (v + k.mul_(2)))(one(q, k).softmax(-1))),
    "the scale of a part": (
        "one", lambda q, k, v: (one(q, k)[..., :4] * 2).softmax(-1) @ v[:, :4]
        + (one(q, k)[..., 4:]).softmax(-1) @ v[:, 4:] * q.sum()),
    "the largest of other scores": (
        "one", lambda q, k, v: (one(q, k) - one(k, q).amax(-1, keepdim=True)).softmax(-1) @ v),
    "the largest of a column": (
        "one", lambda q, k, v: (lambda s: (s - s.amax(-2, keepdim=True)).softmax(-1) @ v)(
            one(q, k))),
    "the smallest": (
        "one", lambda q, k, v: (lambda s: (s - s.amin(-1, keepdim=True)).softmax(-1) @ v)(
            one(q, k))),
    "the largest added": (
        "one", lambda q, k, v: (lambda s: (s + s.amax(-1, keepdim=True) * s).softmax(-1) @ v)(
            one(q, k))),
    "a scale of each key after the mask": (
        "one", lambda q, k, v: (
            one(q, k).masked_fill(~causal(), -math.inf) * k.exp().sum(-1)[:, None]
        ).softmax(-1) @ v),
    "q that is written to before the factor": (
        "one", lambda q, k, v: (lambda s, w: ((s * w[:, :, :1]).softmax(-1) @ v))(
            q @ k.mT, q.mul_(2))),
    "a local q that is written to before the factor": (
        "one", lambda q, k, v: (lambda q: (
            lambda s, w: ((s * w[:, :, :1]).softmax(-1) @ v))(q @ k.mT, q.mul_(2)))(q + 1)),
    "a factor of each key, of as many as a head has numbers": (
        "one", lambda q, k, v: (q @ k[:, :D].mT * k[:, None, 0]).softmax(-1) @ v[:, :D]),
    "a factor of each key": (
        "one", lambda q, k, v: (one(q, k) * k.sum(-1)[:, None]).softmax(-1) @ v),
    "a factor that expands the scores": (
        "one", lambda q, k, v: ((q[:1] @ k[:1].mT) * q.sum(-1, True)).softmax(-1) @ v),
    "tempered scores that are returned": (
        "one", lambda q, k, v: (lambda s: ((s * q[:, :1, :1]).softmax(-1) @ v, s))(q @ k.mT)),
    "a factor in fp32": (
        "one", lambda q, k, v: (lambda s: (s * q.float().exp().sum(-1, True)).softmax(-1).to(
            v.dtype) @ v)((q @ k.mT).bfloat16()).float()),
    "dropout of the scores": (
        "one", lambda q, k, v: F.dropout(one(q, k), 0.5).softmax(-1) @ v),
    "two sums of weights": (
        "folded", lambda q, k, v: joined(
            (folded(q, k).softmax(-1) + folded(k, q).softmax(-1)) @ split(v))),
    "not scores": ("one", lambda q, k, v: (q + k).softmax(-1)[..., :S].mT @ v.exp()),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSE)
def test_what_comes_close(name, on_gpu):
    layout, fn = CLOSE[name]
    given = [randn(B, S, H * D if layout == "folded" else D) for _ in "qkv"]
    report = collect(fn, *given).report
    assert report.graphs and not any(g.error for g in report.graphs), report
    assert not [s for s in report.fused if s.pattern == "attention"], report
    assert all(s.reason for s in report.sites if s.pattern == "attention"), report


def test_fp32_scores_of_fp32_values_stay():
    """Only the scores are those of bf16: q and k were rounded to it before."""

    def fn(q, k, v):
        scores = q.float() @ k.float().mT
        return (scores / 4).softmax(-1) @ v.float()

    given = [randn(B, H, S, D, dtype=torch.bfloat16) for _ in "qkv"]
    collector = collect(fn, *given)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    (call,) = [n for n in collector.graphs[0].graph.nodes if "dot_product" in str(n.target)]
    assert site.fused and all(
        a.meta["example_value"].dtype == torch.float32 for a in call.args[:3]
    ), collector.report


def test_a_refused_site_leaves_the_graph_alone():
    """The view of one head is ours: the Dynamo graph is the same object where nothing is fused."""
    collector = collect(
        lambda q, k, v: one(q, k).softmax(-1) @ v[..., :8],
        *(randn(B, S, D) for _ in "qkv"),
        options={"fusion.gate": "auto"},
    )
    text = {str(n.target) for n in collector.graphs[0].graph.nodes}
    assert not [t for t in text if "unsqueeze" in t or "squeeze" in t], text
    names = [s.pattern for s in collector.report.sites]
    assert sorted(names) == ["attention", "softmax"], "no pattern starts at the nodes for the head"
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert not site.fused and "needs CUDA" in site.reason


@pytest.mark.parametrize("part", [False, True])
def test_a_result_that_is_written_to(part, eager_kernels):
    """The backward of SDPA reads its result, which that of a matrix product does not. A write to
    all of it makes another value in the rewritten graph.
    """

    def fn(q, k, v):
        out = one(q, k).softmax(-1) @ v
        total = 3 * out.sum()
        if part:
            out[:, 1:] = 2.0
        else:
            out.mul_(2.0)
        return total + out.square().sum()

    heads = (H,) if part else ()  # a head is added only where all of the result is written to
    given = [randn(B, *heads, S, D).requires_grad_() for _ in "qkv"]
    compiled = torch.compile(fn, backend="fusion", options={"fusion.gate": "always"})
    got = torch.autograd.grad(compiled(*given), given)
    torch.testing.assert_close(got, torch.autograd.grad(fn(*given), given))
    (graph,) = fusion_backend.report().graphs
    (site,) = [s for s in graph.sites if s.pattern == "attention"]
    assert (site.forward == "library") != part and not graph.error, graph
    assert ("is written to afterwards" in site.reason) == part, graph


def test_one_product_in_fp32_stays_in_fp32():
    """Only next to a product of 16 bits are the operands taken before their cast."""

    def fn(x, w):
        return F.relu(F.linear(x.float(), w.float())).to(x.dtype)

    inputs = [randn(*shape, dtype=torch.bfloat16) for shape in ((6, 16), (8, 16))]
    (node,) = fused_nodes(collect(fn, *inputs).graphs[0])
    read = [a.meta["example_value"].dtype for a in node.all_input_nodes]
    assert read == [torch.float32] * 2, node


@pytest.mark.parametrize("scores", [True, False])
def test_the_view_has_a_head_where_there_are_scores(scores):
    found = []

    def backend(gm, inputs):
        view = capture(gm)
        brought_to_form(view)
        found.extend(n for n in view.graph.nodes if str(n.target) == "aten.unsqueeze.default")
        return gm

    torch.compiler.reset()
    x, v = randn(B, S, S), randn(B, S, D)
    fn = (
        (lambda x, v: one(x, x).softmax(-1) @ v)
        if scores
        else (lambda x, v: x.sin().softmax(-1) @ v)
    )
    torch.compile(fn, backend=backend)(x, v)
    assert len(found) == 2 * scores


@pytest.mark.parametrize("d, found", [(256, True), (257, False)])
def test_heads_that_no_fused_kernel_of_sdpa_takes(d, found):
    """With one head, and with a factor of each query."""

    def single(q, k, v):
        return one(q, k).softmax(-1) @ v

    def tempered(q, k, v, t):
        return ((q @ k.mT) * t).softmax(-1) @ v

    q, k, v = (torch.randn(2, 3, 8, d) for _ in range(3))
    for fn, inputs in ((single, (q[0], k[0], v[0])), (tempered, (q, k, v, torch.rand(3, 1, 1)))):
        sites = collect(fn, *inputs, options={"fusion.gate": "table"}).report.sites
        assert ("attention" in {s.pattern for s in sites if s.fused}) is found


def test_a_product_with_a_dtype_for_its_result_is_left_alone():
    """It has a third argument, which is no tensor. Only GPUs have this product."""
    seen = []

    def backend(gm, inputs):
        view = capture(gm)
        for n in view.graph.nodes:
            if str(n.target) == "aten.bmm.default":
                n.args = (*n.args, torch.float32)
        before = [str(n.target) for n in view.graph.nodes]
        brought_to_form(view)
        seen.append(before == [str(n.target) for n in view.graph.nodes])
        return gm

    def scaled(q, k):
        return (torch.bmm(q, k.mT) * q.mean() + 1).softmax(-1)

    def weighed(q, k, v):
        return torch.bmm((q @ k.mT).softmax(-1), v)

    for fn, count in ((scaled, 2), (weighed, 3)):
        torch.compiler.reset()
        torch.compile(fn, backend=backend)(*(randn(B, S, D) for _ in range(count)))
    assert seen == [True, True]


def test_values_in_fp32_are_not_rounded(on_gpu):
    """The weights of this attention are not rounded either."""

    def attention(q, k, v, cast):
        weights = ((q.float() @ k.float().mT) / 4).softmax(-1)
        return (weights.to(v.dtype) @ v if cast else weights @ v.float()).bfloat16()

    q, k, v = (torch.randn(2, 3, 8, 16).bfloat16() for _ in range(3))
    for cast in (True, False):
        torch._dynamo.reset()
        found = collect(lambda *a, cast=cast: attention(*a, cast), q, k, v)
        (gm,) = found.graphs
        (node,) = (n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target))
        dtypes = {a.meta["example_value"].dtype for a in node.all_input_nodes}
        assert dtypes == {torch.bfloat16 if cast else torch.float32}
