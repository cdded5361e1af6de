"""What makes a near miss, as data: for each ATen operator texts that compute something else.

Fields and conditions as in wordings.py.
"""

from __future__ import annotations

from fusion_backend.testing.spelling.conditions import (
    both,
    is_a,
    number,
    one_axis,
    packs,
    pair,
    plain,
    strided,
    tensor,
)


def has_number(a) -> bool:
    return tensor(a.self) and number(a.other)


def rooted_sum(a) -> bool:
    """The root of a sum with a number: of a variance and eps."""
    return is_a(a.self, "add") and has_number(a.self)


def second_axis(a) -> bool:
    return one_axis(a) and a.self.rank > 1


def no_affine(a) -> bool:
    return a.weight is None and number(a.eps) and a.input.rank > 1


def whole(a) -> bool:
    return tensor(a.weight) and tensor(a.bias)


def normalised(a) -> bool:
    return len(a.normalized_shape) == 1 and a.weight is None and a.bias is None and a.input.rank > 1


def attends_with(a) -> bool:
    """Attention with a mask and nothing else."""
    return tensor(a.attn_mask) and not (a.dropout_p or a.enable_gqa)


CHANGES: dict[str, list] = {
    # operands, constants, missing parts
    "add": [
        ("{self} - {other}", plain),
        ("{self} * {other}", plain),
        ("{self} + 2 * {other}", plain),
        ("{self} + ({other} * 1.5 + 0.25)", lambda a: plain(a) and number(a.other)),
        ("{self}", lambda a: tensor(a.self) and a.self.shape == a.shape),
    ],
    "sub": [
        ("{other} - {self}", plain),
        ("{self} + {other}", plain),
        ("{self} - 0.5 * {other}", plain),
    ],
    "mul": [
        "{self} + {other}",
        ("{self} / {other}", both),
        ("{self} * ({other} * 1.5 + 0.25)", has_number),
        ("{self} * {other} * {other}", both),
        ("{self} * {self}", lambda a: both(a) and a.self.shape == a.shape),
        ("{self}", lambda a: tensor(a.self) and a.self.shape == a.shape),
        ("{other}", lambda a: tensor(a.other) and a.other.shape == a.shape),
    ],
    "div": [
        ("{other} / {self}", both),
        ("{self} * {other}", None),
        ("torch.floor({self} / {other})", None),
        ("{self} / ({other} * 1.5 + 0.25)", has_number),
        ("{self} / ({other} + 1e-2)", both),
        ("torch.div({self}, {other}, rounding_mode='floor')", None),
    ],
    "neg": ["{self}", "{self}.abs()"],
    "abs": ["{self}", "-{self}", "{self}.square()"],
    "pow": ["{self} ** ({exponent} + 1)", "{self}.abs()"],
    "square": ["{self} ** 3", "{self}.abs()"],
    "sqrt": [
        "torch.rsqrt({self})",
        "{self}",
        ("torch.sqrt({self.self}) + {self.other}", rooted_sum),
    ],
    "rsqrt": [
        "torch.sqrt({self})",
        "1 / {self}",
        ("1 / (torch.sqrt({self.self}) + {self.other})", rooted_sum),
        ("torch.rsqrt({self.self}) + {self.other}", rooted_sum),
    ],
    # siblings
    "exp": [
        "torch.expm1({self})",
        "torch.exp2({self})",
        "torch.exp(-{self})",
        "torch.sinh({self})",
    ],
    "log": ["torch.log1p({self})", "torch.log2({self})"],
    "sigmoid": [
        "torch.tanh({self})",
        "F.hardsigmoid({self})",
        "F.logsigmoid({self})",
        "F.silu({self})",
        "1 / (1 + torch.exp({self}))",
        "1 / (2 + torch.exp(-{self}))",
        "torch.sigmoid(1.702 * {self})",
    ],
    "tanh": [
        "torch.sigmoid({self})",
        "F.hardtanh({self})",
        "F.softsign({self})",
        "torch.atan({self})",
    ],
    "silu": [
        "F.gelu({self})",
        "F.mish({self})",
        "{self} * torch.sigmoid(1.702 * {self})",
        "F.relu({self})",
        "F.hardswish({self})",
    ],
    "gelu": [
        "F.silu({self})",
        "F.gelu({self}, approximate='tanh' if {approximate!r} == 'none' else 'none')",
        "F.relu({self})",
        "{self} * torch.sigmoid(1.702 * {self})",
    ],
    "relu": [
        "F.leaky_relu({self})",
        "F.relu6(4 * {self})",
        "F.elu({self})",
        "F.relu({self}).square()",
        "-F.relu(-{self})",
        "F.softplus({self})",
    ],
    "round": [
        "torch.floor({self})",
        "torch.ceil({self})",
        "torch.trunc({self})",
        "torch.round({self}, decimals=1)",
        "torch.floor({self} + 0.5)",
    ],
    "clamp": [
        ("torch.clamp({self}, {min} + 1, {max})", lambda a: number(a.min)),
        ("torch.clamp({self}, {min}, {max} - 1)", lambda a: number(a.max)),
        ("torch.clamp({self}, min={min})", lambda a: number(a.min) and number(a.max)),
        ("torch.clamp({self} * 0.25, {min}, {max})", lambda a: number(a.min) and number(a.max)),
    ],
    "clamp_min": ["{self}.clamp_max({min})", "{self}.clamp_min({min} + 1)", "{self} + {min}"],
    "maximum": ["torch.minimum({self}, {other})", "{self} + {other}"],
    "minimum": ["torch.maximum({self}, {other})"],
    "to": ["{self}.to(torch.int16)", "{self}.to(torch.float64)"],
    "where": ["torch.where({condition}, {other}, {self})"],
    "masked_fill": [
        "{self}.masked_fill(~{mask}, {value})",
        "{self}.masked_fill({mask}, 0.0)",
        "{self} * (~{mask})",
    ],
    # reductions
    "mean": [
        ("{self}.mean({other_axis}, keepdim={keepdim})", second_axis),
        ("{self}.sum({axes}, keepdim={keepdim})", lambda a: a.axes),
        ("{self}.amax({axes}, keepdim={keepdim})", lambda a: a.axes),
        ("{self}.sum({axes}, keepdim={keepdim}) / ({n} - 1)", lambda a: a.axes),
        ("{self}.mean(None).expand({shape})", lambda a: a.axes and a.self.rank > 1),
    ],
    "sum": [
        ("{self}.sum({other_axis}, keepdim={keepdim})", second_axis),
        ("{self}.mean({axes}, keepdim={keepdim})", lambda a: a.axes),
        ("{self}.abs().sum({axes}, keepdim={keepdim})", lambda a: a.axes),
    ],
    "var": [
        ("{self}.var({axes}, unbiased=True, keepdim={keepdim})", lambda a: a.axes),
        ("{self}.std({axes}, unbiased=False, keepdim={keepdim})", lambda a: a.axes),
        ("{self}.var({other_axis}, correction={correction}, keepdim={keepdim})", second_axis),
        ("{self}.square().mean({axes}, keepdim={keepdim})", lambda a: a.axes),
    ],
    "amax": [
        ("{self}.amin({axes}, keepdim={keepdim})", lambda a: a.axes),
        ("{self}.amax({other_axis}, keepdim={keepdim})", second_axis),
        ("{self}.mean({axes}, keepdim={keepdim})", lambda a: a.axes),
    ],
    "softmax": [
        ("torch.softmax({self}, {other_axis})", second_axis),
        "torch.log_softmax({self}, {dim})",
        "torch.softmax(2 * {self}, {dim})",
        "F.softmin({self}, {dim})",
    ],
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
            "({input} - {input}.mean(-1, keepdim=True)) / ({input}.std(-1, unbiased=False, keepdim=True) + {eps})",
            normalised,
        ),
        (
            "({input} - {input}.mean(-1, keepdim=True)) * torch.rsqrt({input}.var(-1, keepdim=True) + {eps})",
            normalised,
        ),
        (
            "{t} = {input}.var(-1, unbiased=True, keepdim=True); ({input} - {input}.mean(-1, keepdim=True)) "
            "/ ({t} + {eps}).sqrt() "
            "* {weight} + {bias}",
            whole,
        ),
        (
            "({input} - {input}.mean(-1, keepdim=True)) / ({input}.std(-1, correction=0, keepdim=True) + {eps}) "
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
            "F.group_norm({input}, {num_groups}, eps={eps}) * {weight}[:, None, None] - {bias}[:, None, None]",
            whole,
        ),
        "F.layer_norm({input}, {input}.shape[1:], None, None, {eps})",
    ],
    "batch_norm": [
        "F.batch_norm({input}, {running_mean}, {running_var}, {weight}, {bias}, eps={eps} + 0.1)",
        "F.batch_norm({input}, {running_var}, {running_var}, {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, -{running_mean}, {running_var}, {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, {running_mean}, {running_var}.sqrt(), {weight}, {bias}, eps={eps})",
        "F.batch_norm({input}, None, None, {weight}, {bias}, True, 0.1, {eps})",
        (
            "F.batch_norm({input}, {running_mean}, {running_var}, {bias}, {weight}, eps={eps})",
            whole,
        ),
        (
            "F.batch_norm({input}, {running_mean}, {running_var}, None, {bias}, eps={eps})",
            lambda a: tensor(a.weight),
        ),
        (
            "F.batch_norm({input}, {running_mean}, {running_var}, eps={eps}) * {weight}[:, None, None] "
            "* {bias}[:, None, None]",
            whole,
        ),
    ],
    "linalg_vector_norm": [
        ("{self}.norm(p=1, dim={axis}, keepdim={keepdim})", one_axis),
        ("{self}.norm(dim={other_axis}, keepdim={keepdim})", second_axis),
        ("{self}.square().sum({axis}, keepdim={keepdim})", one_axis),
        ("{self}.square().mean({axis}, keepdim={keepdim}).sqrt()", one_axis),
        ("torch.linalg.vector_norm({self}, float('inf'), {axis}, {keepdim})", one_axis),
    ],
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
        ("{t} = ({self} @ torch.cat(({other}, {sibling.other}), 1)).chunk(2, -1); {t}[1]", packs),
        ("{t} = ({self} @ torch.cat(({sibling.other}, {other}), 1)).chunk(2, -1); {t}[0]", packs),
        (
            "{t} = ({self} @ torch.stack(({other}, {sibling.other}), -1).flatten(1)).chunk(2, -1); {t}[0]",
            packs,
        ),
    ],
    # order
    "getitem": [("{self}[1 - {index}]", lambda a: a.index in (0, 1) and is_a_pair(a))],
    "cat": [
        ("torch.cat({tensors}[::-1], {dim})", None),
        ("torch.cat(({first}, -{second}), {dim})", pair),
    ],
    "stack": [
        "torch.stack({tensors}[::-1], {dim})",
        ("torch.stack(({second}, -{first}), {dim})", pair),
    ],
    "slice": [
        ("{self}[..., 1 - {start}::{step}]", strided),
        ("{self}.chunk(2, -1)[{start}]", strided),
    ],
    "bitwise_not": ["{self}", "torch.ones_like({self})"],
    "repeat_interleave": [
        ("{self}.repeat(1, {repeats}, 1, 1)", lambda a: a.rank == 4 and a.self.shape[1] > 1),
        ("{self}[:, :1].roll(1, -1).expand({shape})", lambda a: a.rank == 4),
    ],
    "dropout": [
        "F.dropout({input}, {p} * 0.5, True)",
        "F.dropout({input}, {p}, True) * 2",
        "F.alpha_dropout({input}, {p}, True)",
    ],
    "cross_entropy_loss": [
        "F.cross_entropy({self}, {target}, reduction={how!r}, label_smoothing={label_smoothing} + 0.1)",
        "F.cross_entropy({self}, {target}, reduction='mean' if {how!r} == 'sum' else 'sum')",
        "F.cross_entropy({self}, {target}, reduction={how!r}, ignore_index=1)",
        "F.cross_entropy({self}, {target}, {self}.detach()[0].abs(), reduction={how!r})",
        "F.cross_entropy(2 * {self}, {target}, reduction={how!r}, label_smoothing={label_smoothing})",
        "F.cross_entropy({self}, {self}.softmax(-1), reduction={how!r})",
        "F.nll_loss(F.log_softmax({self}, 0), {target}, reduction={how!r})",
        "F.nll_loss(F.softmax({self}, -1), {target}, reduction={how!r})",
        "F.nll_loss({self}, {target}, reduction={how!r})",
        "F.multi_margin_loss({self}, {target}, reduction={how!r})",
    ],
    "scaled_dot_product_attention": [
        "F.scaled_dot_product_attention({query}, {key}, {value}, {attn_mask}, 0.0, {is_causal}, scale={root} * 2)",
        "F.scaled_dot_product_attention({query}, {value}, {key}, {attn_mask}, 0.0, {is_causal}, scale={root})",
        "F.scaled_dot_product_attention({query}, {key}, {value}, {attn_mask}, {dropout_p}, {is_causal}, scale=1.0, "
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
            "F.scaled_dot_product_attention({query}, {key}, {value}, is_causal=not {is_causal}, scale={root}, "
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

# Done to an interior value {x} before its readers see it.
TAMPERED = [
    "{x}.detach()",
    "{x} + 0.5",
    ("{x}.mul_(0.5); {x}", lambda a: a.fresh),
    ("{x}.add_(0.25); {x}", lambda a: a.fresh),
    ("{x}[..., :1] *= 2; {x}", lambda a: a.fresh and a.rank),
    ("{x}.zero_(); {x}", lambda a: a.fresh),
    ("{x}.roll(1, -1)", lambda a: a.rank),
    ("{x}.round(decimals=1)", lambda a: a.floating),
]


# The same between its readers: what has been computed from it keeps the old value.
BETWEEN = ["{x}.add_(0.25)", "{x}.mul_(-0.5)", "{x}[..., :1] = 0", "{x}.view({x}.shape).neg_()"]

# What an interior value is returned as, beside the results.
RETURNED = ["{x}", "{x}.sum()", "{x}.detach() + 1"]


def is_a_pair(a) -> bool:
    """One of two equal parts."""
    parts = a.self.node.meta["val"]
    return len(parts) == 2 and parts[0].shape == parts[1].shape
