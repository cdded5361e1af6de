"""How composites are written: normalisation, matrix products, attention, losses. Continues wordings.py."""

from __future__ import annotations

from fusion_backend.spelling.wordings import matrices, number, tensor


def last_only(a) -> bool:
    return len(a.normalized_shape) == 1


def attends(masked: bool, grouped: bool):
    """Attention without dropout, with or without an additive mask and shared key heads."""

    def when(a) -> bool:
        given = tensor(a.attn_mask) and a.attn_mask.floating
        fine = not a.dropout_p and not a.is_causal and (given or a.attn_mask is None)
        return fine and (given, bool(a.enable_gqa)) == (masked, grouped)

    return when


def simple(a) -> bool:
    return (a.weight, a.reduction, a.ignore_index, a.label_smoothing) == (None, 1, -100, 0.0)


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
        return lambda a: last_only(a) and (tensor(a.weight), tensor(a.bias)) == (weight, bias) and number(a.eps)

    return [(text + AFFINE[given], when(*given)) for text in texts for given in AFFINE]


COMPOSED: dict[str, list] = {
    # normalisation
    "layer_norm": [
        "F.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps})",
        "torch.layer_norm({input}, {normalized_shape}, {weight}, {bias}, {eps})",
        "F.layer_norm({input}, tuple({normalized_shape}), weight={weight}, bias={bias}, eps={eps})",
        (
            "nn.LayerNorm({normalized_shape}, eps={eps}, elementwise_affine=False)({input})",
            lambda a: a.weight is None and a.bias is None,
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
        NORMALISED + "{u} = (({t} * {t}).sum(-1, keepdim=True) / {input}.shape[-1] + {eps}) ** -0.5; {t} * {u}",
        "{t}, {u} = torch.var_mean({input}, -1, unbiased=False, keepdim=True); ({input} - {u}) * ({t} + {eps}).rsqrt()",
    ),
    "rms_norm": [
        "F.rms_norm({input}, {normalized_shape}, {weight}, {eps})",
        ("F.rms_norm({input}, {normalized_shape}, eps={eps}) * {weight}", lambda a: tensor(a.weight)),
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
            "{t} = {input}.square().sum(-1, keepdim=True) / {input}.shape[-1]; {input} * ({t} + {eps}) ** -0.5",
        )
    ],
    "softmax": [
        ("torch.softmax({self}, {dim})", lambda a: a.dtype is None),
        ("F.softmax({self}, dim={dim})", lambda a: a.dtype is None),
        ("{self}.softmax({dim})", lambda a: a.dtype is None),
        ("nn.Softmax({dim})({self})", lambda a: a.dtype is None),
        (
            "{t} = torch.exp({self} - {self}.amax({dim}, keepdim=True)); {t} / {t}.sum({dim}, keepdim=True)",
            lambda a: a.dtype is None,
        ),
        (
            "{t} = ({self} - {self}.max({dim}, keepdim=True).values).exp(); {t} / {t}.sum({dim}, keepdim=True)",
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
        ("torch.addmm({bias}, {input}, {weight}.t())", lambda a: tensor(a.bias) and a.input.rank == 2),
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
    ],
    # random
    "dropout": [
        ("F.dropout({input}, {p}, True)", lambda a: a.train),
        ("torch.dropout({input}, {p}, True)", lambda a: a.train),
        ("nn.Dropout({p})({input})", lambda a: a.train),
        ("F.dropout({input}, p={p})", lambda a: a.train),
    ],
    # losses
    "cross_entropy_loss": [
        ("F.cross_entropy({self}, {target})", simple),
        ("nn.CrossEntropyLoss()({self}, {target})", simple),
        ("F.nll_loss(F.log_softmax({self}, -1), {target})", lambda a: simple(a) and a.self.rank == 2),
        ("F.nll_loss(torch.log_softmax({self}, dim=1), {target})", lambda a: simple(a) and a.self.rank == 2),
    ],
    "scaled_dot_product_attention": [
        "F.scaled_dot_product_attention({query}, {key}, {value}, attn_mask={attn_mask}, dropout_p={dropout_p}, "
        "is_causal={is_causal}, scale={root}, enable_gqa={enable_gqa})",
        ("torch.softmax({query} @ {key}.transpose(-2, -1) * {root}, -1) @ {value}", attends(False, False)),
        ("F.softmax({query} @ {key}.mT * {root} + {attn_mask}, dim=-1) @ {value}", attends(True, False)),
        (
            "{t} = torch.matmul({query}, {key}.mT) * {root}; {t} += {attn_mask}; {t}.softmax(-1) @ {value}",
            attends(True, False),
        ),
        (
            "{t} = {key}.repeat_interleave({groups}, -3); "
            "torch.softmax({query} @ {t}.mT * {root}, -1) @ {value}.repeat_interleave({groups}, -3)",
            attends(False, True),
        ),
        ("torch.matmul(F.softmax(torch.matmul({query} * {root}, {key}.mT), dim=-1), {value})", attends(False, False)),
    ],
}
