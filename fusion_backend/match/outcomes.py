"""Does the reference, on the arguments of a match, return what the graph computes there?"""

from __future__ import annotations

import contextlib

import torch
from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.compat.torch import FakeTensor, FakeTensorMode, enable_python_dispatcher, hinted
from fusion_backend.ir.argument_views import Viewed, geometry, value_of
from fusion_backend.match.match import Match
from fusion_backend.ops.rule import Rule

REMEMBERED = 1000  # remembered shapes for each pattern


class Outcomes:
    """Dtypes, devices and shapes of the references' results on the nodes of one view."""

    def __init__(self):
        self.known: dict[Rule, dict[tuple, list[tuple] | str]] = {}
        self.signatures: dict[fx.Node, tuple | None] = {}

    def disagreement(self, match: Match) -> str:
        """Why the reference on these arguments is not what the graph computes there; empty when it
        is.

        The results of a reference are remembered, because layers and graphs ask the same questions
        again and again. Symbolic sizes are replaced by those of the example: reasoning with symbols
        costs ten times more, and the gate runs accepted ops on the symbols anyway.
        """
        arguments = [match.arguments[p.name] for p in match.pattern.params]
        signatures = [self.signature(a) for a in arguments]
        exact = None in signatures  # some size is known at run time only
        form = (match.template.kinds, torch.get_default_dtype())
        key = (*form, *((geometry(value_of(a)) for a in arguments) if exact else signatures))
        known = (
            self.known.setdefault(match.pattern, {})
            if exact
            else match.pattern.memo.setdefault("outcomes", {})
        )
        if key not in known:
            if len(known) > REMEMBERED:
                known.clear()
            values = list(map(value_of, arguments))
            if not exact and not all(map(static, values)):
                with FakeTensorMode():
                    values = [as_in_example(v) for v in values]
            known[key] = outcome(match.pattern, values)
        outs = known[key]
        if isinstance(outs, str):
            return f"the reference refuses these arguments: {outs}"
        for (dtype, device, shape), root in zip(outs, match.roots, strict=True):
            want = root.meta["val"]
            if dtype != want.dtype:
                return f"the result is {want.dtype}, the pattern gives {dtype}"
            if device != want.device or not same(
                shape, want.shape if exact else hinted(want.shape)
            ):
                return f"the result is {tuple(want.shape)}, the pattern gives {shape}"
        return ""

    def signature(self, argument):
        """The properties of an argument that a shape rule can see, with the sizes of the example;
        None if they are not known.
        """
        if isinstance(argument, Viewed):
            of = self.signature(argument.node)
            return None if of is None else (argument.kinds, of)
        if not isinstance(argument, fx.Node):
            return "none" if argument is None else argument
        if argument not in self.signatures:
            v = argument.meta["val"]
            shape, stride = hinted(v.shape), hinted(v.stride())
            plain = type(v) is FakeTensor and shape is not None and stride is not None
            self.signatures[argument] = (v.dtype, v.device, shape, stride) if plain else None
        return self.signatures[argument]


def static(value) -> bool:
    return not isinstance(value, torch.Tensor) or all(
        type(size) is int for size in (*value.shape, *value.stride())
    )


def as_in_example(value):
    """A fake tensor with the sizes of the example in place of symbolic ones; anything but a tensor
    is returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    sizes = hinted(value.shape), hinted(value.stride())
    return torch.empty_strided(*sizes, dtype=value.dtype, device=value.device)


def outcome(pattern: Rule, values: list) -> list[tuple] | str:
    """Dtype, device and shape of the reference's results on these fake tensors, or its error."""
    modes = [v.fake_mode for v in values if isinstance(v, FakeTensor)]
    try:
        with (
            modes[0] if modes else contextlib.nullcontext(),
            torch.no_grad(),
            enable_python_dispatcher(),
        ):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                # the dispatcher: torch 2.11, a 3-D matmul of symbolic sizes
                outs = pattern.reference(*values)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return [
        (o.dtype, o.device, tuple(o.shape)) for o in (outs if isinstance(outs, tuple) else (outs,))
    ]
