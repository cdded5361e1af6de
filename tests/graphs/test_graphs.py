"""What the rewrite writes, one positive and its near misses a pattern. Update with
EXPECTTEST_ACCEPT=1.
"""

import functools

import torch
import torch.nn.functional as F
from expecttest import TestCase

from fusion_backend.testing import assert_fuses, graph_text, rewritten


def tensor(*shape):
    return torch.randn(*shape)


def text(fn, *inputs):
    return graph_text(rewritten(fn, *inputs, dynamic=False))


class AddMul(TestCase):
    def test_fuses(self):
        self.assertExpectedInline(
            text(lambda x, y, z: ((x + y) * z).relu(), tensor(3, 5), tensor(3, 5), tensor(5)),
            """\
add_mul_default = fusion.add_mul(l_x_, l_y_, l_z_, None, forward=reference, backward=vjp, save=False)
relu = relu(add_mul_default)
return (relu,)""",
        )

    def test_scalar(self):
        self.assertExpectedInline(
            text(lambda x, y: 3.0 * (y + x), tensor(3, 5), tensor(3, 5)),
            """\
add_mul_default = fusion.add_mul(l_y_, l_x_, None, 3.0, forward=reference, backward=vjp, save=False)
return (add_mul_default,)""",
        )

    def test_near_misses(self):
        x, y, z = tensor(3, 5), tensor(3, 5), tensor(3, 5)
        assert_fuses(lambda x, y, z: (x - y) * z, x, y, z, pattern="add_mul", count=0)
        assert_fuses(lambda x, y, z: x + y * z, x, y, z, pattern="add_mul", count=0)
        assert_fuses(
            lambda x, y, z: torch.add(x, y, alpha=2) * z, x, y, z, pattern="add_mul", count=0
        )
        assert_fuses(lambda x, y, z: ((x + y) * z, x + y), x, y, z, pattern="add_mul", count=0)
        assert_fuses(lambda x, y, z: (x + y) * z, x, y, z.long(), pattern="add_mul", count=0)
        assert_fuses(
            lambda x, y, z: ((x + y).detach()) * z,
            x.requires_grad_(),
            y,
            z,
            pattern="add_mul",
            count=0,
        )


class AddMulExp(TestCase):
    def test_fuses(self):
        self.assertExpectedInline(
            text(lambda x, y: torch.exp((x + y) * 2), tensor(3, 5), tensor(3, 5)),
            """\
add_mul_exp_default = fusion.add_mul_exp(l_x_, l_y_, 2.0, forward=reference, backward=vjp, save=False)
return (add_mul_exp_default,)""",
        )

    def test_division_is_multiplication_by_the_reciprocal(self):
        report = assert_fuses(
            lambda x, y: ((x + y) / 3).exp(), tensor(4), tensor(4), pattern="add_mul_exp"
        )
        self.assertEqual(len(report.fused), 1)

    def test_near_misses(self):
        x, y = tensor(3, 5), tensor(3, 5)
        assert_fuses(lambda x, y: torch.exp2((x + y) * 2), x, y, pattern="add_mul_exp", count=0)
        assert_fuses(lambda x, y: torch.expm1((x + y) * 2), x, y, pattern="add_mul_exp", count=0)
        assert_fuses(lambda x, y: torch.exp(x + y * 2), x, y, pattern="add_mul_exp", count=0)
        assert_fuses(
            lambda x, y: torch.exp((x + y) * x.sum()), x, y, pattern="add_mul_exp", count=0
        )


