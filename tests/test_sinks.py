"""Attention with sinks, one score more in each row whose weight is dropped, as gpt-oss has it: what
is found, what comes close and stays, and value and gradients against fp64.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import fusion_backend.decide.gate
from fusion_backend.kernels.attention import forward
from fusion_backend.kernels.attention.masking import Masking
from fusion_backend.testing import collect, fused_nodes
from tests.kernel_checks import DEVICE, distance, randn
from tests.measured_cases import regions_of
from tests.test_attention import repeat_kv
from tests.test_attention_forms import causal, hidden, padded, scores
from tests.test_flash import NAMES, becomes_masked_attention, compiled_agrees

pytestmark = [
    pytest.mark.usefixtures("poisoned_empties"),
    pytest.mark.skipif(DEVICE == "cuda", reason="these decisions are for fake tensors"),
]
B, H, S, D = 2, 2, 30, 16
EMPTY = (torch.arange(S) < torch.tensor([[0], [21]])).long()  # the first text has no token


def weights(s, sinks, dtype=None):
    """As transformers writes them."""
    column = sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[-2], -1)
    both = torch.cat([s, column], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return F.softmax(both, dim=-1, dtype=dtype or both.dtype)[..., :-1]


def window(n=S, size=7):
    return causal(n) & ~causal(n).tril(-size)


# name -> the function of q, k, v, a bias and the sinks; what masked_attention is told; its operands
# besides q, k, v and the sinks.
TAKEN = {
    "without a mask": (lambda q, k, v, x, s: weights(scores(q, k), s) @ v, dict(low=None), ()),
    "causal": (
        lambda q, k, v, x, s: weights(scores(q, k) + hidden(causal()), s) @ v,
        dict(low=0, high=None, hidden="zero"), ()),
    "a window, in fp32": (
        lambda q, k, v, x, s: weights(
            scores(q, k) + hidden(window()), s, torch.promote_types(q.dtype, torch.float32)
        ) @ v,
        dict(low=0, high=6, hidden="zero"), ()),
    "without the maximum": (
        lambda q, k, v, x, s: torch.softmax(
            torch.cat((scores(q, k) + hidden(causal()), s[:, None, None].expand(B, H, S, 1)), -1),
            -1)[..., :-1] @ v,
        dict(low=0), ()),
    "in front": (
        lambda q, k, v, x, s: torch.softmax(
            torch.cat((s[:, None, None].expand(B, H, S, 1), scores(q, k)), -1), -1)[..., 1:] @ v,
        dict(low=None), ()),
    "of each row": (
        lambda q, k, v, x, s: torch.softmax(
            torch.cat((scores(q, k), x[..., :1].expand(B, H, S, 1)), -1), -1).narrow(-1, 0, S) @ v,
        dict(low=None), ()),
    "filled": (
        lambda q, k, v, x, s: weights(scores(q, k).masked_fill(~window(), -math.inf), s) @ v,
        dict(low=0, high=6), ()),
    "a fill that scores may reach": (
        lambda q, k, v, x, s: weights(scores(q, k).masked_fill(~causal(), -2.0), s) @ v,
        dict(low=0, hidden="fill", fill=-2.0), ()),
    "padding, and a text of nothing else": (
        lambda q, k, v, x, s: weights(scores(q, k) + padded(EMPTY), s) @ v,
        dict(low=None, hidden="zero"), ("keys",)),
    "a bias": (lambda q, k, v, x, s: weights(scores(q, k) + x, s) @ v, dict(low=None), ("bias",)),
    "a bias and a causal mask": (
        lambda q, k, v, x, s: weights(scores(q, k) + (x + hidden(causal())), s) @ v,
        dict(low=0), ("bias",)),
}  # fmt: skip


def inputs_of(kv=H):
    sizes = (H, S, D), (kv, S, D), (kv, S, D), (H, S, S)
    return [randn(1 if size[-1] == S else B, *size) for size in sizes] + [randn(H)]


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    monkeypatch.setattr(fusion_backend.decide.gate, "on_gpu", lambda t: True)


@pytest.mark.parametrize("grad", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, grad, on_gpu):
    fn, options, operands = TAKEN[name]
    inputs = [t.requires_grad_(grad) for t in inputs_of()]
    collector = becomes_masked_attention(fn, inputs, options, {"sinks", *operands})
    compiled_agrees(fn, collector, inputs, grad)


def test_heads_are_not_repeated(on_gpu):
    def fn(q, k, v, x, sinks):
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        return weights(scores(q, k) + hidden(causal()), sinks) @ v

    inputs = inputs_of(kv=1)
    (node,) = fused_nodes(collect(fn, *inputs).graphs[0])
    assert [str(n) for n in node.args[1:3]] == ["l_k_", "l_v_"]  # as they are given


def test_dropout_is_after_the_sinks(on_gpu):
    """Its scale is that of the weights that are left, not of those that sum to 1."""

    def fn(q, k, v, x, sinks):
        return F.dropout(weights(scores(q, k), sinks), 0.3, True) @ v

    inputs = inputs_of()
    collector = collect(fn, *inputs)
    (node,) = fused_nodes(collector.graphs[0])
    assert node.kwargs["p"] == 0.3 and node.args[NAMES.index("sinks")] is not None
    inputs[2] = torch.ones_like(inputs[2])
    torch.compiler.reset()
    mean = torch.compile(fn, backend=collector)(*inputs).mean()
    q, k, v, x, sinks = inputs
    assert abs(mean - weights(scores(q, k), sinks).sum(-1).mean()) < 0.05


def test_it_can_be_measured_with_the_maximum_inside():
    """A maximum over a dimension gives integers too, which a region does not compute if somebody
    reads them.
    """
    _, (region,) = regions_of(TAKEN["causal"][0], *inputs_of(), only="attention")
    assert [d.match.pattern.name for d in region.sites] == ["attention"]
    assert not region.problem
    assert any(n.target is torch.ops.aten.max.dim for n in region.nodes)


def test_dynamic_lengths(on_gpu):
    def fn(q, k, v, x, sinks):
        return weights(scores(q, k), sinks) @ v

    inputs = inputs_of()
    for t in inputs[:3]:
        torch._dynamo.mark_dynamic(t, 2)
    collector = collect(fn, *inputs)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention" and not s.covered]
    assert site.fused and "with sinks" in site.reason, site
    torch.compiler.reset()
    compiled = torch.compile(fn, backend=collector, dynamic=True)
    for n in (S, 41):
        q, k, v, _, sinks = [*(randn(B, H, n, D) for _ in "qkv"), None, inputs[-1]]
        exactly = weights(scores(q.double(), k.double()), sinks.double()) @ v.double()
        assert distance(compiled(q, k, v, None, sinks), exactly) < 2e-5


def twice(s, sinks):
    return torch.cat((s, sinks[:, None, None].expand(*s.shape[:-1], 2)), -1)


NEAR_MISSES = {
    "the weight of the sink is kept": lambda q, k, v, s: torch.softmax(
        torch.cat((scores(q, k), s[:, None, None].expand(B, H, S, 1)), -1), -1
    ) @ torch.cat((v, v[..., :1, :]), -2),
    "the first key is dropped": lambda q, k, v, s: torch.softmax(
        torch.cat((scores(q, k), s[:, None, None].expand(B, H, S, 1)), -1), -1
    )[..., 1:] @ v,
    "two sinks, one of them kept": lambda q, k, v, s: torch.softmax(
        twice(scores(q, k), s), -1
    )[..., :-1] @ torch.cat((v, v[..., :1, :]), -2),
    "no softmax": lambda q, k, v, s: torch.cat(
        (scores(q, k), s[:, None, None].expand(B, H, S, 1)), -1
    )[..., :-1]
    @ v,
    "no softmax, in front": lambda q, k, v, s: torch.cat(
        (s[:, None, None].expand(B, H, S, 1), scores(q, k)), -1
    )[..., 1:]
    @ v,
    "dropped before the softmax": lambda q, k, v, s: torch.softmax(
        torch.cat((scores(q, k), s[:, None, None].expand(B, H, S, 1)), -1)[..., :-1] * 1.5, -1
    ) @ torch.cat((v[..., 1:, :], v[..., :1, :]), -2),
    "every other weight": lambda q, k, v, s: torch.softmax(
        torch.cat((scores(q, k), s[:, None, None].expand(B, H, S, 1)), -1), -1
    )[..., ::2] @ v[..., : S // 2 + 1, :],
    "softmax over the queries": lambda q, k, v, s: torch.softmax(
        torch.cat((scores(q, k), s[:, None, None].expand(B, H, S, 1)), -1), -2
    )[..., :-1] @ v,
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_comes_close_stays(name, on_gpu):
    inputs = [t for t in inputs_of() if t.shape[-1] != S]
    collector = collect(NEAR_MISSES[name], *inputs)
    assert not any(
        n.args[NAMES.index("sinks")] is not None
        for n in fused_nodes(collector.graphs[0])
        if str(n.target) == "fusion.masked_attention.default"
    )
    torch.compiler.reset()
    got = torch.compile(NEAR_MISSES[name], backend=collector)(*inputs)
    assert distance(got, NEAR_MISSES[name](*[t.double() for t in inputs])) < 2e-5


def test_weights_that_are_returned_stay(on_gpu):
    def fn(q, k, v, x, sinks):
        found = weights(scores(q, k), sinks)
        return found @ v, found

    report = collect(fn, *inputs_of()).report
    assert not any(s.fused for s in report.sites if s.pattern == "attention"), report


def test_a_least_sink_is_no_sink(on_gpu):
    """-inf has no weight."""
    fn = TAKEN["causal"][0]
    *inputs, sinks = inputs_of()
    sinks = torch.full_like(sinks, -math.inf)
    collector = collect(fn, *inputs, sinks)
    torch.compiler.reset()
    got = torch.compile(fn, backend=collector)(*inputs, sinks)
    exactly = torch.softmax(scores(*inputs[:2]) + hidden(causal()), -1) @ inputs[2]
    assert distance(got, exactly.double()) < 2e-5


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_gpt_oss(experts, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "GptOssConfig"):
        pytest.skip("has no gpt-oss")
    config = transformers.GptOssConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_local_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=99, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager", experts_implementation=experts,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    tokens = torch.randint(99, (2, 24))
    report = collect(lambda t: model(input_ids=t, use_cache=False).logits, tokens).report
    found = [s.reason for s in report.sites if s.pattern == "attention" and not s.covered]
    assert len(found) == 2 and all("with sinks" in reason for reason in found), report
    assert sum("window of 8 keys" in reason for reason in found) == 1, report


@pytest.mark.parametrize("grad", [False, True], ids=["infer", "train"])
def test_a_row_that_sees_no_key_is_0(grad, on_gpu):
    """The sink takes all its weight, beside the least number as in eager mode."""

    def fn(q, k, v, x, sinks):
        return weights(scores(q, k) + hidden(causal().tril(-3)), sinks) @ v

    inputs = [t.requires_grad_(grad) for t in inputs_of()]
    collector = collect(fn, *inputs)
    compiled_agrees(fn, collector, inputs, grad)
    got = torch.compile(fn, backend=collector)(*inputs)
    assert not got[:, :, :3].any() and got[:, :, 3:].ne(0).all()


def test_no_sink_and_no_key_is_nan():
    """In the kernel, as in eager mode, where -inf hides what is left."""
    q, k, v = inputs_of()[:3]
    sinks = torch.tensor([-math.inf, 0.0]).view(1, H, 1, 1)
    out, _ = forward.forward(q, k, v, Masking(low=5, hidden="nan", sinks=sinks, scale=0.25), False)
    assert out[:, 0, :5].isnan().all() and not out[:, 0, 5:].isnan().any()
    assert not out[:, 1].isnan().any() and not out[:, 1, :5].any()
    nobody = Masking(low=S, hidden="nan", sinks=sinks, scale=0.25)  # no block of keys is read
    out, _ = forward.forward(q, k, v, nobody, False)
    assert out[:, 0].isnan().all() and not out[:, 1].any()
