"""Attention in windows with a mask of each, as Swin has it: what is found, what comes close and
stays, and value and gradients against fp64.
"""

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.decide.gate
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import DEVICE, distance, randn
from tests.test_flash import NAMES, compiled_agrees, gradients

pytestmark = [
    pytest.mark.usefixtures("poisoned_empties"),
    pytest.mark.skipif(DEVICE == "cuda", reason="these decisions are for fake tensors"),
]
B, W, H, S, D = 12, 3, 2, 9, 16  # four images of three windows


def scores(q, k):
    return (q * D**-0.5) @ k.transpose(-2, -1)


def apart(s, mask):
    """The windows of each image in a dimension of their own, with their masks."""
    return s.view(-1, mask.shape[0], *s.shape[1:]) + mask.unsqueeze(1).unsqueeze(0)


def together(s):
    return s.view(-1, *s.shape[2:])


def repeated(mask):
    """As transformers has it since its version 5."""
    five = mask.unsqueeze(1).unsqueeze(0).expand(B // W, -1, -1, -1, -1)
    return five.reshape(-1, 1, S, S)


# name -> the function of q, k, v, a bias and the masks; is there a bias?
TAKEN = {
    "repeated for each image, with the bias": (
        lambda q, k, v, x, m: F.scaled_dot_product_attention(q, k, v, x[None] + repeated(m)),
        True,
    ),
    "repeated for each image and head": (
        lambda q, k, v, x, m: F.scaled_dot_product_attention(
            q, k, v, x + m.view(1, W, 1, S, S).expand(B // W, -1, H, -1, -1).reshape(-1, H, S, S)
        ),
        True,
    ),
    "in five dimensions": (
        lambda q, k, v, x, m: torch.softmax(together(apart(scores(q, k) + x[None], m)), -1) @ v,
        True,
    ),
    "the softmax in five dimensions": (
        lambda q, k, v, x, m: together(torch.softmax(apart(scores(q, k) + x, m), -1)) @ v,
        True,
    ),
    "without a bias": (
        lambda q, k, v, x, m: torch.softmax(together(apart(scores(q, k), m)), -1) @ v,
        False,
    ),
    "added twice, as by Swin V2": (
        lambda q, k, v, x, m: (
            torch.softmax(together(apart(scores(q, k) + x, m) + m[None, :, None]), -1) @ v
        ),
        True,
    ),
    "added three times, the softmax in five dimensions": (
        lambda q, k, v, x, m: (
            together(torch.softmax(apart(scores(q, k), m) + m[None, :, None] + m[:, None], -1)) @ v
        ),
        False,
    ),
    "by index, first": (
        lambda q, k, v, x, m: (
            torch.softmax(
                (m[None, :, None] + (scores(q, k) + x).unflatten(0, (-1, W))).flatten(0, 1), -1
            )
            @ v
        ),
        True,
    ),
}


def inputs_of():
    return [*(randn(B, H, S, D) for _ in "qkv"), randn(H, S, S), randn(W, S, S)]


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


@pytest.mark.parametrize("grad", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, grad, on_gpu):
    fn, biased = TAKEN[name]
    inputs = [t.requires_grad_(grad) for t in inputs_of()]
    collector = collect(fn, *inputs)
    (node,) = fused_nodes(collector.graphs[0])
    assert str(node.target) == "fusion.masked_attention.default"
    given = {n for n, t in zip(NAMES, node.args, strict=True) if t is not None}
    assert given == {"q", "k", "v", "windows", *(["bias"] if biased else [])}
    compiled_agrees(fn, collector, inputs, grad)


def test_the_masks_alone_need_no_gradient(on_gpu):
    """As in Swin, where the bias is learned."""
    fn, _ = TAKEN["in five dimensions"]
    *inputs, mask = inputs_of()
    inputs = [t.requires_grad_() for t in inputs]
    collector = collect(fn, *inputs, mask)
    compiled = torch.compile(fn, backend=collector)
    exactly = gradients(lambda *t: fn(*t, mask.double()), [t.double() for t in inputs])
    for got, want in zip(gradients(lambda *t: compiled(*t, mask), inputs), exactly, strict=True):
        assert distance(got, want) < 2e-5


def test_masks_in_fp32(on_gpu):
    """Beside queries in bf16."""

    def fn(q, k, v, x, m):
        return torch.softmax(together(apart(scores(q, k) + x, m)), -1).to(v.dtype) @ v

    q, k, v, x, mask = inputs_of()
    narrow = [t.bfloat16() for t in (q, k, v)]
    collector = collect(fn, *narrow, x, mask)
    assert len(fused_nodes(collector.graphs[0])) == 1
    got = torch.compile(fn, backend=collector)(*narrow, x, mask)
    exactly = fn(*[t.double() for t in (*narrow, x, mask)])
    assert distance(got, exactly) < 2 * distance(fn(*narrow, x, mask), exactly) + 1e-3


def four(t):
    """Half as many batches of four heads."""
    return t.view(B // 2, 4, S, -1)


NEAR_MISSES = {
    "each repeated on its own": lambda q, k, v, x, m: F.scaled_dot_product_attention(
        q, k, v, x + m[:, None, None].expand(-1, B // W, 1, -1, -1).reshape(-1, 1, S, S)
    ),
    "one image after the other": lambda q, k, v, x, m: (
        torch.softmax((scores(q, k).view(W, -1, H, S, S) + m[:, None, None]).view(-1, H, S, S), -1)
        @ v
    ),
    "a mask of each head": lambda q, k, v, x, m: (
        torch.softmax((scores(q, k).view(B, H, 1, S, S) + x[None, :, None]).view(B, H, S, S), -1)
        @ v
    ),
    "a mask of each head, the softmax in five dimensions": lambda q, k, v, x, m: (
        torch.softmax(scores(q, k).unflatten(1, (H, 1)) + x[None, :, None], -1).view(B, H, S, S) @ v
    ),
    "a mask of two heads each": lambda q, k, v, x, m: (
        torch.softmax(
            (four(scores(q, k)).unflatten(1, (2, 2)) + x.view(1, 2, 1, S, S)).flatten(1, 2), -1
        )
        @ four(v)
    ),
    "seen as other windows": lambda q, k, v, x, m: (
        torch.softmax(
            (scores(q, k).view(-1, W, H, S, S) + m[None, :, None])
            .view(-1, S, H, S)
            .transpose(1, 2),
            -1,
        )
        @ v
    ),
    "softmax over the queries": lambda q, k, v, x, m: (
        together(torch.softmax(apart(scores(q, k), m), -2)) @ v
    ),
    "softmax over the windows": lambda q, k, v, x, m: (
        together(torch.softmax(apart(scores(q, k), m), 1)) @ v
    ),
    "two masks": lambda q, k, v, x, m: (
        torch.softmax(together(apart(scores(q, k), m) + m.exp()[None, :, None]), -1) @ v
    ),
    "two masks, the softmax in five dimensions": lambda q, k, v, x, m: (
        together(torch.softmax(apart(scores(q, k), m) + m.flip(0)[None, :, None], -1)) @ v
    ),
    "a mask of windows and one of heads": lambda q, k, v, x, m: (
        torch.softmax(together(apart(scores(q, k), m) + x[None, None]), -1) @ v
    ),
    "multiplied": lambda q, k, v, x, m: (
        torch.softmax(together(scores(q, k).view(-1, W, H, S, S) * m[None, :, None]), -1) @ v
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_comes_close_stays(name, on_gpu):
    fn, inputs = NEAR_MISSES[name], inputs_of()
    collector = collect(fn, *inputs)
    assert not any(
        n.args[NAMES.index("windows")] is not None
        for n in fused_nodes(collector.graphs[0])
        if str(n.target) == "fusion.masked_attention.default"
    )
    compiled_agrees(fn, collector, inputs, grad=False)


@pytest.mark.parametrize("windows", [1, B])
def test_one_window_or_one_image(windows, on_gpu):
    fn, _ = TAKEN["in five dimensions"]
    inputs = [t.requires_grad_() for t in (*inputs_of()[:4], randn(windows, S, S))]
    collector = collect(fn, *inputs)
    assert len(fused_nodes(collector.graphs[0])) == 1
    compiled_agrees(fn, collector, inputs)


def test_batches_of_other_sizes_are_two_sites(on_gpu):
    """The masks repeated for two images are another value than those repeated for four."""

    def fn(q, k, v, x, m):
        def attend(n):
            five = m.unsqueeze(1).unsqueeze(0).expand(n // W, -1, -1, -1, -1)
            mask = x[None] + five.reshape(-1, 1, S, S)
            return F.scaled_dot_product_attention(q[:n], k[:n], v[:n], mask)

        return attend(B), attend(B // 2)

    inputs = inputs_of()
    collector = collect(fn, *inputs)
    assert len(fused_nodes(collector.graphs[0])) == 2, collector.report
    got, exactly = torch.compile(fn, backend=collector)(*inputs), fn(*[t.double() for t in inputs])
    assert all(distance(g, want) < 2e-5 for g, want in zip(got, exactly, strict=True))


def test_dropout(on_gpu):
    def fn(q, k, v, x, m):
        weights = torch.softmax(together(apart(scores(q, k) + x, m)), -1)
        return F.dropout(weights, 0.25, True) @ v

    inputs = inputs_of()
    (node,) = fused_nodes(collect(fn, *inputs).graphs[0])
    assert node.kwargs["p"] == 0.25 and node.args[NAMES.index("windows")] is not None


def test_swin():
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[4, 1], num_heads=[1, 2], window_size=4
    )
    model = transformers.SwinModel(config, add_pooling_layer=False).eval()
    report = collect(lambda x: model(x).last_hidden_state, torch.randn(2, 3, 32, 32)).report
    found = [s.reason for s in report.sites if s.pattern == "attention" and not s.covered]
    # the repeated masks of two layers are one value
    assert len(found) == 5 and sum("masks of 16 windows" in why for why in found) == 2, report


def test_swin_v2():
    """Cosine attention with a scale of each head; its masks are added twice."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Swinv2Config(
        image_size=16, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4
    )
    model = transformers.Swinv2Model(config, add_pooling_layer=False).eval()
    report = collect(lambda x: model(x).last_hidden_state, torch.randn(2, 3, 16, 16)).report
    found = [s.reason for s in report.sites if s.pattern == "attention" and not s.covered]
    assert len(found) == 2 and sum("masks of 4 windows" in why for why in found) == 1, report
