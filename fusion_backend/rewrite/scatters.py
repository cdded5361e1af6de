"""Sums with a scattered gradient are added before the scatter.

The gradient of a cross entropy over many logits is written by one kernel, and that of the targets
is scattered into it. Logits that are returned with their loss have another gradient, which is added
to it afterwards: the whole gradient is read and written once more. Added before the scatter, it is
part of the kernel, and the targets are read from it.

The graphs are those that AOTAutograd hands to Inductor: nothing is written to in between.
"""

from __future__ import annotations

from torch import fx

from fusion_backend.compat.torch import UNSAFE_VIEW, aten

VIEWS = (aten.view.default, aten.reshape.default, UNSAFE_VIEW)


def add_before_scatters(gm: fx.GraphModule) -> int:
    """Move such sums. Returns how many there were."""
    moved = 0
    for n in gm.graph.find_nodes(op="call_function", target=aten.scatter.src):
        chain = [n]
        while (user := only_user(chain[-1])) is not None and user.target in VIEWS:
            chain.append(user)
        if user is not None and is_one_a_row(n) and is_plain_sum(user, chain[-1]):
            move(n, user, next(a for a in user.args if a is not chain[-1]))
            for old in (user, *reversed(chain)):
                gm.graph.erase_node(old)
            moved += 1
    if moved:
        gm.recompile()
    return moved


def only_user(n: fx.Node) -> fx.Node | None:
    return next(iter(n.users)) if len(n.users) == 1 else None


def is_one_a_row(n: fx.Node) -> bool:
    """Does the scatter write one element of each row, and does nothing else read what it writes
    into?
    """
    base, dim, index, _ = n.args
    shape = n.meta["val"].shape
    static = all(isinstance(size, int) for size in shape)
    return (
        static
        and len(shape) == 2
        and dim in (1, -1)
        and index.meta["val"].shape == (shape[0], 1)
        and len(base.users) == 1
    )


def is_plain_sum(n: fx.Node, term: fx.Node) -> bool:
    """Is it the sum of this term and of another tensor of its shape and dtype?"""
    if n.target is not aten.add.Tensor or n.kwargs:
        return False
    values = [a.meta["val"] if isinstance(a, fx.Node) else None for a in n.args]
    if any(v is None or v.shape != n.meta["val"].shape for v in values):
        return False
    return n.args[0] is not n.args[1] and len({v.dtype for v in values}) == 1


def move(n: fx.Node, sum: fx.Node, other: fx.Node) -> None:
    base, dim, index, source = n.args
    graph, shape = n.graph, [*n.meta["val"].shape]
    with graph.inserting_before(sum):

        def call(target, args, like: fx.Node) -> fx.Node:
            new = graph.call_function(target, args)
            new.meta = {**like.meta}
            return new

        rows = call(aten.reshape.default, (other, shape), n)
        all_of_it = call(aten.add.Tensor, (base, rows), n)
        targets = call(aten.gather.default, (rows, dim, index), source)
        targets = call(aten.add.Tensor, (source, targets), source)
        result = call(aten.scatter.src, (all_of_it, dim, index, targets), n)
        result = call(aten.reshape.default, (result, [*sum.meta["val"].shape]), sum)
    sum.replace_all_uses_with(result)
