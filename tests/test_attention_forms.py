"""Forms of attention that masked_attention takes: capped scores, a bias under a mask, added
padding. The graph that the gate decides on as on a GPU, its kernels interpreted, against fp64; and
what comes close and stays.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.decide.gate
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import DEVICE, distance, randn
from tests.test_flash import gradients

pytestmark = [
    pytest.mark.usefixtures("poisoned_empties"),
    pytest.mark.skipif(DEVICE == "cuda", reason="these decisions are for fake tensors"),
]
B, H, S, D = 2, 2, 30, 16
LEAST = torch.finfo(torch.float32).min
PADDING = (torch.arange(S) < torch.tensor([[21], [30]])).long()
EMPTY = PADDING * torch.tensor([[0], [1]])  # nothing but padding in the first batch
VECTOR = 3 * torch.randn(B, 1, 1, S)
sdpa = F.scaled_dot_product_attention


def causal(n=S, m=S):
    return torch.arange(m) <= torch.arange(n)[:, None]


def scores(q, k, cap=None, scale=0.25):
    s = q @ k.mT * scale
    return s if cap is None else torch.tanh(s / cap) * cap


def attend(s, v):
    return torch.softmax(s, -1) @ v


def hidden(keep, fill=LEAST):
    return torch.where(keep, 0.0, fill)


def padded(real):
    return hidden(real[:, None, None, :].bool()).expand(-1, 1, S, -1)


# name -> the function of q, k, v and a bias; what masked_attention is told; its operands besides q,
# k and v.
TAKEN = {
    "capped": (lambda q, k, v, x: attend(scores(q, k, 2.0), v), dict(cap=2.0, scale=0.25, low=None),
    ()),
    "capped, the scale in q": (
        lambda q, k, v, x: attend(scores(q * 0.25, k, 2.0, 1.0), v), dict(cap=2.0, scale=0.25), ()),
    "capped, one number for both": (
        lambda q, k, v, x: attend(3.0 * torch.tanh(q @ k.mT * 0.125), v),
        dict(cap=3.0, scale=0.375), ()),
    "capped at 1": (lambda q, k, v, x: attend(torch.tanh(q @ k.mT / 4), v),
    dict(cap=1.0, scale=0.25), ()),
    "capped by a negative number": (
        lambda q, k, v, x: attend(scores(q, k, -2.0), v), dict(cap=2.0, scale=0.25), ()),
    "capped, causal": (
        lambda q, k, v, x: attend(scores(q, k, 2.0) + hidden(causal()), v),
        dict(cap=2.0, low=0, hidden="zero"), ()),
    "capped, filled": (
        lambda q, k, v, x: attend(scores(q, k, 2.0).masked_fill(~causal(), -math.inf), v),
        dict(cap=2.0, low=0, hidden="zero"), ()),
    "capped, with a bias": (lambda q, k, v, x: attend(scores(q, k, 2.0) + x, v), dict(cap=2.0),
    ("bias",)),
    "capped, a window": (
        lambda q, k, v, x: attend(scores(q, k, 2.0) + hidden(causal() & ~causal().tril(-7)), v),
        dict(cap=2.0, low=0, high=6), ()),
    "a bias and a causal mask, added": (
        lambda q, k, v, x: attend(scores(q, k) + x + hidden(causal()), v),
        dict(low=0, hidden="zero"), ("bias",)),
    "a causal mask and a bias, added": (
        lambda q, k, v, x: attend(hidden(causal()) + (scores(q, k) + x), v),
        dict(low=0, hidden="zero"), ("bias",)),
    "a sum of a bias and a causal mask": (
        lambda q, k, v, x: sdpa(q, k, v, (x + hidden(causal())).contiguous()),
        dict(low=0, hidden="zero"), ("bias",)),
    "a bias where causal": (
        lambda q, k, v, x: sdpa(q, k, v, torch.where(causal(), x, LEAST).contiguous()), dict(low=0),
        ("bias",)),
    "a bias filled where not causal": (
        lambda q, k, v, x: sdpa(q, k, v, x.masked_fill(~causal(), -math.inf)), dict(low=0),
        ("bias",)),
    "a bias under a filled mask": (
        lambda q, k, v, x: attend((scores(q, k) + x).masked_fill(~causal(), -1e9), v), dict(low=0),
        ("bias",)),
    # What a row that sees nothing becomes does not fit: the mask is added as it is.
    "padding by -1e9": (
        lambda q, k, v, x: attend(scores(q, k) + hidden(PADDING[:, None, None, :].bool(), -1e9), v),
        dict(hidden="zero", low=None), ("bias",)),
    "a sum of a bias and padding by -1e9": (
        lambda q, k, v, x: sdpa(q, k, v, x + hidden(PADDING[:, None, None, :].bool(), -1e9)),
        dict(hidden="zero", padded="added"), ("bias", "keys")),
    "a bias and a vector over the keys": (
        lambda q, k, v, x: attend(scores(q, k) + x + VECTOR.detach(), v), dict(padded="added"),
        ("bias", "keys")),
    "two numbers that hide": (
        lambda q, k, v, x: attend(scores(q,
        k) + (hidden(causal()) + hidden(PADDING[:, None, None].bool(), -1e30)), v),
        dict(hidden="zero", low=None, padded="added"), ("bias", "keys")),
    "a bias where the causal part is small": (
        lambda q, k, v, x: sdpa(q, k, v, torch.where(causal(), x, -3.0)), dict(low=None),
        ("bias",)),
    "the bias where not causal": (
        lambda q, k, v, x: sdpa(q, k, v, torch.where(causal(), LEAST, x).tril(-1) + x),
        dict(low=None), ("bias",)),
}  # fmt: skip

# Without gradients: those of a row that sees nothing are others than under a fill.
INFERENCE = {
    "a bias and padding, added": (
        lambda q, k, v, x: attend(scores(q, k) + x + padded(PADDING), v), ("bias", "keys")),
    "added padding": (lambda q, k, v, x: attend(scores(q, k) + padded(PADDING), v), ("keys",)),
    "added padding of everything": (lambda q, k, v, x: attend(scores(q, k) + padded(EMPTY), v),
    ("keys",)),
    "padding and causal, added as one": (
        lambda q, k, v, x: attend(scores(q, k) + hidden(causal() & EMPTY[:, None, None, :].bool()),
        v), ("keys",)),
    "zeros and padding, added": (
        lambda q, k, v, x: attend(scores(q, k) + torch.zeros(1, 1, S, S) + padded(PADDING), v),
        ("keys",)),
}  # fmt: skip


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


def inputs_of(h=H):
    q, k, v = (randn(B, S, h, D).transpose(1, 2) for _ in "qkv")
    return [q, k, v, randn(1, h, S, S)]


def taken(fn, inputs):
    """The rewritten graph's call of masked_attention, its operands, and the backend."""
    collector = collect(fn, *inputs)
    (node,) = fused_nodes(collector.graphs[0])
    given = dict(zip(("bias", "keep", "keys"), node.args[3:6], strict=True))
    torch.compiler.reset()
    return node, {name for name, tensor in given.items() if tensor is not None}, collector


