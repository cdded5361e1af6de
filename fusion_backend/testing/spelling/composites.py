"""Wordings of composites: norms, matrix products, dropout, attention, after wordings.py."""

from __future__ import annotations

from fusion_backend.testing.spelling.conditions import (
    can_pack,
    matrices,
    number,
    only_if,
    statistics_given,
    statistics_of_batch,
    tensor,
)


def last_only(a) -> bool:
    return len(a.normalized_shape) == 1


def attends(masked: bool, grouped: bool, dropped: bool = False):
    """Attention with or without an additive mask, shared key heads and dropout; not the
    causal one.
    """

    def when(a) -> bool:
        has_mask = tensor(a.attn_mask) and a.attn_mask.floating
        fine = not a.is_causal and (has_mask or a.attn_mask is None)
        return fine and (has_mask, bool(a.enable_gqa), bool(a.dropout_p)) == (
            masked,
            grouped,
            dropped,
        )

    return when


def usual_scale(a) -> bool:
    return a.scale is None or a.scale == a.query.shape[-1] ** -0.5


def no_affine(a) -> bool:
    return a.weight is None and a.bias is None


def each_channel(a) -> bool:
    """Is each channel a group of its own?"""
    return a.num_groups == a.input.shape[1]


NORMALISED = "{t} = {input} - {input}.mean(-1, keepdim=True); "
AFFINE = {  # what follows a normalisation, by which of weight and bias there are
    (True, True): " * {weight} + {bias}",
    (True, False): " * {weight}",
    (False, True): " + {bias}",
    (False, False): "",
}


def normalisations(*texts: str) -> list:
    """A normalisation by hand, for each presence of weight and bias."""

    def when(weight: bool, bias: bool):
        return lambda a: (
            last_only(a) and (tensor(a.weight), tensor(a.bias)) == (weight, bias) and number(a.eps)
        )

    return [(text + AFFINE[presence], when(*presence)) for text in texts for presence in AFFINE]


def channels(text: str) -> list:
    """A normalisation of [b, c, …], its weight and bias for each channel by hand."""
    texts = []
    for view in ("[:, None, None]", ".view(1, -1, 1, 1)", ".unsqueeze(-1).unsqueeze(-1)"):
        for (weight, bias), after in AFFINE.items():
            after = after.replace("}", "}" + view)

            def fits(a, presence=(weight, bias)):
                return a.rank == 4 and (tensor(a.weight), tensor(a.bias)) == presence

            texts += [(text + after, fits)] if after else []
    return texts


