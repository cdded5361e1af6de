"""Wordings, as data: for each elementwise ATen operator the texts that compute it.

A text is an expression, or statements and an expression, separated by `; `. Its fields:
  {self} {other} {dim} …   an argument of the operator, by its schema name
  {other.self}             an argument of that argument
  {self:n}                 the same as {self}, in a variable
  {t} {u}                  fresh variables
  {axis} {axes}            the one reduced dimension, from either side; all of them, as a tuple
  {n} {shape} {type}       the number of reduced elements; shape and dtype of the result
  {sibling.other}          the weight of another product of the same value; the text computes both
                           products as one
`nn.Name(…)` is made once, outside the function. A text that does not always compute the value comes
with its condition (conditions.py).
"""

from __future__ import annotations

from fusion_backend.testing.spelling.conditions import (
    adds_bias,
    alpha_is_one,
    has_inverse,
    is_a,
    is_l2_normalisation,
    matrices,
    number,
    overwritable,
    overwritable_through_view,
    tensor,
    two_tensors,
)


def unary(name: str, *more, module: str | None = None) -> list:
    texts = [
        f"torch.{name}({{self}})",
        f"{{self}}.{name}()",
        f"torch.{name}({{self}}.float()).to({{type}})",
        f"{{self}}.float().{name}().type_as({{self}})",
        (f"{{self:n}}.{name}_(); {{self:n}}", overwritable),
        (f"{{t}} = {{self:n}}; {{t}}.{name}_(); {{self:n}}", overwritable),
    ]
    return [*texts, *([f"nn.{module}()({{self}})"] if module else []), *more]


