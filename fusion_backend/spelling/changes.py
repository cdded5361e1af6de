"""What makes a near miss, as data: for each ATen operator texts that compute something else.

Fields and conditions as in wordings.py.
"""

from __future__ import annotations

from fusion_backend.spelling.wordings import both, is_a, number, one_axis, plain, tensor


def has_number(a) -> bool:
    return tensor(a.self) and number(a.other)


def rooted_sum(a) -> bool:
    """The root of a sum with a number: of a variance and eps."""
    return is_a(a.self, "add") and has_number(a.self)


def second_axis(a) -> bool:
    return one_axis(a) and a.self.rank > 1


def normalised(a) -> bool:
    return len(a.normalized_shape) == 1 and a.weight is None and a.bias is None


CHANGES: dict[str, list] = {
    # operands, constants, missing parts
    "add": [
        ("{self} - {other}", plain),
        ("{self} * {other}", plain),
        ("{self} + 2 * {other}", plain),
        ("{self} + ({other} * 1.5 + 0.25)", lambda a: plain(a) and number(a.other)),
        ("{self}", lambda a: tensor(a.self) and a.self.shape == a.shape),
    ],
    "sub": [("{other} - {self}", plain), ("{self} + {other}", plain), ("{self} - 0.5 * {other}", plain)],
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
    "sqrt": ["torch.rsqrt({self})", "{self}", ("torch.sqrt({self.self}) + {self.other}", rooted_sum)],
    "rsqrt": [
        "torch.sqrt({self})",
        "1 / {self}",
        ("1 / (torch.sqrt({self.self}) + {self.other})", rooted_sum),
        ("torch.rsqrt({self.self}) + {self.other}", rooted_sum),
    ],
    # siblings
    "exp": ["torch.expm1({self})", "torch.exp2({self})", "torch.exp(-{self})", "torch.sinh({self})"],
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
    "tanh": ["torch.sigmoid({self})", "F.hardtanh({self})", "F.softsign({self})", "torch.atan({self})"],
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
    "masked_fill": ["{self}.masked_fill(~{mask}, {value})", "{self}.masked_fill({mask}, 0.0)", "{self} * (~{mask})"],
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
        ("F.layer_norm({input}, {normalized_shape}, None, {bias}, {eps})", lambda a: tensor(a.weight)),
        ("F.layer_norm({input}, {normalized_shape}, {weight}, None, {eps})", lambda a: tensor(a.bias)),
        (
            "F.layer_norm({input}, {normalized_shape}, {bias}, {weight}, {eps})",
            lambda a: tensor(a.bias) and tensor(a.weight),
        ),
        "F.rms_norm({input}, {normalized_shape}, {weight}, {eps})",
        ("F.layer_norm({input}, {normalized_shape}, 1 + {weight}, {bias}, {eps})", lambda a: tensor(a.weight)),
        (
            "({input} - {input}.mean(-1, keepdim=True)) / ({input}.std(-1, unbiased=False, keepdim=True) + {eps})",
            normalised,
        ),
        ("({input} - {input}.mean(-1, keepdim=True)) * torch.rsqrt({input}.var(-1, keepdim=True) + {eps})", normalised),
        ("F.layer_norm({input}, {input}.shape, None, None, {eps})", lambda a: normalised(a) and a.input.rank > 1),
    ],
    "rms_norm": [
        "F.rms_norm({input}, {normalized_shape}, {weight}, ({eps} or 0) + 0.1)",
        ("F.rms_norm({input}, {normalized_shape}, None, {eps})", lambda a: tensor(a.weight)),
        ("F.rms_norm({input}, {normalized_shape}, 1 + {weight}, {eps})", lambda a: tensor(a.weight)),
        "F.layer_norm({input}, {normalized_shape}, {weight}, None, {eps} or 1e-6)",
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
        ("{self} @ {other}.mT", lambda a: a.other.rank == 2 and a.other.shape[0] == a.other.shape[1]),
    ],
    # order
    "getitem": [("{self}[1 - {index}]", lambda a: a.index in (0, 1) and is_a_pair(a))],
    "cat": [("torch.cat({tensors}[::-1], {dim})", None)],
    "dropout": [
        "F.dropout({input}, {p} * 0.5, True)",
        "F.dropout({input}, {p}, True) * 2",
        "F.alpha_dropout({input}, {p}, True)",
    ],
    "cross_entropy_loss": [
        "F.cross_entropy({self}, {target}, label_smoothing=0.1)",
        "F.cross_entropy({self}, {target}, reduction='sum')",
    ],
    "scaled_dot_product_attention": [
        "F.scaled_dot_product_attention({query}, {key}, {value}, {attn_mask}, 0.0, {is_causal}, scale={root} * 2)",
        "F.scaled_dot_product_attention({query}, {value}, {key}, {attn_mask}, 0.0, {is_causal}, scale={root})",
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


def is_a_pair(a) -> bool:
    """One of two equal parts."""
    parts = a.self.node.meta["val"]
    return len(parts) == 2 and parts[0].shape == parts[1].shape
