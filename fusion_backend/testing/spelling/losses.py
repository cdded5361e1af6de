"""Wordings of losses, after composites.py."""

from __future__ import annotations


def of_labels(a) -> bool:
    return not a.target.floating


def of_probabilities(a, reduction: int) -> bool:
    """A cross entropy of soft targets that is easily written by hand."""
    plain = (a.weight, a.label_smoothing, a.reduction) == (None, 0.0, reduction)
    return plain and a.target.floating and a.self.rank == 2


def simple(a) -> bool:
    return (a.weight, a.reduction, a.ignore_index, a.label_smoothing) == (None, 1, -100, 0.0)


LOSS_WORDINGS: dict[str, list] = {
    "cross_entropy_loss": [
        "F.cross_entropy({self}, {target}, {weight}, ignore_index={ignore_index}, "
        "reduction={how!r}, label_smoothing={label_smoothing})",
        (
            "nn.CrossEntropyLoss(ignore_index={ignore_index}, reduction={how!r}, "
            "label_smoothing={label_smoothing})"
            "({self}, {target})",
            lambda a: a.weight is None,
        ),
        (
            "F.cross_entropy({self}.float(), {target}, "
            "label_smoothing={label_smoothing}).to({type})",
            lambda a: (a.weight, a.reduction, a.ignore_index) == (None, 1, -100),
        ),
        (
            "F.cross_entropy({self}, {target}, {weight}, reduction='none').sum()",
            lambda a: (a.reduction, a.ignore_index, a.label_smoothing) == (2, -100, 0.0),
        ),
        (
            "F.nll_loss(F.log_softmax({self}, 1), {target}, {weight}, "
            "ignore_index={ignore_index}, reduction={how!r})",
            lambda a: of_labels(a) and a.label_smoothing == 0.0 and a.self.rank > 2,
        ),
        (
            "F.nll_loss(F.log_softmax({self}, -1), {target}, ignore_index={ignore_index}, "
            "reduction={how!r})",
            lambda a: (
                of_labels(a) and (a.weight, a.label_smoothing) == (None, 0.0) and a.self.rank == 2
            ),
        ),
        (
            "F.nll_loss({self}.log_softmax(dim=-1, dtype=torch.float32), {target}, "
            "reduction={how!r}).to({type})",
            lambda a: (
                of_labels(a)
                and (a.weight, a.label_smoothing, a.ignore_index) == (None, 0.0, -100)
                and a.self.rank == 2
            ),
        ),
        ("F.cross_entropy({self}, {target})", simple),
        ("nn.CrossEntropyLoss()({self}, {target})", simple),
        (
            "F.nll_loss(F.log_softmax({self}, -1), {target})",
            lambda a: simple(a) and of_labels(a) and a.self.rank == 2,
        ),
        (
            "F.nll_loss(torch.log_softmax({self}, dim=1), {target})",
            lambda a: simple(a) and of_labels(a) and a.self.rank == 2,
        ),
        (
            "(-{target} * F.log_softmax({self}, -1)).sum(-1)",
            lambda a: of_probabilities(a, 0),
        ),
        (
            "(-{target} * {self}.log_softmax(1)).sum(1).mean()",
            lambda a: of_probabilities(a, 1),
        ),
        (
            "torch.sum(torch.log_softmax({self}, 1) * -{target})",
            lambda a: of_probabilities(a, 2),
        ),
    ],
    "kl_div": [
        "F.kl_div({self}, {target}, reduction={how!r}, log_target={log_target})",
        "nn.KLDivLoss(reduction={how!r}, log_target={log_target})({self}, {target})",
        (
            "F.kl_div({self}, {target}, reduction='none', log_target={log_target}).sum()",
            lambda a: a.reduction == 2,
        ),
        (
            "{target}.exp() * ({target} - {self})",
            lambda a: a.log_target and a.reduction == 0 and a.target.name == "log_softmax",
        ),
    ],
    "log_softmax": [
        (text, lambda a: a.dtype is None)
        for text in (
            "torch.log_softmax({self}, {dim})",
            "F.log_softmax({self}, dim={dim})",
            "{self}.log_softmax({dim})",
            "nn.LogSoftmax({dim})({self})",
            "F.log_softmax({self}, dim={dim}, dtype=torch.float32).to({type})",
            "torch.log_softmax({self}.float(), {dim}).type_as({self})",
            "{self} - torch.logsumexp({self}, {dim}, keepdim=True)",
            "{self} - {self}.logsumexp({dim}).unsqueeze({dim})",
        )
    ],
}
