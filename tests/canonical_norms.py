"""Normalisations that are one expression in several words; cases of test_canonical.py."""

import torch
import torch.nn.functional as F

from tests.canonical_cases import R, V


def centred(x, power):
    t = x - x.mean(-1, keepdim=True)
    return t * power(t.pow(2).mean(-1, keepdim=True) + 1e-5)


def over_channels(x, root):
    t = x - x.mean(1, keepdim=True)
    return t * root((t * t).mean(1, keepdim=True) + 1e-5)


# as SAME in tests/canonical_cases.py
NORMS = {
    "unit rows": (
        (R,),
        lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(2.0),
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True).clamp_min(4.0)),
        lambda x: x / (x * x).sum(-1, True).clamp(min=4).sqrt(),
    ),
    "layer norm": (
        (R, V, V),
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        lambda x, w, b: centred(x, torch.rsqrt) * w + b,
        lambda x, w, b: (
            b + w * ((x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt())
        ),
    ),
    "rms norm": (
        (R, V),
        lambda x, w: F.rms_norm(x, (6,), w, 1e-5),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
    ),
    "group norm": (
        ((2, 4, 6), (4,), (4,)),
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-5),
        lambda x, w, b: F.group_norm(x, 2) * w[:, None] + b[:, None],
        lambda x, w, b: b.view(1, -1, 1) + w.unsqueeze(-1) * F.group_norm(x, 2),
        lambda x, w, b: F.group_norm(x, 2, w) + b.view(4, 1),
    ),
    "a group for each channel": (
        ((2, 4, 6), (4,), (4,)),
        lambda x, w, b: F.group_norm(x, 4, w, b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        lambda x, w, b: F.instance_norm(x, momentum=0.5) * w[:, None] + b[:, None],
    ),
    "group norm without a weight": (
        ((2, 4, 6), (4,)),
        lambda x, b: F.group_norm(x, 2, None, b),
        lambda x, b: F.group_norm(x, 2) + b[:, None],
    ),
    "batch norm": (
        (R, V, V),
        lambda x, m, v: F.batch_norm(x, m, v * v),
        lambda x, m, v: torch.batch_norm(x, None, None, m, v * v, False, 0.1, 1e-5, False),
    ),
    "batch norm of images": (
        ((2, 4, 6, 6), (4,), (4,)),
        lambda x, m, w: F.batch_norm(x, m, w * w, w, m),
        lambda x, m, w: F.batch_norm(x, m, w * w) * w[:, None, None] + m[:, None, None],
        lambda x, m, w: F.batch_norm(x, m, w * w) * w.view(1, -1, 1, 1) + m.view(1, 4, 1, 1),
        lambda x, m, w: (
            ((x - m[None, :, None, None]) / torch.sqrt((w * w)[:, None, None] + 1e-5))
            * w[:, None, None]
            + m[:, None, None]
        ),
        lambda x, m, w: (
            (x - m.view(-1, 1, 1)) * (w * torch.rsqrt(w * w + 1e-5))[:, None, None]
            + m[:, None, None]
        ),
    ),
    "layer norm over channels": (
        ((2, 4, 6, 5), (4,), (4,)),
        lambda x, w, b: over_channels(x, torch.rsqrt) * w[:, None, None] + b[:, None, None],
        lambda x, w, b: over_channels(x, lambda v: v**-0.5) * w[:, None, None] + b[:, None, None],
        lambda x, w, b: (
            b[:, None, None]
            + w[:, None, None]
            * ((x - x.mean(1, True)) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-5))
        ),
        lambda x, w, b: (
            ((x - x.mean(1, True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt())
            * w[:, None, None]
            + b[:, None, None]
        ),
    ),
    "rms norm over channels": (
        ((2, 4, 6), (4,)),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * w[:, None],
        lambda x, w: w[:, None] * (x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-5)),
        lambda x, w: w[:, None] * (x / ((x * x).sum(1, True) / 4 + 1e-5).sqrt()),
    ),
    "channels of unit length": (
        ((2, 4, 3, 2, 2), (4, 1, 1, 1)),
        lambda x, w: F.normalize(x, dim=1, eps=2.0) * 2.0 * w,
        lambda x, w: F.normalize(x, dim=1, eps=2.0) * w * 2.0,
        lambda x, w: w * (2 * (x / x.norm(dim=1, keepdim=True).clamp_min(2.0))),
        lambda x, w: x * torch.rsqrt(x.pow(2).sum(1, keepdim=True).clamp_min(4.0)) * 2 * w,
    ),
}