WORDINGS: dict[str, list] = {
    # arithmetic
    "add": [
        ("{self} + {other}", alpha_is_one),
        ("{other} + {self}", alpha_is_one),
        ("torch.add({self}, {other})", alpha_is_one),
        ("torch.add({other}, {self})", lambda a: alpha_is_one(a) and two_tensors(a)),
        ("{self}.add({other})", lambda a: alpha_is_one(a) and tensor(a.self)),
        ("{other}.add({self})", lambda a: alpha_is_one(a) and tensor(a.other)),
        ("{self} - (-{other})", lambda a: alpha_is_one(a) and two_tensors(a)),
        ("torch.add({self}, -{other}, alpha=-1)", lambda a: alpha_is_one(a) and two_tensors(a)),
        ("{self:n} += {other}; {self:n}", lambda a: alpha_is_one(a) and overwritable(a)),
        ("{self:n}.add_({other}); {self:n}", lambda a: alpha_is_one(a) and overwritable(a)),
        ("{t} = {self:n}; {t} += {other}; {t}", lambda a: alpha_is_one(a) and overwritable(a)),
        (
            "{t} = {self:n}.view_as({self:n}); {t} += {other}; {self:n}",
            lambda a: alpha_is_one(a) and overwritable_through_view(a),
        ),
        (
            "torch.addcmul({self}, {other.self}, {other.other})",
            lambda a: (
                alpha_is_one(a) and two_tensors(a) and is_a(a.other, "mul") and two_tensors(a.other)
            ),
        ),
        (
            "torch.add({self}, {other.self}, alpha={other.other})",
            lambda a: (
                alpha_is_one(a)
                and two_tensors(a)
                and is_a(a.other, "mul")
                and number(a.other.other)
            ),
        ),
        (
            "torch.addmm({other}, {self.self}, {self.other})",
            lambda a: adds_bias(a, "matmul", "mm") and matrices(a.self),
        ),
        (
            "F.linear({self.self}, {self.other}.t(), {other})",
            lambda a: adds_bias(a, "matmul", "mm") and a.self.other.rank == 2,
        ),
        ("{self} + {alpha} * {other}", lambda a: not alpha_is_one(a)),
        ("torch.add({self}, {other}, alpha={alpha})", lambda a: not alpha_is_one(a)),
    ],
    "sub": [
        ("{self} - {other}", alpha_is_one),
        ("torch.sub({self}, {other})", alpha_is_one),
        ("{self}.sub({other})", lambda a: alpha_is_one(a) and tensor(a.self)),
        ("torch.subtract({self}, {other})", lambda a: alpha_is_one(a) and tensor(a.self)),
        ("{self} + (-{other})", alpha_is_one),
        ("-{other} + {self}", alpha_is_one),
        ("torch.add({self}, {other}, alpha=-1)", lambda a: alpha_is_one(a) and two_tensors(a)),
        ("torch.rsub({other}, {self})", lambda a: alpha_is_one(a) and two_tensors(a)),
        ("{self:n} -= {other}; {self:n}", lambda a: alpha_is_one(a) and overwritable(a)),
        ("{self:n}.sub_({other}); {self:n}", lambda a: alpha_is_one(a) and overwritable(a)),
    ],
    "rsub": [("{other} - {self}", alpha_is_one), ("-{self} + {other}", alpha_is_one)],
    "mul": [
        "{self} * {other}",
        "{other} * {self}",
        "torch.mul({self}, {other})",
        ("{self}.mul({other})", lambda a: tensor(a.self)),
        ("{other}.mul({self})", lambda a: tensor(a.other)),
        ("torch.multiply({other}, {self})", lambda a: two_tensors(a)),
        ("{self:n} *= {other}; {self:n}", overwritable),
        ("{self:n}.mul_({other}); {self:n}", overwritable),
        ("{t} = {self:n}; {t} *= {other}; {t}", overwritable),
        (
            "{t} = {self:n}.view({self:n}.shape); {t}.mul_({other}); {self:n}",
            overwritable_through_view,
        ),
        ("{self} / {inverse}", has_inverse),
        ("F.silu({self})", lambda a: is_a(a.other, "sigmoid") and a.other.self == a.self),
        ("F.silu({other})", lambda a: is_a(a.self, "sigmoid") and a.self.self == a.other),
        ("{self}.square()", lambda a: a.self == a.other),
        ("{self}.pow(2)", lambda a: a.self == a.other),
        ("{self} / torch.sqrt({other.self})", lambda a: is_a(a.other, "rsqrt")),
    ],
    "div": [
        ("{self} / {other}", lambda a: not a.rounding_mode),
        ("torch.div({self}, {other})", lambda a: not a.rounding_mode),
        ("{self}.div({other})", lambda a: not a.rounding_mode and tensor(a.self)),
        ("torch.true_divide({self}, {other})", lambda a: not a.rounding_mode and tensor(a.self)),
        ("{self:n} /= {other}; {self:n}", lambda a: not a.rounding_mode and overwritable(a)),
        ("{self:n}.div_({other}); {self:n}", lambda a: not a.rounding_mode and overwritable(a)),
        ("{self} * {inverse}", lambda a: not a.rounding_mode and has_inverse(a)),
        (
            "{self} * torch.rsqrt({other.self})",
            lambda a: not a.rounding_mode and is_a(a.other, "sqrt"),
        ),
        (
            "F.normalize({self}, dim={other.self.self.axis}, eps={other.self.min})",
            is_l2_normalisation,
        ),
        (
            "F.normalize({self}, eps={other.self.min}, dim={other.self.self.axis})",
            is_l2_normalisation,
        ),
        (
            "{self} * torch.rsqrt({self}.pow(2).sum({other.self.self.axis}, keepdim=True)"
            ".clamp_min({other.self.min} ** 2))",
            is_l2_normalisation,
        ),
        (
            "{self} / ({self} * {self}).sum({other.self.self.axis}, keepdim=True)"
            ".clamp(min={other.self.min} ** 2).sqrt()",
            is_l2_normalisation,
        ),
        (
            "{t} = {self}.square().sum({other.self.self.axis}, keepdim=True); "
            "{self} * {t}.clamp_min({other.self.min} ** 2) ** -0.5",
            is_l2_normalisation,
        ),
        (
            "{self} * {other.self}.pow(-0.5)",
            lambda a: not a.rounding_mode and is_a(a.other, "sqrt"),
        ),
    ],
    "neg": ["-{self}", "torch.neg({self})", "{self}.neg()", "{self} * -1", "-1.0 * {self}"],
    "abs": unary("abs"),
    "reciprocal": ["1 / {self}", "torch.reciprocal({self})", "{self}.reciprocal()"],
    # powers and roots
    "pow": [
        "{self} ** {exponent}",
        "torch.pow({self}, {exponent})",
        ("{self}.pow({exponent})", lambda a: tensor(a.self)),
        ("{self} * {self}", lambda a: a.exponent == 2),
        ("{self}.square()", lambda a: a.exponent == 2),
        ("torch.square({self})", lambda a: a.exponent == 2),
        ("torch.sqrt({self})", lambda a: a.exponent == 0.5),
        ("torch.rsqrt({self})", lambda a: a.exponent == -0.5),
        ("{self} * {self} * {self}", lambda a: a.exponent == 3),
    ],
    "square": [
        "{self} * {self}",
        "{self}.pow(2)",
        "{self} ** 2",
        "torch.square({self})",
        "{self}.square()",
    ],
    "sqrt": unary("sqrt", "{self} ** 0.5", "{self}.pow(0.5)"),
    "rsqrt": unary(
        "rsqrt",
        "1 / torch.sqrt({self})",
        "1.0 / {self}.sqrt()",
        "{self}.sqrt().reciprocal()",
        "{self} ** -0.5",
        "torch.pow({self}, -0.5)",
    ),
    # elementwise functions
    "exp": unary("exp"),
    "log": unary("log"),
    "tanh": unary("tanh", "F.tanh({self})", module="Tanh"),
    "sigmoid": unary(
        "sigmoid",
        "F.sigmoid({self})",
        "1 / (1 + torch.exp(-{self}))",
        "(1.0 + (-{self}).exp()).reciprocal()",
        module="Sigmoid",
    ),
    "silu": [
        "F.silu({self})",
        "{self} * torch.sigmoid({self})",
        "{self}.sigmoid() * {self}",
        "nn.SiLU()({self})",
        "{self} * (1 / (1 + torch.exp(-{self})))",
        "{self} / (1 + torch.exp(-{self}))",
        "F.silu({self}.float()).to({type})",
        ("F.silu({self:n}, inplace=True)", overwritable),
    ],
    "relu": unary(
        "relu",
        "F.relu({self})",
        ("F.relu({self:n}, inplace=True)", overwritable),
        module="ReLU",
    ),
    "gelu": [
        "F.gelu({self}, approximate={approximate!r})",
        "nn.GELU(approximate={approximate!r})({self})",
        ("F.gelu({self})", lambda a: a.approximate == "none"),
        "F.gelu({self}.float(), approximate={approximate!r}).type_as({self})",
        (
            "0.5 * {self} * (1 + torch.erf({self} / math.sqrt(2)))",
            lambda a: a.approximate == "none",
        ),
        (
            "{self} * 0.5 * (1.0 + torch.erf({self} * 0.7071067811865476))",
            lambda a: a.approximate == "none",
        ),
        (
            "0.5 * {self} * (1 + torch.tanh(math.sqrt(2 / math.pi) * ({self} + 0.044715 * {self} "
            "** 3)))",
            lambda a: a.approximate == "tanh",
        ),
        (
            "0.5 * {self} * (1 + torch.tanh(math.sqrt(2 / math.pi) * ({self} + 0.044715 * "
            "torch.pow({self}, 3.0))))",
            lambda a: a.approximate == "tanh",
        ),
    ],
    "round": [
        (text, lambda a: not a.decimals)
        for text in ("torch.round({self})", "{self}.round()", "torch.round({self}, decimals=0)")
    ]
    + [("{self:n}.round_(); {self:n}", lambda a: not a.decimals and overwritable(a))],
    "clamp": [
        "torch.clamp({self}, {min}, {max})",
        "{self}.clamp({min}, {max})",
        "torch.clip({self}, min={min}, max={max})",
        ("{self}.clamp_min({min}).clamp_max({max})", lambda a: number(a.min) and number(a.max)),
        (
            "torch.clamp_max(torch.clamp_min({self}, {min}), {max})",
            lambda a: number(a.min) and number(a.max),
        ),
        (
            "{self}.clamp_max({max}).clamp_min({min})",
            lambda a: number(a.min) and number(a.max) and a.min <= a.max,
        ),
        ("{self:n}.clamp_({min}, {max}); {self:n}", overwritable),
        ("torch.clamp_min({self}, {min})", lambda a: number(a.min) and a.max is None),
    ],
    "clamp_min": [
        "torch.clamp_min({self}, {min})",
        "{self}.clamp_min({min})",
        "torch.clamp({self}, min={min})",
        ("{self:n}.clamp_min_({min}); {self:n}", overwritable),
    ],
    "clamp_max": [
        "torch.clamp_max({self}, {max})",
        "{self}.clamp_max({max})",
        "torch.clamp({self}, max={max})",
    ],
    "maximum": [
        "torch.maximum({self}, {other})",
        "torch.maximum({other}, {self})",
        "{self}.maximum({other})",
        "torch.max({self}, {other})",
    ],
    "minimum": [
        "torch.minimum({self}, {other})",
        "torch.minimum({other}, {self})",
        "torch.min({self}, {other})",
    ],
    "where": [
        "torch.where({condition}, {self}, {other})",
        ("{self}.where({condition}, {other})", lambda a: tensor(a.self) and a.self.rank),
        ("torch.where(~{condition}, {other}, {self})", lambda a: a.condition.rank),
    ],
    "masked_fill": [
        "{self}.masked_fill({mask}, {value})",
        "torch.masked_fill({self}, {mask}, {value})",
        ("torch.where({mask}, {value}, {self})", lambda a: number(a.value)),
        ("torch.where({mask}, torch.tensor({value}), {self})", lambda a: number(a.value)),
        ("{self:n}.masked_fill_({mask}, {value}); {self:n}", overwritable),
    ],
}
