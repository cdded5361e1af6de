"""Words that come close to each other and must stay two expressions."""

import math

import torch
import torch.nn.functional as F

from tests.canonical_cases import INTS, MASK, ROOT, B, M, Q, R, V, W, written_in_part

# what must stay two expressions, and why
OTHER = {
    "division is no product with the reciprocal": (
        (R, R),
        lambda x, y: x / y,
        lambda x, y: x * y.reciprocal(),
    ),
    "nor is division by a number": ((R,), lambda x: x / 3, lambda x: x * (1 / 3)),
    "division that rounds": (
        (R,),
        lambda x: x / 3,
        lambda x: torch.div(x, 3, rounding_mode="floor"),
        lambda x: torch.div(x, 3, rounding_mode="trunc"),
    ),
    "operands of a difference": ((R, R), lambda x, y: x - y, lambda x, y: y - x),
    "a moved dimension is no exchange": (
        ((2, 4, 2),),
        lambda x: x.transpose(0, 2),
        lambda x: x.movedim(0, 2),
        lambda x: x.movedim(2, 0),
    ),
    "rounding modes": (
        (R,),
        torch.round,
        torch.floor,
        torch.ceil,
        torch.trunc,
        lambda x: torch.round(x, decimals=1),
    ),
    "integers are not looked through": (
        (R,),
        lambda x: x,
        lambda x: x.int().float(),
        lambda x: x.to(torch.int8).float(),
    ),
    "nor fp64": ((R,), lambda x: x.exp(), lambda x: x.double().exp().float()),
    "lower above upper": (
        (R,),
        lambda x: x.clamp_min(1).clamp_max(-1),
        lambda x: x.clamp_max(-1).clamp_min(1),
    ),
    "biased and unbiased": (
        (R,),
        lambda x: x.var(-1),
        lambda x: x.var(-1, correction=0),
        lambda x: x.var(-1, correction=2),
    ),
    "eps inside and outside": (
        (R,),
        lambda x: 1 / (x.var(-1) + 1e-5).sqrt(),
        lambda x: 1 / (x.var(-1).sqrt() + 1e-5),
    ),
    "axes": ((M,), lambda x: x.sum(0), lambda x: x.sum(1), lambda x: x.sum()),
    "a count that is not the number of terms": (
        (R,),
        lambda x: x.mean(-1),
        lambda x: x.sum(-1) / 5,
    ),
    "gelu and its neighbours": (
        (R,),
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        F.silu,
        lambda x: 0.5 * x * (1 + torch.erf(x)),
        lambda x: 0.5 * x * (2 + torch.erf(x / 2**0.5)),
    ),
    "hardswish and its neighbours": (
        (R,),
        F.hardswish,
        F.hardsigmoid,
        F.silu,
        lambda x: x * F.relu6(x + 2) / 6,
        lambda x: x * F.relu6(x + 3) / 5,
        lambda x: x * (x + 3).clamp(0, 5) / 6,
    ),
    "softplus and its neighbours": (
        (R,),
        F.softplus,
        lambda x: F.softplus(x, 2.0),
        lambda x: F.softplus(x, 1, 1.0),
    ),
    "elu and its neighbours": ((R,), F.elu, lambda x: F.elu(x, 0.5), F.selu, F.celu),
    "sigmoid and its neighbours": (
        (R,),
        torch.sigmoid,
        lambda x: 1 / (1 + torch.exp(x)),
        lambda x: 1 / (2 + torch.exp(-x)),
        lambda x: 2 / (1 + torch.exp(-x)),
    ),
    "the mask and its complement": (
        (MASK, R, R),
        torch.where,
        lambda m, x, y: torch.where(m, y, x),
    ),
    "attention masked by booleans": (
        (Q, Q, Q, (6, 6)),
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m > 0),
        lambda q, k, v, m: ((q @ k.mT * ROOT).masked_fill(m <= 0, -math.inf)).softmax(-1) @ v,
    ),
    "axes of attention": (
        (Q, Q, Q),
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
        lambda q, k, v: (q @ v.mT).softmax(-1) @ k,
    ),
    "other indices": (
        (Q, Q),
        lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        lambda q, k: torch.einsum("bhqd,bhkd->bhkq", q, k),
    ),
    "repeated the other way": (
        (Q,),
        lambda x: x.repeat_interleave(3, 1),
        lambda x: x.repeat(1, 3, 1, 1),
        lambda x: x.repeat_interleave(3, 2),
    ),
    "the order of parts": (
        (R, R),
        lambda x, y: torch.cat([x, y], -1),
        lambda x, y: torch.cat([y, x], -1),
    ),
    "the two halves": (
        (R,),
        lambda x: x[:, :3],
        lambda x: x[:, 3:],
        lambda x: x[:, 1:4],
        lambda x: x[:, ::2],
    ),
    "a transposition": ((M,), lambda x: x @ x, lambda x: x @ x.t(), lambda x: x.t() @ x),
    "weights of addmm": (
        (R, W, B),
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: torch.addmm(b, x, w.t(), beta=2),
    ),
    "detach": ((R,), lambda x: x.exp(), lambda x: x.exp().detach()),
    "one group or channel for another": (
        ((2, 4, 4), (4,)),
        lambda x, w: F.group_norm(x, 2, w),
        lambda x, w: F.group_norm(x, 4, w),
        lambda x, w: F.group_norm(x, 2) * w,
        lambda x, w: F.group_norm(x, 2) * w[0],
        lambda x, w: F.group_norm(x, 2) + w[:, None],
        lambda x, w: (F.group_norm(x, 2) + w[:, None]) * w[:, None],
        lambda x, w: F.group_norm(x, 2, w) * w[:, None],
    ),
    "other pairs": (
        (R,),
        lambda x: x.view(4, 3, 2)[..., 0],
        lambda x: x.view(4, 3, 2)[..., 1],
        lambda x: x.view(4, 2, 3)[..., 0],
        lambda x: x.view(4, 3, 2)[:, 0],
        lambda x: x.view(2, 6, 2)[..., 0],
    ),
    "written in part": (
        (R,),
        lambda x: ((x + 1) * 2).exp(),
        lambda x: written_in_part(x, lambda t: t[:, :1]),
    ),
    "norms": (
        (R,),
        lambda x: torch.linalg.norm(x, dim=-1),
        lambda x: torch.linalg.norm(x, 1, -1),
        lambda x: torch.linalg.norm(x, dim=(0, 1)),
        lambda x: torch.linalg.norm(x, 2, (0, 1)),
        lambda x: torch.linalg.norm(x),
    ),
    "numbers as they are held": (
        (R,),
        lambda x: x * 0.1,
        lambda x: x * torch.full((), 0.1, dtype=torch.bfloat16),
        lambda x: x * torch.full((), 0.1, dtype=torch.float16),
        lambda x: x * torch.full((), 2.7, dtype=torch.int64),
    ),
    "two draws": ((R,), lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5))),
    "another p": ((R,), lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.25)),
    "sum of integers": ((INTS,), lambda x: x.sum(-1), lambda x: x.sum(-1, dtype=torch.float32)),
    "exponents": ((R,), lambda x: x.pow(2), lambda x: x.pow(3), lambda x: x.pow(0.5), lambda x: x),
    "other windows": (
        ((2, 4, 8, 8), (4, 4, 2, 2), (4, 2, 2, 2), (4,)),
        lambda x, w, v, b: F.conv2d(x, w, b, stride=2),
        lambda x, w, v, b: F.conv2d(x, w, stride=2),
        lambda x, w, v, b: F.conv2d(x, w, b, stride=1),
        lambda x, w, v, b: F.conv2d(x, w, b, stride=(2, 1)),
        lambda x, w, v, b: F.conv2d(x, w, b, stride=2, padding=1),
        lambda x, w, v, b: F.conv2d(x, w, b, stride=2, dilation=2),
        lambda x, w, v, b: F.conv2d(x, v, b, stride=2, groups=2),
    ),
    "training of batch norm": (
        (R, V, V),
        lambda x, m, v: F.batch_norm(x, m, v),
        lambda x, m, v: F.batch_norm(x, None, None, training=True),
    ),
}