COMPOSITE_WORDINGS: dict[str, list] = {
    # normalisation
    "layer_norm": [
        "F.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps})",
        "torch.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps})",
        "F.layer_norm({input}, tuple({normalized_shape}), weight={weight}, bias={bias}, eps={eps})",
        (
            "nn.LayerNorm({normalized_shape}, eps={eps}, elementwise_affine=False)({input})",
            no_affine,
        ),
        ("F.layer_norm({input}.float(), {normalized_shape}, eps={eps}).to({type})", no_affine),
        (
            "F.layer_norm({input}.float(), {normalized_shape}, {weight}.float(), {bias}.float(), "
            "{eps}).to({type})",
            lambda a: tensor(a.weight) and tensor(a.bias),
        ),
        (
            "F.layer_norm({input}, {normalized_shape}, eps={eps}) * {weight}",
            lambda a: tensor(a.weight) and a.bias is None,
        ),
        (
            "{weight} * F.layer_norm({input}, {normalized_shape}, eps={eps}) + {bias}",
            lambda a: tensor(a.weight) and tensor(a.bias),
        ),
    ]
    + normalisations(
        NORMALISED + "{t} / torch.sqrt({input}.var(-1, unbiased=False, keepdim=True) + {eps})",
        NORMALISED + "{t} * torch.rsqrt({t}.pow(2).mean(-1, keepdim=True) + {eps})",
        NORMALISED + "{t} / ({t}.square().mean(-1, keepdim=True) + {eps}).sqrt()",
        NORMALISED
        + "{u} = (({t} * {t}).sum(-1, keepdim=True) / {input}.shape[-1] + {eps}) ** -0.5; {t} * "
        "{u}",
        "{t}, {u} = torch.var_mean({input}, -1, unbiased=False, keepdim=True); ({input} - {u}) * "
        "({t} + {eps}).rsqrt()",
    ),
    "rms_norm": [
        "F.rms_norm({input}, {normalized_shape}, {weight}, {eps})",
        (
            "F.rms_norm({input}, {normalized_shape}, eps={eps}) * {weight}",
            lambda a: tensor(a.weight),
        ),
    ]
    + [
        (
            text + " * {weight}" * with_weight,
            lambda a, w=with_weight: last_only(a) and tensor(a.weight) == w and number(a.eps),
        )
        for with_weight in (True, False)
        for text in (
            "{input} * torch.rsqrt({input}.pow(2).mean(-1, keepdim=True) + {eps})",
            "{input} / torch.sqrt(({input} * {input}).mean(-1, keepdim=True) + {eps})",
            "{t} = {input}.square().sum(-1, keepdim=True) / {input}.shape[-1]; {input} * ({t} + "
            "{eps}) ** -0.5",
            "{t} = {input}.float(); {u} = {t}.pow(2).mean(-1, keepdim=True); "
            "({t} * torch.rsqrt({u} + {eps})).to({type})",
            "{t} = {input}.float(); {t} = {t} / ({t}.square().mean(-1)[..., None] + {eps}).sqrt(); "
            "{t}.type_as({input})",
        )
    ],
    "group_norm": [
        "F.group_norm({input}, {num_groups}, {weight}, {bias}, {eps})",
        "torch.group_norm({input}, {num_groups}, {weight}, {bias}, {eps})",
        "F.group_norm({input}, num_groups={num_groups}, weight={weight}, bias={bias}, eps={eps})",
        (
            "nn.GroupNorm({num_groups}, {input.shape[1]}, eps={eps}, affine=False)({input})",
            no_affine,
        ),
        ("F.group_norm({input}.float(), {num_groups}, eps={eps}).to({type})", no_affine),
        *channels("F.group_norm({input}, {num_groups}, eps={eps})"),
        ("F.instance_norm({input}, weight={weight}, bias={bias}, eps={eps})", each_channel),
        (
            "torch.instance_norm({input}, {weight}, {bias}, None, None, True, 0.1, {eps}, False)",
            each_channel,
        ),
        (
            "nn.InstanceNorm2d({num_groups}, eps={eps})({input})",
            lambda a: each_channel(a) and no_affine(a) and a.input.rank == 4,
        ),
    ],
    "batch_norm": only_if(
        statistics_given,
        "F.batch_norm({input}, {running_mean}, {running_var}, {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, {running_mean}, {running_var}, {weight}, {bias}, training=False, "
        "eps={eps})",
        "torch.batch_norm({input}, {weight}, {bias}, {running_mean}, {running_var}, False, 0.1, "
        "{eps}, False)",
        *channels("F.batch_norm({input}, {running_mean}, {running_var}, eps={eps})"),
        *channels(
            "({input} - {running_mean}[None, :, None, None]) / torch.sqrt("
            "{running_var}[None, :, None, None] + {eps})"
        ),
        *channels(
            "({input} - {running_mean}.view(-1, 1, 1)) * torch.rsqrt({running_var} + {eps})"
            ".view(1, -1, 1, 1)"
        ),
    )
    + only_if(
        statistics_of_batch,
        "F.batch_norm({input}, None, None, {weight}, {bias}, True, eps={eps})",
        "F.batch_norm({input}, None, None, {weight}, {bias}, training=True, momentum=0.3, "
        "eps={eps})",
        "torch.batch_norm({input}, {weight}, {bias}, None, None, True, 0.1, {eps}, False)",
        *channels("F.batch_norm({input}, None, None, training=True, eps={eps})"),
    ),
    "softmax": [
        ("torch.softmax({self}, {dim})", lambda a: a.dtype is None),
        ("F.softmax({self}, dim={dim})", lambda a: a.dtype is None),
        ("{self}.softmax({dim})", lambda a: a.dtype is None),
        ("nn.Softmax({dim})({self})", lambda a: a.dtype is None),
        ("F.softmax({self}, dim={dim}, dtype=torch.float32).to({type})", lambda a: a.dtype is None),
        ("torch.softmax({self}.float(), {dim}).type_as({self})", lambda a: a.dtype is None),
        (
            "{t} = torch.exp({self} - {self}.amax({dim}, keepdim=True)); {t} / {t}.sum({dim}, "
            "keepdim=True)",
            lambda a: a.dtype is None,
        ),
        (
            "{t} = ({self} - {self}.max({dim}, keepdim=True).values).exp(); {t} / {t}.sum({dim}, "
            "keepdim=True)",
            lambda a: a.dtype is None,
        ),
    ],
    # products
    "linear": [
        "F.linear({input}, {weight}, {bias})",
        ("{input} @ {weight}.t()", lambda a: a.bias is None),
        ("torch.matmul({input}, {weight}.transpose(0, 1))", lambda a: a.bias is None),
        ("{input} @ {weight}.T + {bias}", lambda a: tensor(a.bias)),
        ("{bias} + torch.matmul({input}, {weight}.mT)", lambda a: tensor(a.bias)),
        ("F.linear({input}, {weight}) + {bias}", lambda a: tensor(a.bias)),
        (
            "torch.addmm({bias}, {input}, {weight}.t())",
            lambda a: tensor(a.bias) and a.input.rank == 2,
        ),
        ("{t} = F.linear({input}, {weight}); {t} += {bias}; {t}", lambda a: tensor(a.bias)),
    ],
    "matmul": [
        "{self} @ {other}",
        "torch.matmul({self}, {other})",
        "{self}.matmul({other})",
        ("torch.mm({self}, {other})", matrices),
        ("{self}.mm({other})", matrices),
        (
            "torch.bmm({self}, {other})",
            lambda a: a.self.rank == a.other.rank == 3 and a.self.shape[0] == a.other.shape[0],
        ),
        ("F.linear({self}, {other}.t())", lambda a: a.other.rank == 2 and a.floating),
        ("F.linear({self}, {other}.transpose(0, 1))", lambda a: a.other.rank == 2 and a.floating),
        ("F.linear({self}, {other}.T.contiguous())", lambda a: a.other.rank == 2 and a.floating),
        ('torch.einsum("ij,jk->ik", {self}, {other})', lambda a: matrices(a) and a.floating),
        (
            'torch.einsum("...k,kn->...n", {self}, {other})',
            lambda a: a.other.rank == 2 and a.floating,
        ),
        (
            'torch.einsum("nk,...k->...n", {other}.t(), {self})',
            lambda a: a.other.rank == 2 and a.floating,
        ),
        (
            "{t} = ({self} @ torch.cat(({other}, {sibling.other}), 1)).chunk(2, -1); {t}[0]",
            can_pack,
        ),
        (
            "{t} = ({self} @ torch.cat(({other}, {sibling.other}), 1)).tensor_split(2, -1); {t}[0]",
            can_pack,
        ),
        (
            "{t} = torch.cat(({sibling.other}, {other}), 1); "
            '{t} = torch.einsum("...k,kn->...n", {self}, {t}); '
            "{t} = {t}.view(*{t}.shape[:-1], 2, -1).unbind(-2); {t}[1]",
            can_pack,
        ),
        (
            "{t} = ({self} @ torch.cat(({other}, {sibling.other}), 1)).unflatten(-1, (2, -1)); "
            "{t} = {t}[..., 0, :], {t}[..., 1, :]; {t}[0]",
            can_pack,
        ),
        (
            "{t} = torch.chunk({self} @ torch.cat(({sibling.other}, {other}), -1), 2, dim=-1); "
            "{t}[1]",
            can_pack,
        ),
        (
            "{t} = F.linear({self}, torch.cat(({other}.t(), {sibling.other}.t()))); "
            "{t} = {t}.split({other.shape[1]}, dim=-1); {t}[0]",
            can_pack,
        ),
    ],
    # random
    "dropout": [
        ("F.dropout({input}, {p}, True)", lambda a: a.train),
        ("torch.dropout({input}, {p}, True)", lambda a: a.train),
        ("nn.Dropout({p})({input})", lambda a: a.train),
        ("F.dropout({input}, p={p})", lambda a: a.train),
        ("F.dropout({input:n}, {p}, True, inplace=True)", lambda a: a.train and a.input.fresh),
        ("nn.Dropout({p}, inplace=True)({input:n})", lambda a: a.train and a.input.fresh),
    ],
    # attention
    "scaled_dot_product_attention": [
        "F.scaled_dot_product_attention({query}, {key}, {value}, attn_mask={attn_mask}, "
        "dropout_p={dropout_p}, "
        "is_causal={is_causal}, scale={root}, enable_gqa={enable_gqa})",
        (
            "F.scaled_dot_product_attention({query}, {key}, {value}, {attn_mask}, {dropout_p}, "
            "{is_causal}, "
            "enable_gqa={enable_gqa})",
            usual_scale,
        ),
        (
            "F.scaled_dot_product_attention({query}, {key}.repeat_interleave({groups}, 1), "
            "{value}.repeat_interleave({groups}, dim=1), {attn_mask}, {dropout_p}, {is_causal}, "
            "scale={root})",
            lambda a: a.enable_gqa,
        ),
        (
            "{t} = torch.softmax({query} @ {key}.transpose(-2, -1) * {root}, -1); "
            "F.dropout({t}, {dropout_p}) @ {value}",
            attends(False, False, dropped=True),
        ),
        (
            "{t} = F.softmax({query} @ {key}.mT / {unroot} + {attn_mask}, dim=-1); "
            "torch.dropout({t}, {dropout_p}, True) @ {value}",
            attends(True, False, dropped=True),
        ),
        (
            "{t} = {key}[:, :, None].expand(-1, -1, {groups}, -1, -1).reshape("
            "{query.shape[0]}, -1, *{key}.shape[-2:]); "
            "{u} = {value}[:, :, None].expand(-1, -1, {groups}, -1, -1).flatten(1, "
            "2).contiguous(); "
            "torch.softmax({query} @ {t}.transpose(2, 3) * {root} + {attn_mask}, -1) @ {u}",
            attends(True, True),
        ),
        (
            "torch.softmax({query} @ {key}.mT * {root}, -1, dtype=torch.float32).to({type}) @ "
            "{value}",
            attends(False, False),
        ),
        (
            "{t} = torch.einsum('bhqd,bhkd->bhqk', {query}, {key}) * {root}; "
            "torch.einsum('bhqk,bhkd->bhqd', {t}.softmax(-1), {value})",
            lambda a: (
                attends(False, False)(a) and a.rank == 4 and a.key.shape[1] == a.query.shape[1]
            ),
        ),
        (
            "torch.softmax({query} @ {key}.transpose(-2, -1) * {root}, -1) @ {value}",
            attends(False, False),
        ),
        (
            "F.softmax({query} @ {key}.mT * {root} + {attn_mask}, dim=-1) @ {value}",
            attends(True, False),
        ),
        (
            "{t} = torch.matmul({query}, {key}.mT) * {root}; {t} += {attn_mask}; {t}.softmax(-1) "
            "@ {value}",
            attends(True, False),
        ),
        (
            "{t} = {key}.repeat_interleave({groups}, -3); "
            "torch.softmax({query} @ {t}.mT * {root}, -1) @ {value}.repeat_interleave({groups}, "
            "-3)",
            attends(False, True),
        ),
        (
            "torch.matmul(F.softmax(torch.matmul({query} * {root}, {key}.mT), dim=-1), {value})",
            attends(False, False),
        ),
    ],
}
