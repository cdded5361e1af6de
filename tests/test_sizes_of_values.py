"""Attention whose values have heads of another size than queries and keys, as in DeepSeek's models:
the kernels, what is found, and value and gradients against fp64.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from fusion_backend.patterns.attention import rule

import fusion_backend.decide.gate
from fusion_backend.kernels.attention.forward import Masking
from fusion_backend.testing import collect
from tests.kernel_checks import DEVICE, randn, runs_kernels
from tests.selection import product
from tests.test_attention import repeat_kv
from tests.test_attention_forms import causal, hidden, scores
from tests.test_flash import SMALL, becomes_masked_attention, check, compiled_agrees, masks, qkv
from tests.test_sinks import weights, window

on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="these decisions are for fake tensors")
pytestmark = pytest.mark.usefixtures("poisoned_empties")
B, H, S, D, E = 2, 4, 30, 24, 16
REAL = torch.arange(S) < torch.tensor([[S], [21]])


@runs_kernels
@pytest.mark.parametrize("kind", masks(4, 4))
def test_masks(kind):
    check(*qkv(17, 40, 24, e=16), masks(17, 40)[kind])


@runs_kernels
@product(
    sizes=[(16, 24), (40, 17), (192, 128), (96, 64), (64, 200)],
    kind=["causal", "bias", "bias for all batches", "dropout"],
)
def test_head_sizes(sizes, kind):
    """Odd ones, larger values, and those of DeepSeek, in the tiles that the launcher chooses."""
    d, e = sizes
    dtype = torch.float32 if max(sizes) <= 128 else torch.float16
    check(*qkv(17, 40, d, e=e, dtype=dtype), masks(17, 40, dtype=dtype)[kind], config=None)


@runs_kernels
@pytest.mark.parametrize("kind", ["causal", "bias for all batches", "dropout", "sinks"])
def test_grouped_heads(kind):
    check(*qkv(17, 40, 24, h=4, kv=2, e=16), masks(17, 40, h=4)[kind])


@runs_kernels
@pytest.mark.parametrize("needs", [["q"], ["k"], ["v"], ["bias"]])
def test_only_wanted_gradients(needs):
    check(*qkv(17, 33, 40, e=16), Masking(bias=randn(1, 2, 17, 33)), needs=needs)


@runs_kernels
def test_layouts():
    """Values that are a part of a wider tensor, and expanded ones; heads last."""
    q, k, _ = qkv(20, 33, 24)
    wide = randn(2, 33, 2, 40).transpose(1, 2)
    out = check(q, k, wide[..., 24:], Masking(low=0))
    assert out.transpose(1, 2).is_contiguous()
    check(q, k, wide[:, :1, :, :16].expand(-1, 2, -1, -1), config=SMALL)


def sdpa(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


# name -> the function of q, k, v, a bias and sinks; what masked_attention is told; its operands
# besides q, k and v.
TAKEN = {
    "heads that are repeated": (
        lambda q, k, v, x, s: sdpa(
            q, repeat_kv(k[:, :2], 2), repeat_kv(v[:, :2], 2), is_causal=True),
        dict(low=0), ()),
    "no multiple of 8": (
        lambda q, k, v, x, s: sdpa(q[..., :22], k[..., :22], v, is_causal=True, scale=0.3),
        dict(low=0, scale=0.3), ()),
    "a window": (lambda q, k, v, x, s: sdpa(q, k, v, window()), dict(low=0, high=6), ()),
    "padding": (lambda q, k, v, x, s: sdpa(q, k, v, REAL[:, None, None]), dict(), ("keys",)),
    "a bias": (lambda q, k, v, x, s: sdpa(q, k, v, x), dict(low=None), ("bias",)),
    "capped": (
        lambda q, k, v, x, s: torch.softmax(torch.tanh(q @ k.mT / 20.0) * 20.0, -1) @ v,
        dict(cap=20.0), ()),
    "sinks and a window": (
        lambda q, k, v, x, s: weights(scores(q, k) + hidden(window()), s) @ v,
        dict(low=0, high=6), ("sinks",)),
}  # fmt: skip
# Of these SDPA has a fused kernel on GPUs.
CAUSAL = {
    "a mask": lambda q, k, v: sdpa(q, k, v, hidden(causal())),
    "written out": lambda q, k, v: torch.softmax(
        (q @ k.mT * D**-0.5).masked_fill(~causal(), -math.inf), -1) @ v,
}  # fmt: skip


def inputs_of():
    sizes = (B, H, S, D), (B, H, S, D), (B, H, S, E), (1, H, S, S), (H,)
    return [randn(*size) for size in sizes]


@pytest.fixture
def on_gpu(monkeypatch):
    """As if there were a GPU: the gate takes the kernels, which the interpreter then runs."""
    for module in (fusion_backend.decide.gate, rule):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)


@on_cpu
@pytest.mark.parametrize("grad", [False, True], ids=["infer", "train"])
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name, grad, on_gpu):
    fn, options, operands = TAKEN[name]
    inputs = [t.requires_grad_(grad) for t in inputs_of()]
    collector = becomes_masked_attention(fn, inputs, options, operands)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert "with values of 16" in site.reason
    compiled_agrees(fn, collector, inputs, grad)


@on_cpu
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_dropped(name, on_gpu):
    inputs = [t.requires_grad_() for t in inputs_of()[:3]]
    collector = collect(CAUSAL[name], *inputs)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert site.forward == "library" and site.reason.startswith("causal, proven from")
    compiled_agrees(CAUSAL[name], collector, inputs)


@on_cpu
def test_values_that_begin_anywhere_have_no_fused_kernel_of_sdpa(on_gpu):
    """Part of a wider tensor, not at a multiple of 16 bytes."""

    def fn(q, k, v):
        wide = torch.cat((k[..., :1], v, k[..., :7]), -1)
        return sdpa(q, k, wide[..., 1 : 1 + E], hidden(causal()))

    inputs = [t.requires_grad_() for t in inputs_of()[:3]]
    collector = collect(fn, *inputs)
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert site.forward == "kernel", site
    compiled_agrees(fn, collector, inputs)


@on_cpu
@pytest.mark.parametrize("name", CAUSAL)
def test_on_a_cpu_it_stays(name):
    """SDPA would compute the scores in memory there."""
    collector = collect(CAUSAL[name], *inputs_of()[:3], options={"fusion.gate": "auto"})
    (site,) = [s for s in collector.report.sites if s.pattern == "attention"]
    assert not site.fused and "needs CUDA" in site.reason


@on_cpu
def test_deepseek(on_gpu):
    """A model of transformers, in training."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2, q_lora_rank=32,
        kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config)
    ids = torch.randint(1, 97, (2, S))

    def step(ids):
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    collector = collect(step, ids, options={"fusion.only": "attention"})
    found = [s for s in collector.report.sites if s.pattern == "attention"]
    assert len(found) == 2 and all(s.fused for s in found), collector.report
    assert all(s.forward == "library" and s.reason.startswith("causal") for s in found)
    torch.testing.assert_close(torch.compile(step, backend=collector)(ids), step(ids))
