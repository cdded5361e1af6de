"""Inductor for graphs with operators of ours: how it compiles them differently, and how its
failures are handled.

Everything here holds only while a graph of ours is compiled, forward or backward. Other graphs are
compiled as in a process without this package: every compilation holds Dynamo's compile lock.
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
from torch._inductor.fx_passes import post_grad
from torch._inductor.ir import TensorBox
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor

from fusion_backend.compat.channels_last import tell_inductor
from fusion_backend.compat.compile_time import hastened
from fusion_backend.compat.launchers import inductors_launcher
from fusion_backend.compat.padded import copied_where_padded
from fusion_backend.compat.torch import inductor
from fusion_backend.compat.triton import Autotuner
from fusion_backend.compat.tuning import tuned_by_device_time

# Kernel -> what torch found that it writes, and from 2.13 on reads, by the key of the question.
# `kernels/common/launch.py` adds the kernels.
ANALYSED: weakref.WeakKeyDictionary[object, dict] = weakref.WeakKeyDictionary()
# The names of kernels that are made when they are launched. A process that takes a graph from
# Inductor's cache makes none.
MADE_LATER: set[str] = set()
ANALYSES = ("identify_mutated_tensors", "identify_accessed_tensors")  # torch 2.11; 2.13, 2.15
REMEMBERED = 200  # answers for each kernel
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Expr)
CONSTANTS = (int, float, str, torch.dtype, type(None))


def inductor_of_ours(
    mode: str | None,
    options: dict | None,
    backward_failed: Callable[[Exception], None],
    prepare: Callable[[fx.GraphModule], None],
):
    """As `inductor`, for graphs with operators of ours. Each graph of AOTAutograd, forward or
    backward, goes to `prepare` first, which may change it.

    If the forward cannot be compiled, it raises and leaves Dynamo's tracing context unchanged. If
    the backward cannot be compiled, which may show only after the forward has run,
    `backward_failed` is called with the exception, and the backward runs uncompiled.
    """
    options = inductor(mode, options).config

    def compile(gm: fx.GraphModule, example_inputs):
        with our_kernels(), undone_on_failure():
            inner = functools.wraps(compile_fx_inner)(
                functools.partial(compile_graph, backward_failed, prepare)
            )
            return compile_fx(gm, list(example_inputs), inner_compile=inner, config_patches=options)

    return compile


def compile_graph(
    backward_failed: Callable[[Exception], None],
    prepare: Callable[[fx.GraphModule], None],
    gm: fx.GraphModule,
    example_inputs,
    **options,
):
    """compile_fx_inner for one graph of AOTAutograd, with a copy of a backward graph to fall back
    on: Inductor changes the graph that it compiles.
    """
    before = copy_of(gm.graph) if options.get("is_backward") else None
    try:
        prepare(gm)
        with our_kernels(), hastened():
            return compile_fx_inner(gm, example_inputs, **options)
    except Exception as error:
        if before is None:
            raise
        backward_failed(error)
        return Uncompiled(fx.GraphModule(gm, before))


class Uncompiled(OutputCode):
    """A graph of AOTAutograd that runs operator by operator."""

    def __init__(self, gm: fx.GraphModule):
        self.gm, self._boxed_call = gm, True

    def __call__(self, inputs):
        values = list(inputs)
        inputs.clear()
        return self.gm(*values)


def copy_of(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


@contextlib.contextmanager
def our_kernels() -> Iterator[None]:
    """Inside, Inductor realizes the inputs of our kernels, copies what they write to with the
    strides that it has, analyses each kernel once, may launch them as it does its own, and will
    tune all kernels by their device time.

    A value that a kernel reads must be in memory. Inductor does not take that into account by
    itself: it would compute a pointwise value (a residual sum) once for the kernel and again for
    every other reader.
    """
    with compile_lock:
        tell_inductor()
        realized = lowering.needs_realized_inputs
        missing = triton_kernel_wrapper_mutation not in realized
        before = {
            name: getattr(kernel_wrap, name) for name in ANALYSES if hasattr(kernel_wrap, name)
        }
        decompose = post_grad.decompose_triton_kernel_wrapper_functional
        post_grad.decompose_triton_kernel_wrapper_functional = copied_where_padded(decompose)
        realized.add(triton_kernel_wrapper_mutation)
        for name, analyse in before.items():
            setattr(kernel_wrap, name, analysed_once(analyse))
        try:
            with inductors_launcher(names_of_ours), tuned_by_device_time():
                yield
        finally:
            if missing:
                realized.discard(triton_kernel_wrapper_mutation)
            for name, analyse in before.items():
                setattr(kernel_wrap, name, analyse)
            post_grad.decompose_triton_kernel_wrapper_functional = decompose


def names_of_ours() -> set[str]:
    return {kernel.__name__ for kernel in ANALYSED} | MADE_LATER


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """Restore Dynamo's tracing context where AOTAutograd fails after writing to it, for the next
    attempt to compile.
    """
    context = TracingContext.try_get()
    before = list(state_of(context)) if context is not None else []
    try:
        yield
    except BaseException:
        for container, state in before:
            container.clear()
            if isinstance(container, list):
                container.extend(state)
            else:
                container.update(state)
        raise


def state_of(owner) -> Iterator[tuple]:
    """The containers that torch's tracing context consists of, each with a copy of its contents."""
    pending, seen = [owner], set()
    while pending:
        part = pending.pop()
        if type(part).__module__ == "torch._guards":
            part = getattr(part, "__dict__", None)
        if not isinstance(part, (dict, set, list)) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part, part.copy()
        pending += part.values() if isinstance(part, dict) else part


def kind_of_argument(value) -> tuple | None:
    """The properties of an argument that the analysis of a kernel can depend on; None if they are
    unknown.
    """
    if isinstance(value, (FakeTensor, TensorBox)):
        return ("tensor", value.dtype)
    if isinstance(value, SYMBOLIC):
        return ("symbolic",)
    return (type(value), value) if isinstance(value, CONSTANTS) else None


def analysed_once(analyse):
    """`analyse(kernel, kwargs, descriptors)` with its answers remembered.

    For every launch in a graph torch asks three or four times what the kernel writes, and compiles
    its source to Triton IR each time. The layers of a model give the same answers.
    """

    @functools.wraps(analyse)
    def remembered(kernel, kwargs, descriptors):
        # an Autotuner has one configuration here, with the number of warps
        tuned = isinstance(kernel, Autotuner)
        known = ANALYSED.get(kernel.fn if tuned else kernel)
        arguments = kwargs | kernel.configs[0].kwargs if tuned and kernel.configs else kwargs
        key = tuple((name, kind_of_argument(value)) for name, value in sorted(arguments.items()))
        if known is None or descriptors or any(kind is None for _, kind in key):
            return analyse(kernel, kwargs, descriptors)
        if key in known:
            return copy.copy(known[key])
        answer = analyse(kernel, kwargs, descriptors)
        written = answer if isinstance(answer, list) else answer.read_writes.writes
        # an analysis that failed answers "all", and may succeed the next time
        if len(written) < sum(kind[0] == "tensor" for _, kind in key):
            if len(known) >= REMEMBERED:
                known.clear()
            known[key] = copy.copy(answer)
        return answer

    return remembered


def mutated_tensors(kernel, constants: dict, tensors: dict[str, torch.Tensor]) -> list[str]:
    """The names of the arguments to which a kernel writes, by torch's analysis."""
    table = kernel_wrap.kernel_side_table
    return kernel_wrap.get_mutated_tensors(
        table.add_kernel(kernel), table.add_constant_args(constants), tensors, {}
    )
