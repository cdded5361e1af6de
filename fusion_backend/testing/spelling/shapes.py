"""Wordings of reductions, reshapes and casts. Continues wordings.py."""

from __future__ import annotations

from fusion_backend.testing.spelling.conditions import (
    biased_variance,
    every_other_element,
    keeps_dims,
    last_axis,
    one_axis,
    one_element_a_row,
    pair_on_last_axis,
    reduces_as_is,
    repeats_heads,
    splits_in_halves,
)

SHAPE_WORDINGS: dict[str, list] = {
    # reductions
    "mean": [
        ("{self}.mean({axes}, keepdim={keepdim})", reduces_as_is),
        ("torch.mean({self}, dim={axes}, keepdim={keepdim})", reduces_as_is),
        ("{self}.mean({axis}, {keepdim})", lambda a: reduces_as_is(a) and one_axis(a)),
        ("{self}.mean({axis}).unsqueeze({axis})", lambda a: keeps_dims(a) and one_axis(a)),
        ("{self}.mean({axis})[..., None]", lambda a: keeps_dims(a) and last_axis(a)),
        (
            "{self}.float().mean({axes}, keepdim={keepdim}).to({type})",
            lambda a: reduces_as_is(a) and a.floating,
        ),
        ("{self}.sum({axes}, keepdim={keepdim}) / {n}", reduces_as_is),
        ("torch.sum({self}, {axes}, keepdim={keepdim}).div({n})", reduces_as_is),
        (
            "{self}.sum({axis}, keepdim={keepdim}) / {self}.shape[{axis}]",
            lambda a: reduces_as_is(a) and one_axis(a),
        ),
    ],
    "sum": [
        ("{self}.sum({axes}, keepdim={keepdim})", reduces_as_is),
        ("torch.sum({self}, {axes}, {keepdim})", reduces_as_is),
        ("{self}.sum({axis}).unsqueeze({axis})", lambda a: keeps_dims(a) and one_axis(a)),
        ("{self}.sum({axis})[..., None]", lambda a: keeps_dims(a) and last_axis(a)),
    ],
    "var": [
        (
            "{self}.var({axes}, correction={correction}, keepdim={keepdim})",
            lambda a: a.axes is not None,
        ),
        ("torch.var({self}, {axes}, unbiased=False, keepdim={keepdim})", biased_variance),
        (
            "{t} = {self} - {self}.mean({axes}, keepdim=True); {t}.pow(2).mean({axes}, "
            "keepdim={keepdim})",
            biased_variance,
        ),
        (
            "{t} = {self} - {self}.mean({axes}, keepdim=True); ({t} * {t}).mean({axes}, "
            "keepdim={keepdim})",
            biased_variance,
        ),
        (
            "{t} = ({self} - {self}.mean({axes}, keepdim=True)).square(); {t}.sum({axes}, "
            "keepdim={keepdim}) / {n}",
            biased_variance,
        ),
        (
            "{self}.var({axis}, unbiased=False).unsqueeze({axis})",
            lambda a: biased_variance(a) and one_axis(a) and a.keepdim,
        ),
        ("torch.var_mean({self}, {axes}, correction=0, keepdim={keepdim})[0]", biased_variance),
    ],
    "amax": [
        ("{self}.amax({axes}, keepdim={keepdim})", lambda a: a.axes is not None),
        ("torch.amax({self}, {axes}, {keepdim})", lambda a: a.axes is not None),
        ("{self}.max({axis}, keepdim={keepdim}).values", one_axis),
        ("torch.max({self}, {axis}, keepdim={keepdim})[0]", one_axis),
        ("{self}.amax({axis}).unsqueeze({axis})", lambda a: one_axis(a) and a.keepdim),
        ("{self}.amax({axis})[..., None]", lambda a: last_axis(a) and a.keepdim),
    ],
    "logsumexp": [
        "torch.logsumexp({self}, {dim}, keepdim={keepdim})",
        "{self}.logsumexp({axes}, {keepdim})",
        "torch.logsumexp({self}.float(), {axes}, {keepdim}).to({type})",
        ("{self}.logsumexp({axis}).unsqueeze({axis})", lambda a: one_axis(a) and a.keepdim),
        ("torch.logsumexp({self}, {axis})[..., None]", lambda a: last_axis(a) and a.keepdim),
    ],
    "linalg_vector_norm": [
        (
            "torch.linalg.vector_norm({self}, {ord}, {axes}, {keepdim})",
            lambda a: a.axes is not None,
        ),
        ("torch.linalg.norm({self}, dim={axis}, keepdim={keepdim})", one_axis),
        ("{self}.norm(p=2, dim={axis}, keepdim={keepdim})", one_axis),
        ("torch.norm({self}, dim={axis}, keepdim={keepdim})", one_axis),
        ("{self}.norm(dim={axis}).unsqueeze({axis})", lambda a: one_axis(a) and a.keepdim),
        ("{self}.pow(2).sum({axes}, keepdim={keepdim}).sqrt()", lambda a: a.axes is not None),
        ("torch.sqrt(({self} * {self}).sum({axis}, keepdim={keepdim}))", one_axis),
        ("{self}.square().sum({axis})[..., None] ** 0.5", lambda a: last_axis(a) and a.keepdim),
    ],
    # order and shape
    "t": ["{self}.t()", "{self}.T", "{self}.transpose(0, 1)", "{self}.mT", "{self}.permute(1, 0)"],
    "transpose": [
        "{self}.transpose({dim0}, {dim1})",
        "torch.transpose({self}, {dim1}, {dim0})",
        "{self}.swapaxes({dim0}, {dim1})",
    ],
    "mT": [
        "{self}.mT",
        "{self}.transpose(-2, -1)",
        "torch.transpose({self}, -1, -2)",
        "{self}.swapaxes(-1, -2)",
        ("{self}.permute(0, 1, 3, 2)", lambda a: a.rank == 4),
    ],
    "permute": ["{self}.permute({dims})", "torch.permute({self}, {dims})"],
    "flatten": [
        "{self}.flatten({start_dim})",
        "torch.flatten({self}, {start_dim}, {end_dim})",
        "{self}.reshape({shape})",
        ("{self}.reshape(*{self}.shape[:-2], -1)", lambda a: a.start_dim == -2),
    ],
    "expand_as": [
        "{self}.expand_as({other})",
        "{self}.expand({shape})",
        ("{self}", lambda a: all(n.target.__name__ == "div.Tensor" for n in a.node.users)),
    ],
    "detach": ["{self}.detach()"],
    "view": ["{self}.view({size})", "{self}.reshape({size})"],
    "reshape": [
        "{self}.reshape({shape})",
        "torch.reshape({self}, {shape})",
        ("{self}.view({shape})", lambda a: a.self.contiguous),
        ("{self}.view(-1, {self}.size(-1))", lambda a: a.self.contiguous and a.rank == 2),
        ("{self}.flatten(0, -2)", lambda a: a.rank == 2 and a.self.rank > 2),
        ("{self}", lambda a: a.self.shape == a.shape),
    ],
    "unsqueeze": [
        "{self}.unsqueeze({dim})",
        "torch.unsqueeze({self}, {dim})",
        ("{self}[..., None]", lambda a: a.dim in (-1, a.rank - 1)),
        ("{self}[:, None]", lambda a: a.dim == 1),
    ],
    "squeeze": [
        "{self}.squeeze({dim})",
        "torch.squeeze({self}, {dim})",
        ("{self}[..., 0]", lambda a: a.dim in (-1, a.rank) and a.self.shape[-1] == 1),
    ],
    "gather": [
        "torch.gather({self}, {dim}, {index})",
        "{self}.gather({dim}, {index})",
        "{self}.gather(dim={dim}, index={index})",
        "torch.take_along_dim({self}, {index}, {dim})",
        (
            "{self}[torch.arange({self.shape[0]}), {index}[:, 0]][:, None]",
            lambda a: one_element_a_row(a) and a.rank == 2,
        ),
        (
            "{self}[torch.arange({self.shape[0]})[:, None], torch.arange({self.shape[1]}), "
            "{index}.squeeze(-1)].unsqueeze(-1)",
            lambda a: one_element_a_row(a) and a.rank == 3,
        ),
    ],
    "index": ["{self}[(*{indices},)]", "{self}[tuple({indices})]"],
    "arange": ["torch.arange({end})", "torch.arange(0, {end})"],
    "take_along_dim": [
        "torch.take_along_dim({self}, {indices}, {dim})",
        "{self}.take_along_dim({indices}, dim={dim})",
    ],
    "cat": [
        "torch.cat({tensors}, {dim})",
        "torch.cat({tensors}, dim={dim})",
        "torch.concat({tensors}, {dim})",
    ],
    "stack": [
        "torch.stack({tensors}, {dim})",
        "torch.stack({tensors}, dim={dim})",
        ("torch.cat(({first}.unsqueeze(-1), {second}[..., None]), -1)", pair_on_last_axis),
    ],
    "chunk": [
        "{self}.chunk({chunks}, {dim})",
        "torch.chunk({self}, {chunks}, dim={dim})",
        ("{self}.split({self}.shape[-1] // 2, -1)", splits_in_halves),
        ("torch.split({self}, [{self}.shape[-1] // 2] * 2, dim=-1)", splits_in_halves),
        ("{self}.tensor_split(2, -1)", splits_in_halves),
        ("torch.tensor_split({self}, ({self}.shape[-1] // 2,), dim=-1)", splits_in_halves),
        ("{self}.unflatten(-1, (2, -1)).unbind(-2)", splits_in_halves),
        ("{self}.reshape(*{self}.shape[:-1], 2, -1).unbind(dim={self.rank} - 1)", splits_in_halves),
        (
            "{t} = {self}.reshape(*{self}.shape[:-1], 2, -1); ({t}[..., 0, :], {t}[..., 1, :])",
            splits_in_halves,
        ),
        ("{t} = {self}.shape[-1] // 2; ({self}[..., :{t}], {self}[..., {t}:])", splits_in_halves),
        (
            "{t} = {self}.size(-1) // 2; ({self}.narrow(-1, 0, {t}), {self}.narrow(-1, {t}, {t}))",
            splits_in_halves,
        ),
    ],
    "slice": [
        ("{self}[..., {start}::{step}]", every_other_element),
        ("{self}.unflatten(-1, (-1, 2))[..., {start}]", every_other_element),
        ("{self}.reshape(*{self}.shape[:-1], -1, 2)[..., {start}]", every_other_element),
        ("{self}.unflatten(-1, (-1, 2)).unbind(-1)[{start}]", every_other_element),
    ],
    "repeat_interleave": [
        "torch.repeat_interleave({self}, {repeats}, dim={dim})",
        "{self}.repeat_interleave({repeats}, {dim})",
        (
            "{self}[:, :, None].expand(-1, -1, {repeats}, -1, -1).reshape({shape})",
            repeats_heads,
        ),
        (
            "{self}.unsqueeze(2).expand(-1, -1, {repeats}, -1, -1).flatten(1, 2).contiguous()",
            repeats_heads,
        ),
    ],
    "bitwise_not": ["~{self}", "{self}.logical_not()", "torch.logical_not({self})", "{self} == 0"],
    # casts
    "to": ["{self}.to({type})", "{self}.to(dtype={type})", "{self}.type({type})"],
}
