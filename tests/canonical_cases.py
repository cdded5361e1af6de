"""Words that are one expression: the cases of test_canonical.py. tests/canonical_others.py has
those that must stay two.
"""

import math

import torch
import torch.nn.functional as F

ROOT = 1 / math.sqrt(8)
# rows, matrix, vectors, weight, its bias, heads
R, M, V, W, B, Q = (4, 6), (6, 6), (6,), (5, 6), (5,), (2, 4, 6, 8)
MASK, INTS, LABELS, BYTES = "mask", "ints", "labels", "bytes"


def in_place(x, y):
    t = x + y
    t.mul_(y)
    return t.exp_()


def in_place_through(alias):
    """Written through another name for the whole."""

    def fn(x, y):
        t = x + y
        alias(t).mul_(y)
        alias(t).exp_()
        return t

    return fn


def written_in_part(x, part):
    t = x + 1
    part(t).mul_(2)
    return t.exp()


# what is computed, on which inputs, in words that become one expression
SAME = {
    "an enlarged image": (
        ((2, 3, 4, 5),),
        lambda x: F.interpolate(x, (8, 10), mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        lambda x: torch.ops.aten.upsample_bilinear2d(x, None, False, [2.0, 2.0]),
    ),
    "an enlarged image with the same corners": (
        ((2, 3, 4, 5),),
        lambda x: F.interpolate(x, (8, 10), mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, scale_factor=2.1, mode="bilinear", align_corners=True),
    ),
    "the largest elements of windows": (
        ((2, 3, 6, 8),),
        lambda x: F.max_pool2d(x, 2),
        lambda x: torch.max_pool2d(x, [2, 2], stride=2),
        lambda x: torch.ops.aten.max_pool2d(x, [2, 2], [2, 2], [0], [1]),
    ),
    "rows in the place of others": (
        (R, R),
        lambda x, y: x.masked_scatter((y[:, 0] > 0).unsqueeze(-1).expand_as(x), y),
        lambda x, y: x.masked_scatter((y[:, 0] > 0)[:, None], y),
        lambda x, y: torch.masked_scatter(x, (y[:, 0] > 0).unsqueeze(1).expand(-1, 6), y),
    ),
    "sum over ranks": (
        (M,),
        lambda x: torch.ops.fusion_c10d.all_reduce(x, "the group") + 1,
        lambda x: torch.ops.fusion_c10d.all_reduce(x.view(6, 6), "the group").add(1),
    ),
    "sum": (
        (M, M),
        lambda x, y: x + y,
        lambda x, y: torch.add(y, x),
        lambda x, y: x - (-y),
        lambda x, y: torch.sub(x, y, alpha=-1),
        lambda x, y: x.add(y, alpha=1),
    ),
    "difference": (
        (M, M),
        lambda x, y: x - y,
        lambda x, y: -y + x,
        lambda x, y: torch.negative(y) + x,
        lambda x, y: torch.rsub(y, x),
        lambda x, y: torch.subtract(x, y),
        lambda x, y: torch.add(x, y, alpha=-1),
    ),
    "scaled sum": (
        (M, M),
        lambda x, y: torch.add(x, y, alpha=3),
        lambda x, y: x + 3 * y,
        lambda x, y: y * 3 + x,
    ),
    "product": (
        (M, M),
        lambda x, y: x * y,
        lambda x, y: torch.mul(y, x),
        lambda x, y: torch.multiply(x, y),
        lambda x, y: 1.0 * x * y,
    ),
    "product of numbers": ((M,), lambda x: x * 2 * 3, lambda x: 6 * x),
    "sum of a product": (
        (M, M, M),
        lambda x, y, z: x + y * z,
        lambda x, y, z: torch.addcmul(x, z, y),
    ),
    "in place": (
        (M, M),
        in_place,
        in_place_through(lambda t: t.view(t.shape)),
        in_place_through(lambda t: t[:]),
        in_place_through(lambda t: t),
        lambda x, y: torch.exp((x + y) * y),
    ),
    "quotient": ((M, M), lambda x, y: x / y, torch.div, torch.divide, torch.true_divide),
    "reciprocal": ((M,), lambda x: 1 / x, torch.reciprocal, lambda x: x**-1),
    "square": ((M,), lambda x: x * x, torch.square, lambda x: x.pow(2), lambda x: x**2.0),
    "root": ((M,), torch.sqrt, lambda x: x**0.5),
    "reciprocal root": (
        (M,),
        torch.rsqrt,
        lambda x: 1 / torch.sqrt(x),
        lambda x: x.sqrt().reciprocal(),
        lambda x: x**-0.5,
    ),
    "division by a root": ((M, M), lambda x, y: x / y.sqrt(), lambda x, y: x * torch.rsqrt(y)),
    "exponential": ((M,), torch.exp, lambda x: x.exp(), lambda x: x.clone().exp_()),
    "sigmoid": (
        (M,),
        torch.sigmoid,
        lambda x: 1 / (1 + torch.exp(-x)),
        lambda x: (1 + (-x).exp()).reciprocal(),
    ),
    "sigmoid of a multiple": (
        (M,),
        lambda x: torch.sigmoid(1.702 * x),
        lambda x: 1 / (1 + torch.exp(x * -1.702)),
    ),
    "silu": (
        (M,),
        F.silu,
        lambda x: x * torch.sigmoid(x),
        lambda x: x.sigmoid() * x,
        lambda x: x / (1 + torch.exp(-x)),
    ),
    "tanh": ((M,), torch.tanh, F.tanh),
    "softplus": ((R,), F.softplus, torch.nn.Softplus(), lambda x: F.softplus(x, 1, threshold=20.0)),
    "mish": (
        (R,),
        F.mish,
        torch.nn.Mish(),
        lambda x: x * F.softplus(x).tanh(),
        lambda x: F.softplus(x).tanh() * x,
    ),
    "defaults written out": ((R,), F.elu, lambda x: F.elu(x, 1.0), lambda x: F.elu(x, alpha=1.0)),
    "gelu": (
        (M,),
        F.gelu,
        lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)),
    ),
    "gelu by tanh of a product": (
        (M, M, M),
        lambda x, y, z: F.gelu(x * y.sin() * z, approximate="tanh"),
        lambda x, y, z: (
            lambda p: 0.5 * p * (1 + torch.tanh(math.sqrt(2 / math.pi) * (p + 0.044715 * p**3)))
        )(x * y.sin() * z),
        lambda x, y, z: (
            lambda p: (
                0.5 * p * (1 + torch.tanh(math.sqrt(2 / math.pi) * p * (1 + 0.044715 * p * p)))
            )
        )(x * y.sin() * z),
    ),
    "gelu by tanh": (
        (R,),
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "relu": (
        (M,),
        F.relu,
        lambda x: x.clamp(min=0),
        lambda x: torch.clamp_min(x, 0.0),
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: torch.clip(x, 0),
    ),
    "at least one": ((M,), lambda x: torch.maximum(x, torch.ones_like(x)), lambda x: x.clamp(1)),
    "clamp": (
        (M,),
        lambda x: x.clamp(-1, 1),
        F.hardtanh,
        lambda x: x.clamp_min(-1).clamp_max(1),
        lambda x: x.clamp_max(1).clamp_min(-1),
        lambda x: torch.minimum(x.clamp_min(-1), torch.ones_like(x)),
        lambda x: torch.min(x.clamp_min(-1), torch.ones_like(x)),
    ),
    "relu6": ((M,), F.relu6, torch.nn.ReLU6(), lambda x: x.clamp(0, 6)),
    "hardsigmoid": (
        (M,),
        F.hardsigmoid,
        lambda x: F.relu6(x + 3) / 6,
        lambda x: torch.clamp(3 + x, 0, 6).div(6.0),
    ),
    "hardswish": (
        (M,),
        F.hardswish,
        torch.nn.Hardswish(),
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: (x + 3).clamp_min(0).clamp_max(6) * x / 6,
    ),
    "abs and round": (
        (M,),
        lambda x: torch.abs(x).round(),
        lambda x: torch.round(x.abs(), decimals=0),
        lambda x: torch.absolute(x).round(),
    ),
    "where": (
        (MASK, R, R),
        lambda m, x, y: torch.where(m, x, y),
        lambda m, x, y: torch.where(~m, y, x),
        lambda m, x, y: torch.where(torch.logical_not(m), y, x),
    ),
    "masked fill": (
        (MASK, R),
        lambda m, x: x.masked_fill(m, -1.5),
        lambda m, x: torch.where(m, -1.5, x),
    ),
    "mean": (
        (R,),
        lambda x: x.mean(-1),
        lambda x: x.sum(1) / 6,
        lambda x: x.mean(1, keepdim=True).squeeze(-1),
    ),
    "mean, kept": (
        (R,),
        lambda x: x.mean(-1, keepdim=True),
        lambda x: x.sum(1, keepdim=True) / x.shape[1],
        lambda x: x.mean(-1).unsqueeze(-1),
    ),
    "a value of each row, computed without its dimension": (
        (R,),
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) * 2 + 1e-6),
        lambda x: x * torch.rsqrt(x.square().mean(-1) * 2 + 1e-6).unsqueeze(-1),
        lambda x: x * (x.square().mean(-1) * 2 + 1e-6)[:, None].rsqrt(),
        lambda x: x * (2 * x.square().mean(-1)).add(1e-6).rsqrt()[..., None],
    ),
    "and of two such values": (
        (R,),
        lambda x: x.amax(-1, True).clamp_min(1e-3) / x.amin(-1, True) ** 3,
        lambda x: (x.amax(-1).clamp_min(1e-3) / x.amin(-1) ** 3)[:, None],
    ),
    "variance": (
        (R,),
        lambda x: x.var(-1, unbiased=False),
        lambda x: torch.var(x, 1, correction=0),
        lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1),
        lambda x: torch.var_mean(x, -1, correction=0)[0],
    ),
    "deviation": (
        (R,),
        lambda x: x.std(-1, unbiased=False),
        lambda x: x.var(-1, correction=0).sqrt(),
    ),
    "largest": (
        (R,),
        lambda x: x.amax(-1),
        lambda x: x.max(-1).values,
        lambda x: torch.max(x, 1, keepdim=True)[0].squeeze(1),
    ),
    "smallest": (
        (R,),
        lambda x: x.amin(-1),
        lambda x: -(-x).amax(-1),
        lambda x: torch.aminmax(x, dim=-1).min,
    ),
    "largest magnitude": (
        (R,),
        lambda x: x.abs().amax(-1, keepdim=True),
        lambda x: torch.maximum(-x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)),
        lambda x: (lambda m: torch.max(m.max, -m.min))(torch.aminmax(x, dim=-1, keepdim=True)),
    ),
    "length": (
        (R,),
        lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
        lambda x: torch.linalg.norm(x, dim=-1, keepdim=True),
        lambda x: torch.linalg.norm(x, 2, -1, keepdim=True),
        lambda x: (x * x).sum(-1, keepdim=True).sqrt(),
    ),
    "windows of an image": (
        ((2, 3, 8, 8), (5, 3, 2, 4), (5,)),
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 4)),
        lambda x, w, b: F.conv2d(x, w, b, (2, 4), "valid"),
        lambda x, w, b: F.conv2d(x, w, b, (2, 4), 0, 1, 1),
        lambda x, w, b: F.conv2d(x, w, b, (2, 4), (0, 0), (1, 1)),
    ),
    "a convolution": (
        ((2, 3, 8, 8), (5, 3, 3, 3), (5,)),
        lambda x, w, b: F.conv2d(x.half(), w.half(), b.half(), 2, 1),
        lambda x, w, b: torch.convolution(
            x.half(), w.half(), b.half(), [2, 2], [1, 1], [1, 1], False, [0, 0], 1
        ),
    ),
    "windows of a signal": (
        ((2, 3, 9), (5, 3, 4)),
        lambda x, w: F.conv1d(x, w, stride=4),
        lambda x, w: F.conv1d(x, w, None, (4,), "valid"),
    ),
    "windows of a video": (
        ((2, 3, 4, 4, 4), (5, 3, 2, 2, 2)),
        lambda x, w: F.conv3d(x, w, stride=2),
        lambda x, w: F.conv3d(x, w, None, (2, 2, 2), "valid"),
    ),
    "softmax": (
        (R,),
        lambda x: x.softmax(-1),
        lambda x: F.softmax(x, dim=1),
        lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(x - x.amax(-1, keepdim=True))),
    ),
    "linear": (
        (R, W, B),
        F.linear,
        lambda x, w, b: x @ w.t() + b,
        lambda x, w, b: torch.addmm(b, x, w.T),
        lambda x, w, b: torch.matmul(x, w.transpose(0, 1)) + b,
        lambda x, w, b: b + torch.mm(x, w.mT),
        lambda x, w, b: x @ w.permute(1, 0) + b,
    ),
    "rows by a matrix": (
        ((2, 4, 6), W),
        F.linear,
        lambda x, w: torch.einsum("...k,nk->...n", x, w),
        lambda x, w: torch.einsum("btk,kn->btn", x, w.t()),
        lambda x, w: torch.einsum("nk, b t k -> b t n", w, x),
        lambda x, w: torch.einsum("kn,...k->...n", w.t(), x),
    ),
    "a matrix by a matrix": (
        (R, W),
        lambda x, w: x @ w.t(),
        lambda x, w: torch.einsum("ik,jk->ij", x, w),
        lambda x, w: torch.einsum("jk,ik->ij", w, x),
    ),
    "batch of products": (((2, 4, 6), (2, 6, 5)), torch.bmm, torch.matmul),
    "batch of sums": (((2, 4, 5), (2, 4, 6), (2, 6, 5)), torch.baddbmm, lambda c, a, b: a @ b + c),
    "product of integers": (
        (BYTES, BYTES),
        torch.ops.aten._int_mm,
        lambda q, w: torch.ops.aten._int_mm(q.clone(), w),
    ),
    "two transpositions": (
        (R,),
        lambda x: x.t().exp().t(),
        lambda x: x.mT.exp().mT,
        lambda x: x.permute(1, 0).exp().transpose(0, 1),
        lambda x: x.swapaxes(0, -1).exp().swapdims(1, 0),
        lambda x: x.movedim(0, 1).exp().moveaxis((1,), (0,)),
    ),
    "moved dimensions": (
        ((2, 4, 5),),
        lambda x: x.permute(1, 2, 0).exp(),
        lambda x: x.movedim(0, 2).exp(),
        lambda x: x.moveaxis((0, 2), (-1, 1)).exp(),
        lambda x: x.movedim((1, 2, 0), (0, 1, 2)).exp(),
    ),
    "nothing": (
        (R,),
        lambda x: x.exp(),
        lambda x: x.exp().contiguous(),
        lambda x: x.exp().view(4, 6),
        lambda x: x.exp().reshape(4, 6),
        lambda x: x.t().contiguous().t().exp(),
        lambda x: x.exp().unsqueeze(0).squeeze(0),
        lambda x: F.dropout(x.exp(), 0.5, False),
        lambda x: x.exp().expand(4, 6),
        lambda x: x.exp().type_as(x),
        lambda x: x.exp().to(x.dtype),
        lambda x: torch.ops.aten.alias(x.exp()),
        lambda x: F.dropout(x, 0.0).exp(),
        lambda x: x.exp().expand_as(x),
        lambda x: torch.broadcast_to(x.exp(), (4, 6)),
        lambda x: torch.ops.aten._unsafe_view(x.exp(), (4, 6)),
        lambda x: x.exp()[None][0],
        lambda x: x.exp().view(-1).view_as(x),
        lambda x: x.exp().flatten().reshape_as(x),
        lambda x: x.exp().view(2, 12).view(8, 3).reshape(4, 6),
    ),
    "flat": ((R,), lambda x: x.view(24), lambda x: x.flatten(), lambda x: x.reshape(-1)),
    "rows": (
        ((24,),),
        lambda x: x.view(2, 12),
        lambda x: x.unflatten(0, (2, 12)),
        lambda x: x.reshape(2, -1),
    ),
    "attention": (
        (Q, Q, Q),
        F.scaled_dot_product_attention,
        lambda q, k, v: torch.softmax(q @ k.mT * ROOT, -1) @ v,
        lambda q, k, v: torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * ROOT, -1) @ v,
    ),
    "attention with a mask": (
        (Q, Q, Q, (6, 6)),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        lambda q, k, v, m: torch.softmax(m + q @ k.transpose(-2, -1) * ROOT, -1) @ v,
    ),
    "heads repeated": (
        (Q,),
        lambda x: x.repeat_interleave(3, 1).exp(),
        lambda x: x[:, :, None].expand(2, 4, 3, 6, 8).reshape(2, 12, 6, 8).exp(),
    ),
    "stack": (
        (R, R),
        lambda x, y: torch.stack([x, y], -1),
        lambda x, y: torch.stack((x, y), dim=2),
        lambda x, y: torch.cat((x.unsqueeze(-1), y[..., None]), -1),
    ),
    "every other": (
        (R,),
        lambda x: x[:, ::2] * x[:, 1::2].exp(),
        lambda x: x.unflatten(-1, (-1, 2))[..., 0] * x.view(4, 3, 2)[..., 1].exp(),
        lambda x: (lambda p: p[0] * p[1].exp())(x.reshape(4, -1, 2).unbind(-1)),
        lambda x: x.view(4, 3, 2)[..., -2] * x.view(4, 3, 2).select(2, -1).exp(),
    ),
    "side by side": (
        (R, R),
        lambda x, y: torch.cat([x, y], -1),
        lambda x, y: torch.concat((x, y), 1),
        lambda x, y: torch.concatenate((x, y), 1),
    ),
    "halves": (
        (R,),
        lambda x: x[:, :3] * x[:, 3:],
        lambda x: (lambda p: p[0] * p[1])(x.chunk(2, -1)),
        lambda x: (lambda p: p[0] * p[1])(x.split(3, 1)),
        lambda x: (lambda p: p[0] * p[1])(x.split([3, 3], 1)),
        lambda x: x.narrow(1, 0, 3) * x.narrow(-1, 3, 3),
        lambda x: (lambda p: p[0] * p[1])(x.tensor_split(2, 1)),
        lambda x: (lambda p: p[0] * p[1])(torch.tensor_split(x, (3,), -1)),
        lambda x: (lambda p: p[0] * p[1])(x.view(4, 2, 3).unbind(-2)),
        lambda x: (lambda p: p[0] * p[1])(x.unflatten(-1, (2, -1)).unbind(1)),
        lambda x: x.view(4, 2, 3)[:, 0] * x.reshape(4, 2, 3).select(1, -1),
    ),
    "glu": ((R,), F.glu, lambda x: x[:, :3] * torch.sigmoid(x[:, 3:])),
    "numbers in tensors": (
        (R,),
        lambda x: x * 2.0,
        lambda x: x * torch.full((), 2.0),
        lambda x: x * torch.scalar_tensor(2.0),
    ),
    "casts": (
        (R,),
        lambda x: x.to(torch.bfloat16).to(torch.float32),
        lambda x: x.bfloat16().float(),
        lambda x: torch.ops.aten._to_copy(x, dtype=torch.bfloat16).float(),
    ),
}