class QuantizeInt8(TestCase):
    def test_fuses(self):
        self.assertExpectedInline(
            text(
                lambda x: torch.clamp(torch.round(x / 0.1 + 3), -128, 127).to(torch.int8),
                tensor(3, 5),
            ),
            """\
quantize_int8_default = fusion.quantize_int8(l_x_, 0.1, 3.0, forward=reference, backward=vjp, save=False)
return (quantize_int8_default,)""",
        )

    def test_near_misses(self):
        x = tensor(3, 5)
        for fn in (
            # not a true division
            lambda x: torch.clamp(torch.round(x * 10.0 + 3), -128, 127).to(torch.int8),
            lambda x: torch.clamp(torch.round(x / 0.1 + 3), -127, 127).to(torch.int8),
            lambda x: torch.clamp(torch.floor(x / 0.1 + 3), -128, 127).to(torch.int8),
            lambda x: torch.clamp(torch.round(x / 0.1 + 3), -128, 127).to(torch.int16),
            lambda x: torch.clamp(torch.round(x / 0.1 + 3, decimals=1), -128, 127).to(torch.int8),
            lambda x: torch.round(torch.clamp(x / 0.1, -128, 127) + 3).to(torch.int8),
        ):
            assert_fuses(fn, x, pattern="quantize_int8", count=0)


class LayerNorm(TestCase):
    def test_fuses(self):
        self.assertExpectedInline(
            text(
                lambda x, w, b: F.layer_norm(x, (5,), w, b, 1e-6),
                tensor(2, 3, 5),
                tensor(5),
                tensor(5),
            ),
            """\
layer_norm_default = fusion.layer_norm(l_x_, l_w_, l_b_, 1e-06, forward=reference, backward=vjp, save=False)
getitem = getitem(layer_norm_default, 0)
return (getitem,)""",
        )

    def test_by_hand(self):
        def by_hand(x, w):
            centred = x - x.mean(-1, keepdim=True)
            return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * w

        assert_fuses(by_hand, tensor(3, 5), tensor(5), pattern="layer_norm")

    def test_near_misses(self):
        x, w = tensor(4, 4), tensor(4)

        def norm(x, eps_inside=True, dim=-1, unbiased=False):
            m, v = x.mean(dim, keepdim=True), x.var(dim, unbiased=unbiased, keepdim=True)
            return (
                (x - m) * torch.rsqrt(v + 1e-5) if eps_inside else (x - m) / (torch.sqrt(v) + 1e-5)
            )

        assert_fuses(lambda x: norm(x), x, pattern="layer_norm")
        assert_fuses(lambda x: norm(x, eps_inside=False), x, pattern="layer_norm", count=0)
        assert_fuses(lambda x: norm(x, dim=0), x, pattern="layer_norm", count=0)
        assert_fuses(lambda x: norm(x, unbiased=True), x, pattern="layer_norm", count=0)
        assert_fuses(lambda x: F.layer_norm(x, (4, 4)), x, pattern="layer_norm", count=0)
        assert_fuses(lambda x, w: F.rms_norm(x, (4,), w), x, w, pattern="layer_norm", count=0)


