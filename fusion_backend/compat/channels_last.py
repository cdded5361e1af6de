"""Channels-last and Inductor: which graphs it lays out so, and operators of ours that it is to call
with such tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import has_free_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS: list[OpOverload] = []
# The option with which Inductor lays out the images of any graph channels-last.
FORCE_LAYOUT = {"force_layout_optimization": True}
# Inductor lays out no graph with so many nodes for each convolution. A node of Dynamo becomes
# several.
NODES_PER_CONVOLUTION, OPERATORS_PER_NODE = 300, 5


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


class Convolutions(TorchDispatchMode):
    """Inside, `calls` gets the arguments and the result of each convolution."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[tuple, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            self.calls.append((args, out))
        return out


def may_lay_out(calls: list[tuple[tuple, Tensor]], nodes: int) -> bool:
    """May Inductor lay out the images of a graph channels-last, whatever its convolutions (`calls`)
    are? nodes: how many the Dynamo graph has.
    """
    few = nodes * OPERATORS_PER_NODE >= NODES_PER_CONVOLUTION * len(calls)
    # With dynamic sizes Inductor does on a CPU, but there are no kernels for that.
    return config.layout_optimization and not few and not has_free_symbols(calls)


def lays_out(calls: list[tuple[tuple, Tensor]], trains: bool) -> bool:
    """Will Inductor lay out the images of a graph channels-last? Inductor itself is asked, with the
    convolutions of the graph.
    """
    from torch._inductor.graph import GraphLowering

    graph = fx.Graph()

    def placeholder(a):
        if not isinstance(a, Tensor):
            return a
        node = graph.placeholder(f"input_{len(graph.nodes)}")
        node.meta["val"] = a
        return node

    for args, out in calls:
        args = pytree.tree_map(placeholder, args)
        graph.call_function(torch.ops.aten.convolution.default, args).meta["val"] = out
    graph.output(())
    gm = fx.GraphModule(torch.nn.Module(), graph)
    return GraphLowering.decide_layout_opt(gm, is_inference=not trains)
