"""Rules of sums over the ranks of a process group.

A sum that every rank continues with is `all_reduce` of this rank's part and the name of the group.
Its gradient is passed on unchanged. `_c10d_functional::all_reduce` sums up the gradients as well,
so it is read only if no gradient is wanted, like its in-place form.
"""

from __future__ import annotations

from torch import fx

from fusion_backend.capture.sizes import same
from fusion_backend.capture.view import is_lowered, name_of
from fusion_backend.compat.torch import aten
from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import rule
from fusion_backend.ir.schema_args import Call

COPY = aten.copy_.default


@rule("fusion_c10d::all_reduce")
def summed_over_ranks(c: Builder, call: Call, x: Expr, group: str):
    return c.make("all_reduce", (x, c.word(group)), None, call.shape)


@rule("_c10d_functional::wait_tensor")
def waited_for(c: Builder, call: Call, tensor: Expr):
    """The sum may be read once it was waited for. If it is then written over its own input, that
    write stands for the sum.
    """
    reduced = call.node.args[0]
    written_back = any(u.target is COPY and u.args[0] is reduced.args[0] for u in call.node.users)
    return None if written_back else sum_of(c, call, reduced)


@rule("aten::copy_")
def summed_in_place(c: Builder, call: Call):
    """all_reduce(x) as torch.distributed has it: the sum is written over x."""
    written, waited = call.node.args[:2]
    if not isinstance(waited, fx.Node) or not is_lowered(waited):
        return None
    if name_of(waited) != "_c10d_functional::wait_tensor" or not same_kind(written, waited):
        return None
    reduced = waited.args[0]
    return sum_of(c, call, reduced) if reduced.args[0] is written else None


def sum_of(c: Builder, call: Call, reduced: fx.Node) -> Expr | None:
    """The expression of a functional all-reduce that is a sum and has no gradient."""
    if not is_lowered(reduced) or name_of(reduced) != "_c10d_functional::all_reduce":
        return None
    x, how, group = reduced.args[:3]
    if how.lower() != "sum" or call.value.requires_grad or x.meta["val"].requires_grad:
        return None
    return c.make("all_reduce", (c.of[x], c.word(group)), None, call.shape)


def same_kind(a: fx.Node, b: fx.Node) -> bool:
    a, b = a.meta["val"], b.meta["val"]
    return a.dtype == b.dtype and same(a.shape, b.shape)