class ModulatedNorm(TestCase):
    def test_fuses(self):
        def modulated(x, c):
            shift, scale = c.chunk(2, dim=1)
            return F.layer_norm(x, (5,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

        self.assertExpectedInline(
            # torch 2.11 counts otherwise
            text(modulated, tensor(2, 3, 5), tensor(2, 10)).replace("getitem_1", "getitem_4"),
            """\
chunk = chunk(l_c_, 2, dim=1)
shift = getitem(chunk, 0)
scale = getitem(chunk, 1)
getitem_2 = getitem(scale, (slice(None, None, None), None))
getitem_3 = getitem(shift, (slice(None, None, None), None))
modulated_norm_default = fusion.modulated_norm(l_x_, None, None, getitem_2, getitem_3, 1e-06, layer, forward=reference, backward=vjp, save=False)
getitem_4 = getitem(modulated_norm_default, 0)
return (getitem_4,)""",
        )

    def test_near_misses(self):
        x, scale, rows = tensor(2, 3, 5), tensor(2, 1, 5), tensor(2, 3, 5)
        norm = lambda x: F.rms_norm(x, (5,), eps=1e-6)  # noqa: E731
        fuses = functools.partial(assert_fuses, pattern="modulated_norm")
        fuses(lambda x, s: norm(x) * (1 + s), x, scale)
        fuses(lambda x, s: norm(x) * s, x, scale, count=0)
        fuses(lambda x, s: norm(x) * (2 + s), x, scale, count=0)
        fuses(lambda x, s: norm(x) * (1 - s), x, scale, count=0)
        fuses(lambda x, s: norm(x) * (1 + s), x, rows, count=0)
        fuses(lambda x, s: norm(x) * (1 + s), x, tensor(1, 3, 1), count=0)
        fuses(lambda x, s: norm(x) * (1 + s), x[0], scale[0], count=0)
        fuses(lambda x, s: norm(x * (1 + s)), x, scale, count=0)
        fuses(lambda x, s: (norm(x) * (1 + s), norm(x)), x, scale, count=0)
        fuses(lambda x, s: F.layer_norm(x, (3, 5)) * (1 + s), x, scale, count=0)


class NormAct(TestCase):
    def test_fuses(self):
        self.assertExpectedInline(
            text(
                lambda x, w, b: F.gelu(F.layer_norm(x, (5,), w, b)),
                tensor(3, 5),
                tensor(5),
                tensor(5),
            ),
            """\
norm_act_default = fusion.norm_act(l_x_, l_w_, l_b_, 1e-05, layer, gelu, forward=reference, backward=vjp, save=False)
getitem = getitem(norm_act_default, 0)
return (getitem,)""",
        )

    def test_near_misses(self):
        fuses = functools.partial(assert_fuses, pattern="norm_act")
        norm = lambda x: F.rms_norm(x, (5,), eps=1e-6)  # noqa: E731
        x = tensor(3, 5)
        fuses(lambda x: F.silu(norm(x)), x)
        fuses(lambda x: F.silu(norm(x)) * 2, x)
        fuses(lambda x: F.silu(2 * norm(x)), x, count=0)
        fuses(lambda x: norm(x).sigmoid() * x, x, count=0)
        fuses(lambda x: F.silu(norm(x)) + norm(x), x, count=0)
        fuses(lambda x: F.elu(norm(x)), x, count=0)
        fuses(lambda x: F.relu6(norm(x)), x, count=0)
        fuses(lambda x: F.relu(norm(x) + 1), x, count=0)


class ChannelNorm(TestCase):
    def test_fuses(self):
        def channels_first(x, w, b):
            u = x.mean(1, keepdim=True)
            s = (x - u).pow(2).mean(1, keepdim=True)
            x = (x - u) / torch.sqrt(s + 1e-6)
            return w[:, None, None] * x + b[:, None, None]

        self.assertExpectedInline(
            text(channels_first, tensor(2, 3, 4, 5), tensor(3), tensor(3)),
            """\
getitem = getitem(l_w_, (slice(None, None, None), None, None))
getitem_1 = getitem(l_b_, (slice(None, None, None), None, None))
channel_norm_default = fusion.channel_norm(l_x_, None, getitem, getitem_1, 1e-06, layer, forward=reference, backward=vjp, save=False)
return (channel_norm_default,)""",
        )

    def test_unit_length(self):
        self.assertExpectedInline(
            text(
                lambda x, g: F.normalize(x, dim=1) * 2.0 * g,
                tensor(2, 3, 4, 5, 6),
                tensor(3, 1, 1, 1),
            ),
            """\
channel_norm_default = fusion.channel_norm(l_x_, 2.0, l_g_, None, 1e-12, length, forward=reference, backward=vjp, save=False)
return (channel_norm_default,)""",
        )

    def test_near_misses(self):
        fuses = functools.partial(assert_fuses, pattern="channel_norm")
        x, rows = tensor(2, 3, 4, 5), tensor(2, 3)
        rms = lambda x, dim: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6)  # noqa: E731
        fuses(lambda x: rms(x, 1), x)
        fuses(lambda x: rms(x, 1).sin(), x[0])
        fuses(lambda x: rms(x, 2), x, count=0)
        fuses(lambda x: rms(x, -1), x, count=0)
        fuses(lambda x: rms(x, (1, 2)), x, count=0)
        fuses(lambda x: rms(x, 1), rows, count=0)
        fuses(lambda x: rms(x, 1) + x.pow(2).mean(1, keepdim=True).sin(), x, count=0)
        fuses(lambda x: x * torch.rsqrt(x.pow(2).sum(1, keepdim=True) + 1e-6), x, count=0)


class GatedLinear(TestCase):
    def inputs(self):
        return tensor(3, 4), tensor(4, 5), tensor(5), tensor(4, 5), tensor(5)

    def test_fuses(self):
        self.assertExpectedInline(
            text(
                lambda x, w1, b1, w2, b2: torch.sigmoid(x @ w1 + b1) * (x @ w2 + b2), *self.inputs()
            ),
            """\
gated_linear_default = fusion.gated_linear(l_x_, l_w1_, l_b1_, l_w2_, l_b2_, sigmoid, forward=reference, backward=vjp, save=False)
getitem = getitem(gated_linear_default, 0)
return (getitem,)""",
        )

    def test_linear_passes_the_weight_transposed(self):
        x, w = tensor(2, 3, 4), tensor(5, 4)
        self.assertExpectedInline(
            text(lambda x, w, v: F.linear(x, v) * F.linear(x, w).sigmoid(), x, w, tensor(5, 4)),
            """\
permute_default = aten.permute(l_w_, [1, 0])
permute_default_1 = aten.permute(l_v_, [1, 0])
gated_linear_default = fusion.gated_linear(l_x_, permute_default, None, permute_default_1, None, sigmoid, forward=reference, backward=vjp, save=False)
getitem = getitem(gated_linear_default, 0)
return (getitem,)""",
        )

    def test_in_place(self):
        def gate(x, w1, b1, w2, b2):
            r = x @ w1 + b1
            r.sigmoid_()
            r *= x @ w2 + b2
            return r

        self.assertExpectedInline(
            text(gate, *self.inputs()),
            """\
gated_linear_default = fusion.gated_linear(l_x_, l_w1_, l_b1_, l_w2_, l_b2_, sigmoid, forward=reference, backward=vjp, save=False)
getitem = getitem(gated_linear_default, 0)
return (getitem,)""",
        )

    def test_near_misses(self):
        x, w1, b1, w2, b2 = self.inputs()
        for fn in (
            lambda x, w1, b1, w2, b2: torch.sigmoid(x @ w1 + b1) + (x @ w2 + b2),
            lambda x, w1, b1, w2, b2: torch.tanh(x @ w1 + b1) * (x @ w2 + b2),
            lambda x, w1, b1, w2, b2: torch.sigmoid(x @ w1 + b1) * (x.relu() @ w2 + b2),
            lambda x, w1, b1, w2, b2: torch.sigmoid((x @ w1 + b1) * 2) * (x @ w2 + b2),
            lambda x, w1, b1, w2, b2: (lambda g: (g * (x @ w2 + b2), g))(
                torch.sigmoid(x @ w1 + b1)
            ),
        ):
            assert_fuses(fn, x, w1, b1, w2, b2, pattern="gated_linear", count=0)


class TokenLogProbs(TestCase):
    def inputs(self):
        return tensor(2, 5, 7), torch.randint(7, (2, 5))

    def test_fuses(self):
        def log_probs(x, ids):
            y = F.log_softmax(x[:, :-1].float(), -1)
            return y.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum()

        self.assertExpectedInline(
            text(log_probs, *self.inputs()),
            """\
getitem = getitem(l_x_, (slice(None, None, None), slice(None, -1, None)))
getitem_1 = getitem(l_ids_, (slice(None, None, None), slice(1, None, None)))
unsqueeze = unsqueeze(getitem_1, -1)
token_log_probs_default = fusion.token_log_probs(getitem, unsqueeze, None, gather, log_softmax, fp32, dropped, forward=reference, backward=vjp, save=False)
getitem_2 = getitem(token_log_probs_default, 0)
sum_1 = sum(getitem_2)
return (sum_1,)""",
        )