@pytest.mark.parametrize("name", INFERENCE)
def test_taken_without_gradients(name, on_gpu):
    fn, operands = INFERENCE[name]
    inputs = inputs_of()
    node, given, collector = taken(fn, inputs)
    assert (
        node.kwargs.items()
        >= dict(hidden="fill", fill=LEAST, low=0 if "causal" in name else None).items()
    )
    assert given == {*operands}
    exactly = fn(*[t.double() for t in inputs])
    assert distance(torch.compile(fn, backend=collector)(*inputs), exactly) < 2e-5
    report = collect(fn, *[t.requires_grad_() for t in inputs]).report
    (site,) = [s for s in report.sites if s.pattern == "attention"]
    assert site.fused, report  # padding is added then: what becomes of the row does not fit
    assert taken(fn, inputs)[1] == {"bias", *(["keys"] if "bias" in operands else [])}


@pytest.mark.parametrize("fill", [LEAST, -1e30])
def test_a_key_that_two_masks_hide_weighs_less(fill, on_gpu):
    """Than one that one of them hides, in a row that sees nothing: both numbers are added up."""
    left = torch.ones(B, S, dtype=torch.bool)
    left[1, :3] = False

    def fn(q, k, v):
        once = scores(q, k) + hidden(left[:, None, None, :], fill)
        return attend(once + hidden(causal(), fill), v)

    inputs = inputs_of()[:3]
    _, _, collector = taken(fn, inputs)
    exactly = fn(*[t.double() for t in inputs])
    assert distance(torch.compile(fn, backend=collector)(*inputs), exactly) < 2e-5


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, on_gpu):
    fn, options, operands = TAKEN[name]
    inputs = inputs_of()
    node, given, collector = taken(fn, [t.requires_grad_() for t in inputs])
    assert node.kwargs.items() >= {**options, "backward": "kernel", "save": True}.items(), (
        collector.report
    )
    assert given == {*operands}
    exactly = gradients(fn, [t.double() for t in inputs])
    got = gradients(torch.compile(fn, backend=collector), inputs)
    for g, w in zip(got, exactly, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            assert distance(g, w) < 2e-5


# What is another function, or cannot be told: no attention is fused.
CLOSE = {
    "the cap after the mask": lambda q, k, v, x: attend(
        torch.tanh((scores(q, k) + hidden(causal())) / 2) * 2, v
    ),
    "the cap of another tensor": lambda q, k, v, x: attend(torch.tanh(scores(q, k) / 2) * x, v),
    "a cap that is a tensor": lambda q, k, v, x: attend(scores(q, k, x[0, 0, 0, 0]), v),
    "the cap of a sum": lambda q, k, v, x: attend(torch.tanh(scores(q, k) + 1.0), v),
    "the tanh of half the scores": lambda q, k, v, x: attend(
        torch.tanh(scores(q, k) / 2) + scores(q, k) / 2, v
    ),
    "a sigmoid": lambda q, k, v, x: attend(torch.sigmoid(scores(q, k) / 2) * 2, v),
    "capped scores that are returned": lambda q, k, v, x: (lambda s: (attend(s, v), s))(
        scores(q, k, 2.0)
    ),
    "weights that are returned": lambda q, k, v, x: (lambda p: (p @ v, p))(
        torch.softmax(scores(q, k, 2.0), -1)
    ),
    "weights that are used again": lambda q, k, v, x: (lambda p: p @ v + p.sum())(
        torch.softmax(scores(q, k) + x, -1)
    ),
    "two biases": lambda q, k, v, x: attend(scores(q, k) + x + x.mT, v),
}


@pytest.mark.parametrize("name", CLOSE)
def test_what_comes_close(name, on_gpu):
    collector = collect(CLOSE[name], *[t.requires_grad_() for t in inputs_of()])
    report = collector.report
    assert report.graphs and not any(g.error for g in report.graphs), report
    assert not [s for s in report.fused if s.pattern == "attention"], report
    assert all(s.reason for s in report.sites if s.pattern == "attention"), report


FIVE = {
    "a bias and a vector": (lambda q, k, v, x: attend(scores(q, k) + VECTOR[None] + x, v), True),
    "a bias of four dimensions, causal": (
        lambda q, k, v, x: attend(scores(q, k) + x[0] + hidden(causal()), v), True),
    "a cap": (lambda q, k, v, x: attend(scores(q, k, 2.0), v), True),
    "nothing around": (lambda q, k, v, x: attend(scores(q, k), v), True),
    "two batches of batches": (
        lambda q, k, v, x: attend(scores(*(torch.cat((t, t)) for t in (q, k))) + x, v), False),
}  # fmt: skip


def test_five_dimensions(on_gpu):
    """As OpenFold has them, of which the first is 1."""
    for fn, fused in FIVE.values():
        inputs = [t.unsqueeze(0).requires_grad_() for t in inputs_of()]
        torch.compiler.reset()
        collector = collect(fn, *inputs)
        (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
        assert site.fused == fused and (fused or "four dimensions" in site.reason), site
        torch.compiler.reset()
        exactly = gradients(fn, [t.double() for t in inputs])
        got = gradients(torch.compile(fn, backend=collector), inputs)
        for g, w in zip(got, exactly, strict=True):
            assert (g is None) == (w is None) and (w is None or distance(g, w) < 2e-5)


def test_what_is_no_vector_beside_a_bias(on_gpu):
    """It has a gradient, or numbers for each head or query, or is a single one; and padding is one
    already.
    """
    pad = PADDING[:, None, None].bool()
    trained = dict(
        gradient=lambda q, k, v, x: attend(scores(q, k) + x + x[:, :1, :1].sin(), v),
        around=lambda q, k, v, x: attend(
            scores(q, k) + x + (x[:, :1, :1].sin() + hidden(pad, -1e9)), v
        ),
        view=lambda q, k, v, x: attend(
            scores(q[:, 0], k[:, 0]) + x[0, :1].detach() + x[:, 0, :, :1].mT, v[:, 0]
        ),
        heads=lambda q, k, v, x: attend(scores(q, k) + x + VECTOR * x.new_ones(H, 1, 1), v),
        queries=lambda q, k, v, x: attend(scores(q, k) + x + VECTOR.mT, v),
        number=lambda q, k, v, x: attend(scores(q, k) + x + VECTOR[0, 0, 0, 0], v),
    )

    def padding(q, k, v, x):
        return attend(scores(q, k) + (x + padded(PADDING)) + VECTOR, v)

    for fn in (*trained.values(), padding):
        inputs = [t.requires_grad_(fn is not padding) for t in inputs_of()]
        report = collect(fn, *inputs).report
        (site,) = [s for s in report.sites if s.pattern == "attention"]
        assert not site.fused and "only if it is a vector over the keys" in site.reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_mask_of_another_dtype(dtype):
    """Scores in fp32 because the mask is, weights cast back: the mask is dropped, and nothing is
    worse.
    """

    def fn(q, k, v):
        return torch.softmax(scores(q, k) + hidden(causal()), -1).to(v.dtype) @ v

    inputs = [t.to(dtype) for t in inputs_of()[:3]]
    torch.compiler.reset()
    collector = collect(fn, *inputs)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert site.forward == "library" and site.reason.startswith("causal"), site
    exactly = fn(*(t.double() for t in inputs))
    assert distance(torch.compile(fn, backend=collector)(*inputs), exactly) <= 2 * distance(
        fn(*inputs), exactly
    )


def test_a_bias_that_gets_no_gradient(on_gpu):
    """A mask made of it under no_grad is not taken apart: the bias itself would get one."""

    def fn(q, k, v, x):
        with torch.no_grad():
            mask = x.sin() + hidden(causal())
        return attend(scores(q, k) + mask, v) + x.sum()

    inputs = [t.requires_grad_() for t in inputs_of()]
    node, given, collector = taken(fn, inputs)
    assert node.kwargs["low"] == 0 and given == {"bias"}  # of x.sin(), which has none

    def direct(q, k, v, x):
        with torch.no_grad():
            mask = x + hidden(causal())
        return attend(scores(q, k) + mask, v)

    node, given, collector = taken(direct, inputs)
    assert node.kwargs["low"] is None and given == {"bias"}
    got, want = (gradients(f, inputs) for f in (torch.compile(direct, backend=collector), direct))
    assert got[-1] is want[-1] is None and all(
        distance(g, w) < 2e-5 for g, w in zip(got[:4], want[:4], strict=True)
    )


def test_a_bias_that_is_written_to(on_gpu):
    """Between the mask and the attention: what the mask was made of is another by then."""

    def fn(q, k, v, x):
        bias = x * 2
        mask = bias + hidden(causal())
        bias.mul_(0.5)
        return attend(scores(q, k) + mask, v), bias

    report = collect(fn, *inputs_of()).report
    (site,) = [s for s in report.sites if s.pattern == "attention"]
    assert not site.fused or "additive" in site.reason, site
    inputs = inputs_of()
    torch.compiler.reset()
    out, _ = torch.compile(fn, backend=collect(fn, *inputs))(*inputs)
    assert distance(out, fn(*(t.double() for t in inputs))[0]) < 2e-5


def test_a_mask_that_is_also_returned(on_gpu):
    """It stays in the graph, and the site is fused."""

    def fn(q, k, v, x):
        mask = x + hidden(causal())
        return attend(scores(q, k) + mask, v), mask

    inputs = inputs_of()
    node, given, collector = taken(fn, inputs)
    assert node.kwargs["low"] == 0 and given == {"bias"}
    out, mask = torch.compile(fn, backend=collector)(*inputs)
    assert (
        torch.equal(mask, fn(*inputs)[1])
        and distance(out, fn(*(t.double() for t in inputs))[0]) < 2e-5
    )
