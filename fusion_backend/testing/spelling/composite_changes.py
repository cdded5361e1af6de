"""Changes of composites that make a near miss: normalisation, products, dropout, losses, attention.
Continues changes.py.
"""

from __future__ import annotations

from fusion_backend.testing.spelling.conditions import (
    can_pack,
    number,
    only_if,
    statistics_given,
    statistics_of_batch,
    tensor,
)


def no_affine(a) -> bool:
    return a.weight is None and number(a.eps) and a.input.rank > 1


def whole(a) -> bool:
    return tensor(a.weight) and tensor(a.bias)


def normalised(a) -> bool:
    return len(a.normalized_shape) == 1 and a.weight is None and a.bias is None and a.input.rank > 1


def attends_with(a) -> bool:
    """Attention with a mask and nothing else."""
    return tensor(a.attn_mask) and not (a.dropout_p or a.enable_gqa)


COMPOSITE_CHANGES: dict[str, list] = {
    # normalisation
    "layer_norm": [
        "F.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps} + 0.1)",
        (
            "F.layer_norm({input}, {normalized_shape}, None, {bias}, {eps})",
            lambda a: tensor(a.weight),
        ),
        (
            "F.layer_norm({input}, {normalized_shape}, {weight}, None, {eps})",
            lambda a: tensor(a.bias),
        ),
        (
            "F.layer_norm({input}, {normalized_shape}, {bias}, {weight}, {eps})",
            lambda a: tensor(a.bias) and tensor(a.weight),
        ),
        "F.rms_norm({input}, {normalized_shape}, {weight}, {eps})",
        (
            "F.layer_norm({input}, {normalized_shape}, 1 + {weight}, {bias}, {eps})",
            lambda a: tensor(a.weight),
        ),
        (
            "({input} - {input}.mean(-1, keepdim=True)) / ({input}.std(-1, unbiased=False, "
            "keepdim=True) + {eps})",
            normalised,
        ),
        (
            "({input} - {input}.mean(-1, keepdim=True)) * torch.rsqrt({input}.var(-1, "
            "keepdim=True) + {eps})",
            normalised,
        ),
        (
            "{t} = {input}.var(-1, unbiased=True, keepdim=True); ({input} - {input}.mean(-1, "
            "keepdim=True)) "
            "/ ({t} + {eps}).sqrt() "
            "* {weight} + {bias}",
            whole,
        ),
        (
            "({input} - {input}.mean(-1, keepdim=True)) / ({input}.std(-1, correction=0, "
            "keepdim=True) + {eps}) "
            "* {weight} + {bias}",
            whole,
        ),
        ("({input} - {input}.mean({outer}, keepdim=True)) * {weight} + {bias}", whole),
        ("F.layer_norm({input}.mT, {input}.shape[-2:-1], None, None, {eps}).mT", normalised),
        (
            "F.layer_norm({input}, {input}.shape, None, None, {eps})",
            lambda a: normalised(a) and a.input.rank > 1,
        ),
    ],
    "rms_norm": [
        ("{input} / (({input} * {input}).mean(-1, keepdim=True).sqrt() + {eps})", no_affine),
        ("{input} * ({input}.pow(2).mean(-1, keepdim=True).rsqrt() + {eps})", no_affine),
        ("{input} * torch.rsqrt({input}.pow(2).mean({outer}, keepdim=True) + {eps})", no_affine),
        ("{input} * torch.rsqrt({input}.pow(2).sum(-1, keepdim=True) + {eps})", no_affine),
        ("{input} * torch.rsqrt({input}.var(-1, keepdim=True) + {eps})", no_affine),
        "F.rms_norm({input}, {normalized_shape}, {weight}, ({eps} or 0) + 0.1)",
        ("F.rms_norm({input}, {normalized_shape}, None, {eps})", lambda a: tensor(a.weight)),
        (
            "F.rms_norm({input}, {normalized_shape}, 1 + {weight}, {eps})",
            lambda a: tensor(a.weight),
        ),
        "F.layer_norm({input}, {normalized_shape}, {weight}, None, {eps} or 1e-6)",
    ],
    "group_norm": [
        "F.group_norm({input}, {num_groups}, {weight}, {bias}, {eps} + 0.1)",
        "F.group_norm({input}, 1, {weight}, {bias}, {eps})",
        (
            "F.instance_norm({input}, weight={weight}, bias={bias}, eps={eps})",
            lambda a: a.num_groups != a.input.shape[1],
        ),
        "F.instance_norm({input}, eps={eps} + 0.1)",
        ("F.group_norm({input}, {num_groups}, {weight}, None, {eps})", lambda a: tensor(a.bias)),
        ("F.group_norm({input}, {num_groups}, None, {bias}, {eps})", lambda a: tensor(a.weight)),
        ("F.group_norm({input}, {num_groups}, {bias}, {weight}, {eps})", whole),
        (
            "F.group_norm({input}, {num_groups}, 1 + {weight}, {bias}, {eps})",
            lambda a: tensor(a.weight),
        ),
        (
            "F.group_norm({input}, {num_groups}, eps={eps}) * {weight}[0] + {bias}[:, None, None]",
            whole,
        ),
        (
            "F.group_norm({input}, {num_groups}, eps={eps}) * {weight}[:, None, None] - "
            "{bias}[:, None, None]",
            whole,
        ),
        "F.layer_norm({input}, {input}.shape[1:], None, None, {eps})",
    ],
    "batch_norm": only_if(
        statistics_given,
        "F.batch_norm({input}, {running_mean}, {running_var}, {weight}, {bias}, eps={eps} + 0.1)",
        "F.batch_norm({input}, {running_var}, {running_var}, {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, -{running_mean}, {running_var}, {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, {running_mean}, {running_var}.sqrt(), {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, None, None, {weight}, {bias}, True, 0.1, {eps})",
        (
            "({input} - {running_mean}[:, None, None]) / ({running_var}[:, None, None].sqrt() "
            "+ {eps})",
            lambda a: a.input.rank == 4,
        ),
        (
            "({input} + {running_mean}[:, None, None]) / torch.sqrt({running_var}[:, None, None] "
            "+ {eps})",
            lambda a: a.input.rank == 4,
        ),
        (
            "F.batch_norm({input}, {running_mean}, {running_var}, {bias}, {weight}, eps={eps})",
            whole,
        ),
        (
            "F.batch_norm({input}, {running_mean}, {running_var}, None, {bias}, eps={eps})",
            lambda a: tensor(a.weight),
        ),
        (
            "F.batch_norm({input}, {running_mean}, {running_var}, eps={eps}) * {weight}[:, None, "
            "None] "
            "* {bias}[:, None, None]",
            whole,
        ),
    )
    + only_if(
        statistics_of_batch,
        "F.batch_norm({input}, None, None, {weight}, {bias}, True, eps={eps} + 0.1)",
        "F.batch_norm({input}.detach(), None, None, {weight}, {bias}, True, eps={eps})",
        "F.batch_norm({input}[:1].expand_as({input}), None, None, {weight}, {bias}, True, "
        "eps={eps})",
        (
            "F.instance_norm({input}, None, None, {weight}, {bias}, eps={eps})",
            lambda a: a.input.rank > 2,
        ),
        ("F.batch_norm({input}, None, None, {bias}, {weight}, True, eps={eps})", whole),
        (
            "F.batch_norm({input}, None, None, None, {bias}, True, eps={eps})",
            lambda a: tensor(a.weight),
        ),
    ),
    # products
    "linear": [
        ("F.linear({input}, {weight})", lambda a: tensor(a.bias)),
        "F.linear({input}, -{weight}, {bias})",
        "F.linear(2 * {input}, {weight}, {bias})",
    ],
    "matmul": [
        "{self} @ -{other}",
        "(2 * {self}) @ {other}",
        "{self} @ {other}.abs()",
        (
            "{self} @ {other}.mT",
            lambda a: a.other.rank == 2 and a.other.shape[0] == a.other.shape[1],
        ),
        (
            "{t} = ({self} @ torch.cat(({other}, {sibling.other}), 1)).chunk(2, -1); {t}[1]",
            can_pack,
        ),
        (
            "{t} = ({self} @ torch.cat(({sibling.other}, {other}), 1)).chunk(2, -1); {t}[0]",
            can_pack,
        ),
        (
            "{t} = ({self} @ torch.cat(({other}, {sibling.other}), 1)).unflatten(-1, (-1, 2)); "
            "{t} = {t}.unbind(-1); {t}[0]",
            can_pack,
        ),
        (
            'torch.einsum("...k,nk->...n", {self}, {other})',
            lambda a: a.other.rank == 2 and a.other.shape[0] == a.other.shape[1] and a.floating,
        ),
        (
            "{t} = ({self} @ torch.stack(({other}, {sibling.other}), -1).flatten(1)).chunk(2, "
            "-1); {t}[0]",
            can_pack,
        ),
    ],
    # random
    "dropout": [
        "F.dropout({input}, {p} * 0.5, True)",
        "F.dropout({input}, {p}, True) * 2",
        "F.alpha_dropout({input}, {p}, True)",
    ],
    # losses
    "cross_entropy_loss": [
        "F.cross_entropy({self}, {target}, reduction={how!r}, label_smoothing={label_smoothing} "
        "+ 0.1)",
        "F.cross_entropy({self}, {target}, reduction='mean' if {how!r} == 'sum' else 'sum')",
        "F.cross_entropy({self}, {target}, reduction={how!r}, ignore_index=1)",
        "F.cross_entropy({self}, {target}, {self}.detach()[0].abs(), reduction={how!r})",
        "F.cross_entropy(2 * {self}, {target}, reduction={how!r}, "
        "label_smoothing={label_smoothing})",
        "F.cross_entropy({self}, {self}.softmax(-1), reduction={how!r})",
        "F.nll_loss(F.log_softmax({self}, 0), {target}, reduction={how!r})",
        "F.nll_loss(F.softmax({self}, -1), {target}, reduction={how!r})",
        "F.nll_loss({self}, {target}, reduction={how!r})",
        "F.multi_margin_loss({self}, {target}, reduction={how!r})",
    ],
    "kl_div": [
        "F.kl_div({self}, {target}, reduction={how!r}, log_target=not {log_target})",
        "F.kl_div({target}, {self}, reduction={how!r}, log_target={log_target})",
        "F.kl_div({self}.exp(), {target}, reduction={how!r}, log_target={log_target})",
        "F.kl_div({self}, 2 * {target}, reduction={how!r}, log_target={log_target})",
        "F.mse_loss({self}, {target}, reduction={how!r})",
    ],
    # attention
    "scaled_dot_product_attention": [
        "F.scaled_dot_product_attention({query}, {key}, {value}, {attn_mask}, 0.0, {is_causal}, "
        "scale={root} * 2)",
        "F.scaled_dot_product_attention({query}, {value}, {key}, {attn_mask}, 0.0, {is_causal}, "
        "scale={root})",
        "F.scaled_dot_product_attention({query}, {key}, {value}, {attn_mask}, {dropout_p}, "
        "{is_causal}, scale=1.0, "
        "enable_gqa={enable_gqa})",
        (
            "F.scaled_dot_product_attention({query}, {key}, {value}, ~{attn_mask}, scale={root})",
            lambda a: attends_with(a) and not a.attn_mask.floating,
        ),
        (
            "F.scaled_dot_product_attention({query}, {key}, {value}, -{attn_mask}, scale={root})",
            lambda a: attends_with(a) and a.attn_mask.floating,
        ),
        ("F.scaled_dot_product_attention({query}, {key}, {value}, scale={root})", attends_with),
        (
            "F.scaled_dot_product_attention({query}, {key}, {value}, is_causal=not {is_causal}, "
            "scale={root}, "
            "enable_gqa={enable_gqa})",
            lambda a: a.attn_mask is None and not a.dropout_p,
        ),
        (
            "torch.softmax({query} @ {key}.mT * {root}, -2) @ {value}",
            lambda a: not a.enable_gqa and not a.dropout_p and not a.is_causal,
        ),
        (
            "torch.softmax(({query} @ {key}.mT + {attn_mask}) * {root}, -1) @ {value}",
            lambda a: attends_with(a) and a.attn_mask.floating,
        ),
        (
            "torch.softmax({query} @ {key}.mT, -1) @ {value}",
            lambda a: a.attn_mask is None and not (a.enable_gqa or a.dropout_p or a.is_causal),
        ),
        ("torch.softmax({query} @ {key}.mT * {root}, -1) @ {key}", lambda a: not a.enable_gqa),
    ],
}
