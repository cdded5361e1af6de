"""Ways of writing the catalogue's operations as models write them, each found as its pattern; the
rewrite agrees.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion_backend.frontends.explain import Collector
from fusion_backend.testing import collect

torch.manual_seed(0)
Q, K, V = (torch.randn(2, 4, 6, 8) for _ in range(3))
K2, V2 = K[:, :2].clone(), V[:, :2].clone()
MASK, KEEP = torch.randn(6, 6), torch.randn(6, 6) > -1
KEEP[:, 0] = True
COS, SIN = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
X, W, B = torch.randn(2, 6, 16), torch.randn(16, 24), torch.randn(24)
ROW = torch.randn(16)
TARGET = torch.randint(16, (2, 6))
TARGET[0, 0] = -100
CLASSES = torch.randint(4, (2, 6, 8))
LINEAR, PACKED, BARE = nn.Linear(16, 24), nn.Linear(16, 48), nn.Linear(16, 48, bias=False)
QX, QW = (
    torch.randint(-100, 100, (32, 16), dtype=torch.int8),
    torch.randint(-100, 100, (8, 16), dtype=torch.int8),
)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def repeat_kv(x, times):
    b, h, n, d = x.shape
    return x[:, :, None, :, :].expand(b, h, times, n, d).reshape(b, h * times, n, d)


def llama_norm(x, w):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def gemma_norm(x, w):
    h = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).type_as(x)


def t5_norm(x, w):
    return w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6))


def channels_first(x, w, b):
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    return w[:, None, None] * ((x - u) / torch.sqrt(s + 1e-6)) + b[:, None, None]


def per_token(y):
    scale = y.abs().amax(-1, keepdim=True) / 127
    return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


def new_gelu(x):
    return (
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    )


def new_gelu_upcast(x):
    """As under autocast on CUDA, which takes powers in fp32."""
    return (
        0.5
        * x
        * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x.float(), 3.0))))
    )


def masked_by_hand(q, k, v):
    with torch.no_grad():
        mask = torch.where(KEEP, 0.0, float("-inf"))
    return torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v


def halves(y, how):
    return {
        "chunk": lambda: y.chunk(2, -1),
        "split": lambda: y.split(24, dim=-1),
        "slice": lambda: (y[..., :24], y[..., 24:]),
    }[how]()


def gated(linear, how, swap=False):
    def run(x):
        a, b = halves(linear(x), how)
        return F.silu(b) * a if swap else F.silu(a) * b

    return run


FOUND = [
    ("rms_norm", "llama", llama_norm, (X, ROW)),
    ("rms_norm", "llama bf16", llama_norm, (X.bfloat16(), ROW.bfloat16())),
    ("rms_norm", "gemma", gemma_norm, (X, ROW)),
    ("rms_norm", "gemma bf16", gemma_norm, (X.bfloat16(), ROW.bfloat16())),
    ("rms_norm", "t5", t5_norm, (X, ROW)),
    ("rms_norm", "module", nn.RMSNorm(16), (X,)),
    ("rms_norm_quantize", "llama", lambda x, w: per_token(llama_norm(x, w)), (X, ROW)),
    ("rms_norm_quantize", "gemma", lambda x, w: per_token(gemma_norm(x, w)), (X, ROW)),
    ("rms_norm_quantize", "module", lambda x: per_token(nn.RMSNorm(16, eps=1e-5)(x)), (X,)),
    ("add_rms_norm", "both", lambda x, y, w: (llama_norm(x + y, w), x + y), (X, X + 1, ROW)),
    ("add_layer_norm", "both", lambda x, y, w: (F.layer_norm(y + x, (16,), w, w), y + x), (X, X + 1, ROW)),
    ("l2_norm", "by hand", lambda x: x / x.norm(dim=-1, keepdim=True), (X,)),
    ("l2_norm", "by hand, eps", lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-6), (X,)),
    ("softmax", "by hand", lambda x: (x - x.max(-1, keepdim=True)[0]).exp() / (x - x.max(-1, keepdim=True)[0]).exp().sum(-1, keepdim=True), (X,)),
    ("softmax", "keep", lambda x: torch.where(KEEP, x, -1e4).softmax(-1), (Q[..., :6],)),
    ("bias_act", "silu", lambda x, b: (x + b) * torch.sigmoid(x + b), (X, ROW)),
    ("bias_act", "exp relu", lambda x, b: x.add(b).clamp(min=0).exp(), (X, ROW)),
    ("linear_act", "conv1d", lambda x: F.gelu(torch.addmm(B, x.view(-1, 16), W).view(2, 6, 24)), (X,)),
    ("linear_act", "conv1d of cast rows", lambda x: F.gelu(torch.addmm(B, x.view(-1, 16).float(), W).view(2, 6, 24)), (X.bfloat16(),)),
    ("linear_act", "new gelu", lambda x: new_gelu(LINEAR(x)), (X,)),
    ("linear_act", "new gelu, pow in fp32", lambda x: new_gelu_upcast(F.linear(x, W.t().bfloat16())).bfloat16(), (X.bfloat16(),)),
    ("linear_act", "quick gelu", lambda x: LINEAR(x) * torch.sigmoid(1.702 * LINEAR(x)), (X,)),
    ("gated_linear", "glu", lambda x: F.glu(PACKED(x), -1), (X,)),
    *[("gated_linear", f"{how} {swap}", gated(PACKED, how, swap), (X,)) for how in ("chunk", "split") for swap in (0, 1)],
    ("gated_linear", "slices", gated(BARE, "slice"), (X,)),
    ("gated_act", "swiglu", lambda x: F.silu(x[..., :8]) * x[..., 8:], (X,)),
    ("gated_act", "glu", lambda x: F.glu(x.sin(), -1), (X,)),
    ("norm_linear", "layer", lambda x, w: LINEAR(F.layer_norm(x, (16,), w)), (X, ROW)),
    ("batch_norm", "relu", lambda x: F.relu(nn.functional.batch_norm(x, B[:4], B[:4].exp(), B[4:8])), (Q,)),
    ("group_norm", "silu", lambda x: F.silu(F.group_norm(x, 2, B[:4], B[:4])), (Q,)),
    ("dequantize_linear", "int_mm", lambda q, s, w: torch._int_mm(q, QW.t()).float() * s * w, (QX, torch.rand(32, 1), torch.rand(8))),
    ("cross_entropy", "bf16 upcast", lambda x: F.cross_entropy(x.float().view(-1, 16), TARGET.view(-1)), (X.bfloat16(),)),
    ("cross_entropy", "rows upcast", lambda x: F.cross_entropy(x.view(-1, 16).float(), TARGET.view(-1)), (X.bfloat16(),)),
    ("cross_entropy", "nll", lambda x: F.nll_loss(F.log_softmax(x.view(-1, 16), -1), TARGET.view(-1)), (X,)),
    ("cross_entropy", "module", lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x.view(-1, 16), TARGET.view(-1)), (X,)),
    ("token_log_probs", "gather", lambda x: F.log_softmax(x, -1).gather(-1, TARGET.clamp(min=0)[..., None]).squeeze(-1), (X,)),
    ("token_log_probs", "bf16 upcast", lambda x: (lambda y: y.gather(-1, TARGET[..., 1:, None]).squeeze(-1) - y.logsumexp(-1))(x[:, 1:].float()), (X.bfloat16(),)),
    ("norm_act", "module", lambda x: nn.GELU()(nn.LayerNorm(16)(x)), (X,)),
    ("norm_act", "bf16", lambda x: F.silu(F.rms_norm(x, (16,), eps=1e-6)), (X.bfloat16(),)),
    ("gated_norm", "behind", lambda x, z: F.rms_norm(x, (16,), eps=1e-6) * F.silu(z), (X, X + 1)),
    ("gated_norm", "in front", lambda x, z: F.layer_norm(x * z.sigmoid(), (16,)), (X.bfloat16(), X.bfloat16() + 1)),
    ("channel_norm", "by hand", channels_first, (Q, B[:4], B[:4])),
    ("channel_norm", "bf16", channels_first, (Q.bfloat16(), B[:4].bfloat16(), B[:4].bfloat16())),
    ("channel_norm", "rms", lambda x: x * torch.rsqrt(x.pow(2).mean(1, True) + 1e-6), (Q.bfloat16(),)),
    ("channel_norm", "unit", lambda x, w: nn.functional.normalize(x, dim=1) * 2 * w, (Q, B[:4, None, None])),
    ("channel_softmax", "module", nn.Softmax2d(), (Q,)),
    ("channel_softmax", "logarithm of bf16", lambda x: F.log_softmax(x, 1, dtype=torch.float32), (Q.bfloat16(),)),
    ("channel_cross_entropy", "module", lambda x, w: nn.CrossEntropyLoss(w, ignore_index=1)(x, CLASSES), (Q, B[:4].exp())),
    ("channel_cross_entropy", "nll", lambda x: F.nll_loss(F.log_softmax(x, 1), CLASSES), (Q,)),
    ("token_log_probs", "temperature", lambda x: F.log_softmax(x / 0.7, -1).gather(-1, TARGET.clamp(min=0)[..., None]), (X,)),
    ("interpolate_bilinear", "module", nn.Upsample(scale_factor=2, mode="bilinear"), (Q,)),
    ("interpolate_bilinear", "same corners", lambda x: F.interpolate(x, (9, 7), mode="bilinear", align_corners=True), (Q,)),
    ("max_pool", "module", nn.MaxPool2d(3, 2, 1), (Q,)),
    ("masked_scatter", "rows", lambda x, y: x.masked_scatter((y[..., 0] > 0).unsqueeze(-1).expand_as(x), y), (X, X + 1)),
    ("linear_cross_entropy", "upcast", lambda x: F.cross_entropy(LINEAR(x).float().view(-1, 24), TARGET.view(-1)), (X,)),
    ("rotary", "llama", lambda q, c, s: q * c.unsqueeze(1) + rotate_half(q) * s.unsqueeze(1), (Q, COS, SIN)),
    ("attention", "plain", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(8), -1) @ v, (Q, K, V)),
    ("attention", "no scale", lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, (Q, K, V)),
    ("attention", "scaled before", lambda q, k, v: torch.softmax((q * 0.3) @ (k * 0.3).mT + MASK, -1) @ v, (Q, K, V)),
    ("attention", "masked_fill", lambda q, k, v: torch.softmax((q @ k.mT * 0.3).masked_fill(~KEEP, -1e9), -1) @ v, (Q, K, V)),
    ("attention", "where", lambda q, k, v: torch.softmax(torch.where(KEEP, q @ k.mT * 0.3, float("-inf")), -1) @ v, (Q, K, V)),
    ("attention", "complement", lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(MASK > 1, -1e9), -1) @ v, (Q, K, V)),
    ("attention", "k permuted", lambda q, k, v: torch.softmax(q @ k.permute(0, 2, 3, 1) * 0.3, -1) @ v, (Q, K.transpose(1, 2).contiguous(), V)),
    ("attention", "bmm", lambda q, k, v: torch.bmm(torch.softmax(torch.baddbmm(MASK[None], q, k.mT, alpha=0.3), -1), v), (Q[0], K[0], V[0])),
    ("attention", "einsum", lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v), (Q, K, V)),
    ("attention", "mask made without gradients", masked_by_hand, (Q, K, V)),
    ("attention", "repeat_kv", lambda q, k, v: F.softmax(q @ repeat_kv(k, 2).mT * 0.3 + MASK, -1) @ repeat_kv(v, 2), (Q, K2, V2)),
    ("attention", "sdpa causal", lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=True), (Q, K2, V2)),
    ("attention", "sdpa gqa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, KEEP, enable_gqa=True), (Q, K2, V2)),
]  # fmt: skip
NOT_FOUND = [
    ("rms_norm", "eps outside", lambda x, w: w * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6), (X, ROW)),
    ("rms_norm_quantize", "norm returned", lambda x, w: (*per_token(llama_norm(x, w)), llama_norm(x, w)), (X, ROW)),
    ("softmax", "another dimension", lambda x: torch.softmax(x, 1), (X,)),
    ("softmax", "another shift's sum", lambda x: (x - x.amax(-1, True)).exp() / x.exp().sum(-1, keepdim=True), (X,)),
    ("gated_linear", "three parts", lambda x: (lambda a, b, c: F.silu(a) * b + c)(*PACKED(x).chunk(3, -1)), (X,)),
    ("gated_linear", "two inputs", lambda x, y: F.silu(PACKED(x)) * PACKED(y), (X, X + 1)),
    ("rotary", "wrong sign", lambda q, c, s: q * c[:, None] - rotate_half(q) * s[:, None], (Q, COS, SIN)),
    ("attention", "another axis", lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, (Q, K, V)),
    ("attention", "weights returned", lambda q, k, v: (lambda p: (p @ v, p))(torch.softmax(q @ k.mT, -1)), (Q, K, V)),
    ("linear_act", "another gelu", lambda x: (lambda y: 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.044715 * y**3))))(LINEAR(x)), (X,)),
    ("norm_act", "of a sum", lambda x: F.gelu(F.layer_norm(x, (16,)) + x), (X,)),
    ("gated_norm", "no activation", lambda x, z: F.layer_norm(x, (16,)) * z, (X, X + 1)),
    ("channel_norm", "rows", lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6), (Q,)),
    ("token_log_probs", "entropy too", lambda x: (lambda y: (y.gather(-1, TARGET[:, 1:, None]), (y.exp() * y).sum()))(F.log_softmax(x[:, 1:], -1)), (X,)),
    ("image_convolution", "fp32", lambda x: F.conv2d(x, Q[:, :, :3, :3]), (Q,)),
    ("batch_norm_sum", "in inference", lambda x: F.batch_norm(x, B[:4], B[:4].exp()) + F.batch_norm(x + 1, B[:4], B[:4].exp()), (Q,)),
    ("batch_norm", "in training", lambda x: F.batch_norm(x, B[:4].clone(), B[:4].exp(), training=True), (Q,)),
]  # fmt: skip


def named(cases):
    return [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in cases]


@pytest.mark.parametrize("pattern, _, fn, inputs", named(FOUND))
def test_found(pattern, _, fn, inputs):
    collector = Collector({"fusion.gate": "always", "fusion.only": pattern})
    got = torch.compile(fn, backend=collector, dynamic=False)(*inputs)
    assert [s.pattern for s in collector.report.fused] == [pattern], str(collector.report)
    tolerance = (
        dict(rtol=3e-2, atol=3e-2)
        if inputs[0].dtype == torch.bfloat16
        else dict(rtol=1e-4, atol=1e-4)
    )
    torch.testing.assert_close(got, fn(*inputs), **tolerance)


@pytest.mark.parametrize("pattern, _, fn, inputs", named(NOT_FOUND))
def test_not_found(pattern, _, fn, inputs):
    report = collect(fn, *inputs, dynamic=False, options={"fusion.only": pattern}).report
    assert report.graphs and not any(g.error for g in report.graphs), str(report)
    assert not [s for s in report.fused if s.pattern == pattern], str(report)
