"""Matrix products whose rows Inductor pads, where a kernel writes to them.

The product then lies in memory in another way than when the kernel was traced. If a kernel only
reads it, Inductor copies it into the traced strides. If a kernel writes to it although its values
are needed later, PyTorch 2.11 copies memory as if the product had the traced strides, so that the
kernel is given elements of the padding, and 2.14 makes three copies.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.immutable_collections import immutable_list


def copied_where_padded(decompose: Callable) -> Callable:
    """`decompose(graph)`, the pass that makes copies for kernels that write to their arguments,
    with copies of padded values made before it.
    """

    @functools.wraps(decompose)
    def copied(graph: fx.Graph) -> None:
        launches = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
        for launch in launches:
            if "eager_input_vals" in launch.meta:
                copy_what_is_padded(launch)
        decompose(graph)

    return copied


def copy_what_is_padded(launch: fx.Node) -> None:
    """Give a launch copies of the arguments that it writes to and that are to be kept, where their
    strides are not those that it was traced with.
    """
    given, (args, traced) = dict(launch.kwargs["kwargs"]), launch.meta["eager_input_vals"]
    kept = []  # Inductor copies these
    for name in launch.kwargs["tensors_to_clone"]:
        value, was = given[name].meta["val"], traced["kwargs"][name]
        if was is None or statically_known_true(sym_eq(value.stride(), was.stride())):
            kept.append(name)
            continue
        with launch.graph.inserting_before(launch), value.fake_mode:
            order = {"memory_format": torch.contiguous_format}
            copy = launch.graph.call_function(torch.ops.aten.clone.default, (given[name],), order)
            copy.meta["val"] = value.clone(**order)
        given[name] = copy
        for result in list(launch.users):
            if result.target is operator.getitem and result.args[1] == name:
                result.replace_all_uses_with(copy)
                launch.graph.erase_node(result)
    names = immutable_list(kept)
    launch.kwargs = {**launch.kwargs, "kwargs": given, "tensors_to_clone": names}
    launch.meta["eager_input_vals"] = (args, {**traced, "tensors_to_clone": names})
