"""No-ops on a value, and frames around the whole code, as data. The fields are those of
wordings.py.
"""

from __future__ import annotations

# No-ops on the value of the variable {x}.
DISGUISES = [
    "{x}.contiguous()",
    ("{x}.view({x}.shape)", lambda a: a.contiguous),
    "{x}.reshape({x}.shape)",
    ("{x}.view({x}.size(0), -1)", lambda a: a.contiguous and a.rank == 2),
    ("{x}.view(-1, {x}.shape[-1]).view({x}.shape)", lambda a: a.contiguous),
    ("{x}.reshape(-1, {x}.size(-1)).view_as({x})", lambda a: a.rank >= 2),
    ("{x}.flatten(0, 1).unflatten(0, {x}.shape[:2])", lambda a: a.rank >= 2),
    "{x}[...]",
    "{x}[:]",
    "{x}[None].squeeze(0)",
    "{x}[None][0]",
    "{x}.to({x}.dtype)",
    ("{x}.float().to({type})", lambda a: a.floating and a.type.itemsize <= 4),
    "{x}.type_as({x})",
    "{x}.unsqueeze(0).squeeze(0)",
    "{x}.unsqueeze(-1).squeeze(-1)",
    ("{x}.transpose(0, 1).transpose(0, 1)", lambda a: a.rank >= 2),
    ("{x}.mT.mT", lambda a: a.rank >= 2),
    ("F.dropout({x}, 0.1, training=False)", lambda a: a.floating),
    ("F.dropout({x}, p=0.0)", lambda a: a.floating),
    ("nn.Dropout(0.0)({x})", lambda a: a.floating),
    ("nn.Dropout(0.3).eval()({x})", lambda a: a.floating),
    "nn.Identity()({x})",
    ("{x} * 1", lambda a: a.floating),
    "{x}.clone()",
    "{x}.expand_as({x})",
    "{x}",
]


def indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


# A frame makes the body of a function from lines of code, their result and their arguments.
FRAMES = {
    "plain": lambda body, out, arguments: [*body, f"return {out}"],
    "inner function": lambda body, out, arguments: [
        f"def inner({arguments}):", *indented([*body, f"return {out}"]),
        f"return inner({arguments})",
    ],
    "checkpoint": lambda body, out, arguments: [
        f"def inner({arguments}):", *indented([*body, f"return {out}"]),
        f"return torch.utils.checkpoint.checkpoint(inner, {arguments}, use_reentrant=False)",
    ],
    "autocast off": lambda body, out, arguments: [
        'with torch.autocast("cpu", enabled=False):', *indented([*body, f"result = {out}"]),
        "return result"
    ],
    "autocast": lambda body, out, arguments: [
        'with torch.autocast("cpu", torch.bfloat16):', *indented([*body, f"result = {out}"]),
        "return result"
    ],
}  # fmt: skip
