"""Losses and log-probabilities that are one expression in several words; cases of
test_canonical.py.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.canonical_cases import LABELS, R

# as SAME in tests/canonical_cases.py
LOSSES = {
    "cross entropy of rows that are cast": (
        ((2, 2, 6), LABELS),
        lambda x, t: F.cross_entropy(x.bfloat16().float().view(-1, 6), t),
        lambda x, t: F.cross_entropy(x.bfloat16().view(-1, 6).float(), t),
    ),
    "cross entropy": (
        (R, LABELS),
        F.cross_entropy,
        lambda x, t: F.nll_loss(F.log_softmax(x, -1), t),
        lambda x, t: torch.ops.aten.nll_loss(torch.log_softmax(x, 1), t),
    ),
    "a divergence from a teacher": (
        (R, R),
        lambda x, t: F.kl_div(F.log_softmax(x / 2, -1), F.softmax(t / 2, -1), reduction="sum"),
        lambda x, t: F.kl_div(
            torch.log_softmax(x * 0.5, 1), (t / 2).softmax(-1), reduction="none"
        ).sum(),
        lambda x, t: nn.KLDivLoss(reduction="sum")(
            x / 2 - (x / 2).logsumexp(-1, True), F.softmax(t * 0.5, 1)
        ),
    ),
    "a divergence from the logarithms of a teacher": (
        (R, R),
        lambda x, t: F.kl_div(
            F.log_softmax(x, -1), F.log_softmax(t, -1), reduction="none", log_target=True
        ).sum(-1),
        lambda x, t: (t.softmax(-1) * (t.log_softmax(-1) - x.log_softmax(-1))).sum(1),
        lambda x, t: (t.log_softmax(1).exp() * (t.log_softmax(-1) - x.log_softmax(1))).sum(-1),
    ),
    "cross entropy of soft targets": (
        (R, R),
        lambda x, t: F.cross_entropy(x / 3, t, reduction="none"),
        lambda x, t: (-t * F.log_softmax(x / 3, -1)).sum(-1),
        lambda x, t: (F.log_softmax(x / 3, 1) * -t).sum(dim=1),
    ),
    "log-probabilities of tokens": (
        (R, LABELS),
        lambda x, t: F.log_softmax(x, -1).gather(-1, t[:, None]),
        lambda x, t: torch.gather(x.log_softmax(1), 1, t.unsqueeze(1)),
        lambda x, t: x.log_softmax(1).gather(1, t.unsqueeze(-1)).squeeze(-1).unsqueeze(-1),
    ),
    "log-probabilities of flattened tokens": (
        ((2, 2, 6), LABELS),
        lambda x, t: F.log_softmax(x, -1).view(-1, 6).gather(-1, t[:, None]),
        lambda x, t: F.log_softmax(x.flatten(0, 1), -1).gather(-1, t[:, None]),
    ),
    "elements of rows and logsumexp": (
        (R, LABELS),
        lambda x, t: x.gather(-1, t[:, None]).squeeze(-1) - x.logsumexp(-1),
        lambda x, t: torch.sub(x.gather(1, t[:, None])[..., 0], torch.logsumexp(x, (1,))),
        lambda x, t: x.gather(1, t[:, None]).view(-1) - x.logsumexp(1, keepdim=True).squeeze(),
        lambda x, t: -x.logsumexp(1) + x.gather(1, t[:, None]).squeeze(),
        lambda x, t: (x.gather(1, t[:, None]) - x.logsumexp(1, True)).squeeze(1),
        lambda x, t: (x.gather(1, t[:, None]) - x.logsumexp(1)[:, None]).squeeze(1),
        lambda x, t: (x - x.logsumexp(1, True)).gather(1, t[:, None]).squeeze(-1),
    ),
    "logsumexp less elements of rows": (
        (R, LABELS),
        lambda x, t: x.logsumexp(-1) - x.gather(-1, t[:, None]).squeeze(-1),
        lambda x, t: -x.gather(1, t[:, None])[..., 0] + torch.logsumexp(x, 1),
        lambda x, t: (x.logsumexp(1, True) - x.gather(1, t[:, None])).squeeze(1),
    ),
    "elements of rows by counted rows": (
        (R, LABELS),
        lambda x, t: x.log_softmax(-1)[torch.arange(4), t],
        lambda x, t: F.log_softmax(x, 1)[torch.arange(0, 4), t],
        lambda x, t: torch.ops.aten.index(x.log_softmax(1), [torch.arange(4)[:], t]),
        lambda x, t: x.log_softmax(1)[torch.arange(0, 4, 1), t[:, None].squeeze(1)],
    ),
    "elements of batches of rows by counted rows": (
        ((2, 4, 6), (2, 4)),
        lambda x, y: x[torch.arange(2)[:, None], torch.arange(4), (y > 0).long()],
        lambda x, y: x[
            torch.arange(2).view(2, 1), torch.arange(4)[None].expand(2, 4), (y > 0).long()
        ],
    ),
    "elements of rows along a dimension": (
        (R, LABELS),
        lambda x, t: torch.take_along_dim(x.log_softmax(-1), t[:, None], 1),
        lambda x, t: F.log_softmax(x, 1).take_along_dim(t.unsqueeze(-1), -1),
    ),
}
