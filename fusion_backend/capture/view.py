"""The view: the ATen graph above autograd that is matched, and how its nodes relate to the Dynamo
graph.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fusion_backend.compat.torch import OpOverload, schema_of


@dataclasses.dataclass
class View:
    """An ATen graph that is read and never compiled, and its relation to the Dynamo graph."""

    source: fx.GraphModule
    graph: fx.Graph
    owner: dict[fx.Node, fx.Node]  # view node -> Dynamo node
    value: dict[fx.Node, object]  # Dynamo node -> its result as view nodes and constants
    region: dict[fx.Node, object]  # view node -> `state_key` where it was computed
    requires_grad: set[fx.Node]
    copied: dict[fx.Node, str]  # Dynamo node copied verbatim -> why
    bodies: dict[str, View]  # get_attr target of a body -> its view
    lies_otherwise: bool = False  # Inductor will lay out its images channels-last

    def trains(self, n: fx.Node) -> bool:
        """May a gradient of the node be wanted? A node between Dynamo nodes has no flag of its own;
        the flags of its Dynamo node and of that node's inputs decide. Without grad mode a view has
        the flag of its base, and yet passes no gradient on; an in-place operator keeps the flag of
        its argument.
        """
        if not self.region.get(n, (True,))[0] and not is_mutation(n):
            return False
        owner = self.owner.get(n)
        nodes = (owner, *owner.all_input_nodes) if owner else ()
        examples = [a.meta.get("example_value") for a in nodes]
        return n in self.requires_grad or any(
            isinstance(v, torch.Tensor) and v.requires_grad for v in examples
        )

    def views(self):
        """This view and those of all bodies."""
        yield self
        for body in self.bodies.values():
            yield from body.views()


def state_key(state_changed_by: object) -> tuple:
    """The state that decides, besides its arguments, how an operator behaves: grad mode, inference
    mode, autocast, and the last copied function that may have changed some other state.
    """
    autocast = tuple(
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
    )
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return grad, inference, autocast, state_changed_by


def value_of(arg):
    """The example value of an argument: of a view node, or the argument itself."""
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def is_lowered(node: fx.Node) -> bool:
    """Is the node one ATen operator, rather than a Dynamo node copied verbatim?"""
    return node.op == "call_function" and isinstance(node.target, OpOverload)


def name_of(n: fx.Node) -> str:
    """The operator's name, "aten::mul"; of anything else the target's."""
    return (
        schema_of(n.target).name if is_lowered(n) else getattr(n.target, "__name__", str(n.target))
    )


def is_mutation(node: fx.Node) -> bool:
    """Is the node an operator whose schema says that it writes to an argument?"""
    return is_lowered(node) and schema_of(node.target).is_mutable


def is_elementwise(n: fx.Node) -> bool:
    """Is the target a deterministic pointwise operator that writes to none of its arguments?"""
    pure = isinstance(n.target, OpOverload) and not schema_of(n.target).is_mutable
    return (
        pure
        and torch.Tag.pointwise in n.target.tags
        and torch.Tag.nondeterministic_seeded not in n.target.tags
    )


def embedded(n: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    """The embedding that `n` is, or from which `n` is computed by elementwise code and nothing
    else. None if a node outside `inside` and this code also reads one of these values.
    """
    pending, inside, seen, table = [n], set(inside), set(), None
    while pending:
        n = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if not is_lowered(n) or not inside.issuperset(n.users):
            return None
        if n.target is torch.ops.aten.embedding.default:
            table = n
        elif is_elementwise(n):
            inside.add(n)
            pending += n.all_input_nodes
        else:
            return None
    return table
