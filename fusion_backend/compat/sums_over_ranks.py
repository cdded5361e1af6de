"""The sum over ranks that tensor parallelism makes: an operator, and how graphs spell it.

A graph of Dynamo has `redistribute` and `to_local` of a DTensor as functions made on the spot in
2.11 and as methods from 2.14 on (checked in these two).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.library import Library

SPACE = "fusion_c10d"
LIBRARY = Library(SPACE, "DEF")
LIBRARY.define("all_reduce(Tensor x, str group) -> Tensor")


def summed(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks of a process group, by the functional collective; without
    torch.distributed that of one rank.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return x.clone()
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


class SumOverRanks(torch.autograd.Function):
    """The sum; its gradient is passed on as it is."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def all_reduce(x: Tensor, group: str) -> Tensor:
    return SumOverRanks.apply(x, group)


# A composite: autograd and Inductor see the functional collective. Every rank continues with the
# whole sum and has its gradient. (The gradient of _c10d_functional::all_reduce is summed.)
LIBRARY.impl("all_reduce", all_reduce, "CompositeImplicitAutograd")
sum_over_ranks = torch.ops.fusion_c10d.all_reduce.default


def partial_sum(n: fx.Node) -> tuple[fx.Node, str] | None:
    """For a node that sums a DTensor over the ranks of a one-dimensional mesh and makes it local:
    the node of the DTensor before, and the name of the process group. None for any other node.
    """
    if n.op not in ("call_function", "call_method") or called(n) != "to_local":
        return None
    whole = n.args[0] if n.args else None
    if not isinstance(whole, fx.Node) or not redistributes(whole):
        return None
    try:
        return parts_of(n, whole)
    except Exception:  # a mesh or a placement of another kind
        return None


def parts_of(local: fx.Node, whole: fx.Node) -> tuple[fx.Node, str] | None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    parts = whole.args[0]
    before, after = (n.meta.get("example_value") for n in (parts, whole))
    if type(before) is not DTensor or type(after) is not DTensor:
        return None
    mesh, (placement,) = before.device_mesh, before.placements
    summed_up = type(placement) is Partial and placement.reduce_op == "sum"
    if not summed_up or after.device_mesh != mesh or after.placements != (Replicate(),):
        return None
    gradient = options(local).get("grad_placements")
    if gradient is not None and tuple(gradient) != (Replicate(),):
        return None
    if not options(whole).keys() <= {"device_mesh", "placements", "async_op"}:
        return None
    return parts, mesh.get_group().group_name


def redistributes(n: fx.Node) -> bool:
    """Is it a DTensor that is redistributed?"""
    return called(n) == "redistribute"


def called(n: fx.Node) -> str:
    """The method of a DTensor that a node calls."""
    name = n.target if n.op == "call_method" else getattr(n.target, "__name__", "")
    return name.removeprefix("prim_") if isinstance(name, str) else ""


def options(n: fx.Node) -> dict[str, object]:
    """The arguments of a DTensor's method by name; a positional one is named by its number."""
    args, kwargs = n.args[1:], n.kwargs
    if n.op == "call_function":
        code = n.target.__code__
        cells = [cell.cell_contents for cell in n.target.__closure__ or ()]
        held = dict(zip(code.co_freevars, cells, strict=True))
        args, kwargs = held.get("args_as_value", ()), held.get("kwargs_as_value", {})
    # the first two of redistribute are known by its result
    places = ("device_mesh", "placements") if redistributes(n) else ("grad_placements",)
    named = {places[i] if i < len(places) else str(i): a for i, a in enumerate(args)}
    return {**named, **kwargs}


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a DTensor that is a sum. Its gradient is that of the whole sum."""
    from torch.distributed.tensor import Replicate

    return x.to_local(grad_placements=[Replicate()])


def part_in_example(parts: fx.Node) -> Tensor:
    """The fake value of `local_part`, which has the memory of the DTensor. Nothing is traced."""
    local = parts.meta["example_value"]._local_tensor
    with disable_proxy_modes_tracing():
        return local.view_as(local)
