"""Changes that make a near miss, as data: for each ATen operator texts that compute something else.

Fields and conditions are those of wordings.py.
"""

from __future__ import annotations

from fusion_backend.testing.spelling.conditions import (
    alpha_is_one,
    every_other_element,
    is_a,
    is_l2_normalisation,
    number,
    one_axis,
    pair_on_last_axis,
    splits_in_halves,
    tensor,
    two_tensors,
)


def has_number(a) -> bool:
    return tensor(a.self) and number(a.other)


def rooted_sum(a) -> bool:
    """The root of a sum with a number: of a variance and eps."""
    return is_a(a.self, "add") and has_number(a.self)


def second_axis(a) -> bool:
    return one_axis(a) and a.self.rank > 1


def is_a_pair(a) -> bool:
    """One of two equal parts."""
    parts = a.self.node.meta["val"]
    return len(parts) == 2 and parts[0].shape == parts[1].shape


CHANGES: dict[str, list] = {
    # operands, constants, missing parts
    "add": [
        ("{self} - {other}", alpha_is_one),
        ("{self} * {other}", alpha_is_one),
        ("{self} + 2 * {other}", alpha_is_one),
        ("{self} + ({other} * 1.5 + 0.25)", lambda a: alpha_is_one(a) and number(a.other)),
        ("{self}", lambda a: tensor(a.self) and a.self.shape == a.shape),
    ],
    "sub": [
        ("{other} - {self}", alpha_is_one),
        ("{self} + {other}", alpha_is_one),
        ("{self} - 0.5 * {other}", alpha_is_one),
    ],
    "mul": [
        "{self} + {other}",
        ("{self} / {other}", two_tensors),
        ("{self} * ({other} * 1.5 + 0.25)", has_number),
        ("{self} * {other} * {other}", two_tensors),
        ("{self} * {self}", lambda a: two_tensors(a) and a.self.shape == a.shape),
        ("{self}", lambda a: tensor(a.self) and a.self.shape == a.shape),
        ("{other}", lambda a: tensor(a.other) and a.other.shape == a.shape),
    ],
    "div": [
        ("{other} / {self}", two_tensors),
        ("{self} * {other}", None),
        ("torch.floor({self} / {other})", None),
        ("{self} / ({other} * 1.5 + 0.25)", has_number),
        ("{self} / ({other} + 1e-2)", two_tensors),
        ("torch.div({self}, {other}, rounding_mode='floor')", None),
        (
            "{self} * torch.rsqrt({self}.pow(2).sum(-1, keepdim=True) + 0.1)",
            is_l2_normalisation,
        ),
        (
            "{self} * torch.rsqrt({self}.pow(2).mean(-1, keepdim=True).clamp_min(1e-6))",
            is_l2_normalisation,
        ),
        (
            "{self} / ({self} * {self}).sum(-1, keepdim=True).clamp_max(0.5).sqrt()",
            is_l2_normalisation,
        ),
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
    "log_softmax": [
        ("torch.log_softmax({self}, {other_axis})", second_axis),
        "torch.softmax({self}, {dim})",
        "torch.log_softmax(2 * {self}, {dim})",
        "F.logsigmoid({self})",
        "F.softmin({self}, {dim}).log()",
    ],
    "logsumexp": [
        ("torch.logsumexp({self}, {other_axis}, True).mean({axes}, {keepdim})", second_axis),
        "torch.logsumexp(2 * {self}, {dim}, {keepdim})",
        "torch.logsumexp({self}, {dim}, {keepdim}) + 0.5",
        ("{self}.amax({axes}, {keepdim})", lambda a: a.axes),
        ("{self}.exp().sum({axes}, {keepdim})", lambda a: a.axes),
    ],
    "gather": [
        "{self}.amax({dim}, keepdim=True)",
        "{self}.gather({dim}, {index}).square()",
        "{self}.flip({dim}).gather({dim}, {index})",
    ],
    "take_along_dim": [
        "{self}.mean({dim}, keepdim=True)",
        "torch.take_along_dim({self}, {indices} + 1, {dim})",
    ],
    "index": ["{self}[(*{indices},)].square()", "{self}.flip(-1)[(*{indices},)]"],
    "arange": ["torch.arange({end}).flip(0)", "torch.arange({end}) * 0"],
    "linalg_vector_norm": [
        ("{self}.norm(p=1, dim={axis}, keepdim={keepdim})", one_axis),
        ("{self}.norm(dim={other_axis}, keepdim={keepdim})", second_axis),
        ("{self}.square().sum({axis}, keepdim={keepdim})", one_axis),
        ("{self}.square().mean({axis}, keepdim={keepdim}).sqrt()", one_axis),
        ("torch.linalg.vector_norm({self}, float('inf'), {axis}, {keepdim})", one_axis),
    ],
    # order
    "getitem": [("{self}[1 - {index}]", lambda a: a.index in (0, 1) and is_a_pair(a))],
    "cat": [
        ("torch.cat({tensors}[::-1], {dim})", None),
        ("torch.cat(({first}, -{second}), {dim})", pair_on_last_axis),
    ],
    "stack": [
        "torch.stack({tensors}[::-1], {dim})",
        ("torch.stack(({second}, -{first}), {dim})", pair_on_last_axis),
    ],
    "chunk": [
        ("{self}.unflatten(-1, (-1, 2)).unbind(-1)", splits_in_halves),
        ("({self}.unflatten(-1, (2, -1)).unbind(-2)[::-1])", splits_in_halves),
    ],
    "slice": [
        ("{self}[..., 1 - {start}::{step}]", every_other_element),
        ("{self}.chunk(2, -1)[{start}]", every_other_element),
    ],
    "bitwise_not": ["{self}", "torch.ones_like({self})"],
    "repeat_interleave": [
        ("{self}.repeat(1, {repeats}, 1, 1)", lambda a: a.rank == 4 and a.self.shape[1] > 1),
        ("{self}[:, :1].roll(1, -1).expand({shape})", lambda a: a.rank == 4),
    ],
}

# What is done to an interior value {x} before its readers see it.
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

# What is done to {x} between its readers: what was computed from it before has the old value.
BETWEEN = ["{x}.add_(0.25)", "{x}.mul_(-0.5)", "{x}[..., :1] = 0", "{x}.view({x}.shape).neg_()"]

# As what an interior value {x} is returned, in addition to the results. Not as its sum: that of
# normalised values is 0 but for rounding, against which any error is large.
RETURNED = ["{x}", "{x}.square().sum()", "{x}.detach() + 1"]
