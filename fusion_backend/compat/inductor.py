"""Inductor for graphs with operators of ours: what it does differently there, and what is left when
it fails.

Everything here holds while a graph of ours is compiled, forward or backward, and not a moment
longer: other graphs are compiled as in a process without us. Dynamo's compile lock, which every
compilation holds, keeps them apart.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator

import sympy
import torch
import torch._higher_order_ops.triton_kernel_wrap as kernel_wrap
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor import lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.ir import TensorBox
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor

from fusion_backend.compat.torch import inductor
from fusion_backend.compat.triton import Autotuner

# What torch found that a kernel writes, and from 2.13 on reads, by what it was asked about; for
# kernels that `launch` knows.
ANALYSED: weakref.WeakKeyDictionary[object, dict] = weakref.WeakKeyDictionary()
ANALYSES = ("identify_mutated_tensors", "identify_accessed_tensors")  # torch 2.11; 2.13, 2.15
REMEMBERED = 200  # answers a kernel
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)
CONSTANTS = (int, float, str, torch.dtype, type(None))


def inductor_of_ours(
    mode: str | None, options: dict | None, backward_failed: Callable[[Exception], None]
):
    """As `inductor`, for graphs with operators of ours.

    When the forward cannot be compiled it raises, and has left nothing behind in Dynamo's tracing
    context. When the backward cannot, which Inductor finds out when the forward has run,
    `backward_failed` is told, and the backward runs uncompiled.
    """
    options = inductor(mode, options).config

    def compile(gm: fx.GraphModule, example_inputs):
        with our_kernels(), undone_on_failure():
            inner = functools.wraps(compile_fx_inner)(
                functools.partial(compile_graph, backward_failed)
            )
            return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=options)

    return compile


def compile_graph(
    backward_failed: Callable[[Exception], None], gm: fx.GraphModule, example_inputs, **given
):
    """Inductor's compiler of one graph of AOTAutograd's, which changes the graph."""
    kept = copied(gm.graph) if given.get("is_backward") else None
    try:
        with our_kernels():
            return compile_fx_inner(gm, example_inputs, **given)
    except Exception as error:
        if kept is None:
            raise
        backward_failed(error)
        return Uncompiled(fx.GraphModule(gm, kept))


class Uncompiled(OutputCode):
    """A graph of AOTAutograd's that runs operator by operator."""

    def __init__(self, gm: fx.GraphModule):
        self.gm, self._boxed_call = gm, True

    def __call__(self, inputs):
        given = list(inputs)
        inputs.clear()
        return self.gm(*given)


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


@contextlib.contextmanager
def our_kernels() -> Iterator[None]:
    """Inside, Inductor knows what our kernels need, and analyses each once.

    A value that a kernel reads is written to memory for it. Without this Inductor would not know,
    and would compute a pointwise value (a residual sum) once for the kernel and again for every
    other reader.
    """
    with compile_lock:
        realized = lowering.needs_realized_inputs
        missing = triton_kernel_wrapper_mutation not in realized
        before = {
            name: getattr(kernel_wrap, name) for name in ANALYSES if hasattr(kernel_wrap, name)
        }
        realized.add(triton_kernel_wrapper_mutation)
        for name, analyse in before.items():
            setattr(kernel_wrap, name, analysed_once(analyse))
        try:
            yield
        finally:
            if missing:
                realized.discard(triton_kernel_wrapper_mutation)
            for name, analyse in before.items():
                setattr(kernel_wrap, name, analyse)


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """What AOTAutograd writes into Dynamo's tracing context is taken back if it fails, for whoever
    compiles next.
    """
    context = TracingContext.try_get()
    before = list(state_of(context)) if context is not None else []
    try:
        yield
    except BaseException:
        for held, state in before:
            held.clear()
            held.update(state) if isinstance(held, (dict, set)) else held.extend(state)
        raise


def state_of(owner) -> Iterator[tuple]:
    """The containers that torch's tracing context is made of, each with what it holds now."""
    pending, seen = [owner], set()
    while pending:
        held = pending.pop()
        if type(held).__module__ == "torch._guards":
            held = getattr(held, "__dict__", None)
        if not isinstance(held, (dict, set, list)) or id(held) in seen:
            continue
        seen.add(id(held))
        yield held, held.copy()
        pending += held.values() if isinstance(held, dict) else held


def kind_of_argument(value) -> tuple | None:
    """All that the analysis of a kernel can see of an argument; None for what we do not know."""
    if isinstance(value, (FakeTensor, TensorBox)):
        return ("tensor", value.dtype)
    if isinstance(value, SYMBOLIC):
        return ("symbolic",)
    return (type(value), value) if isinstance(value, CONSTANTS) else None


def analysed_once(analyse):
    """`analyse(kernel, kwargs, descriptors)` with its answers remembered.

    For every launch in a graph torch asks three or four times what the kernel writes, and makes
    Triton IR of its source each time; the layers of a model are alike.
    """

    @functools.wraps(analyse)
    def remembered(kernel, kwargs, descriptors):
        # of one configuration, which holds the number of warps
        tuned = isinstance(kernel, Autotuner)
        known = ANALYSED.get(kernel.fn if tuned else kernel)
        given = kwargs | kernel.configs[0].kwargs if tuned and kernel.configs else kwargs
        key = tuple((name, kind_of_argument(value)) for name, value in sorted(given.items()))
        if known is None or descriptors or any(kind is None for _, kind in key):
            return analyse(kernel, kwargs, descriptors)
        if key in known:
            return copy.copy(known[key])
        answer = analyse(kernel, kwargs, descriptors)
        written = answer if isinstance(answer, list) else answer.read_writes.writes
        # all: it may have failed, which may pass
        if len(written) < sum(kind[0] == "tensor" for _, kind in key):
            if len(known) >= REMEMBERED:
                known.clear()
            known[key] = copy.copy(answer)
        return answer

    return remembered


def mutated_tensors(kernel, constants: dict, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The arguments that torch finds a kernel to write."""
    table = kernel_wrap.kernel_side_table
    return kernel_wrap.get_mutated_tensors(
        table.add_kernel(kernel), table.add_constant_args(constants), tensors, {}
    )
