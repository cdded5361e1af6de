"""Operators of ours that Inductor is to call with channels-last tensors."""

from __future__ import annotations

from torch._ops import OpOverload

OPERATORS: list[OpOverload] = []


def takes_channels_last(op: OpOverload) -> None:
    """From now on Inductor lays out the operator's tensors of four dimensions channels-last."""
    OPERATORS.append(op)


def tell_inductor() -> None:
    """Called where Inductor is loaded anyway, because loading it takes long."""
    from torch._inductor import lowering

    for op in OPERATORS:
        if op not in lowering.lowerings:
            lowering.make_fallback(op, laid_out)


def laid_out(node, *args, **kwargs):
    """The arguments of a call with each tensor of four dimensions laid out channels-last, in the
    form that `make_fallback` expects.
    """
    from torch._inductor.ir import ExternKernel, TensorBox

    def last(a):
        planes = isinstance(a, TensorBox) and len(a.get_size()) == 4
        return ExternKernel.require_channels_last(a) if planes else a

    return tuple(map(last, args)), {name: last(a) for name, a in kwargs.items()}
