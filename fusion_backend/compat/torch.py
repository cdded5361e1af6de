"""Private names of torch that the project uses, and differences between its versions.

Each name was checked in 2.11, 2.13 and 2.15, unless its line names other versions: `versions.py`
says how.
"""

# ruff: noqa: F401 (the imports are what this file is for)
from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable

import sympy
import torch
import torch._dynamo.config as dynamo_config
import torch.utils._pytree as pytree
from torch import fx
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import clear_caches
from torch._logging._internal import trace_structured_artifact
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._prims_common import suggest_memory_format  # noqa: F401
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module as graph_module_of_dynamo
from torch.fx.experimental.proxy_tensor import (
    _side_effectful_need_to_be_preserved_pre_dispatch as STATE_FUNCTIONS,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, statically_known_true
from torch.fx.operator_schemas import _SCHEMA_TO_SIGNATURE_CACHE as SIGNATURES
from torch.library import triton_op
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

aten = torch.ops.aten
LINEAR = torch._C._nn.linear  # F.linear in a graph of Dynamo
# What nn.Module calls where it is made, in a graph of Dynamo too.
LOG_USAGE = torch._C._log_api_usage_once
TO_COPY, UNSAFE_VIEW = aten._to_copy.default, aten._unsafe_view.default

# Operators, the nodes of a graph, and memory.


OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)

# cuBLASLt's product with its epilogue; Inductor calls it as it is (2.11 to 2.15)
addmm_activation = torch._addmm_activation
int8_product = torch._int_mm  # of int8, summed in int32

# (size, stride, dtype) on the current GPU: how Inductor's code allocates, without the dispatcher
empty_cuda = torch._C._dynamo.guards._empty_strided_cuda


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """The name, arguments and results of an operator."""
    return op._schema


def schemas_of(op: OpOverload | OpOverloadPacket | HigherOrderOperator) -> str:
    """How an operator is declared, with its tags; a packet's overloads all."""
    if isinstance(op, OpOverloadPacket):
        return " ".join(schemas_of(getattr(op, name)) for name in op.overloads())
    return f"{op._schema} {sorted(map(str, op.tags))}" if isinstance(op, OpOverload) else ""


def overload_of(op: OpOverload) -> str:
    """`Tensor` of `aten.add.Tensor`."""
    return op._overloadname


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, which tensors that share memory have in common. Fake
    tensors have one too.
    """
    return tensor.untyped_storage()._cdata


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """May two elements of a tensor be at one place in memory, as in an expanded one?"""
    return torch._debug_has_internal_overlap(tensor) != 0


def times_written(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of its memory, was written to in place."""
    return tensor._version


def last_node(graph: fx.Graph) -> fx.Node:
    """The last node of a graph; its root where it has none."""
    return graph._root._prev


def name_again(node: fx.Node, name: str) -> None:
    """Give a node the name of an erased node, to which fx would append a number."""
    node.name = name
    node.graph._graph_namespace._rename_object(node, name)


def keep_signature(graph: fx.Graph, source: fx.Graph) -> None:
    """Give the code of a graph the arguments and results of the code of `source`."""
    graph.set_codegen(source._codegen)


def keep_source(node: fx.Node, source: fx.Node) -> None:
    """Copy the attribute in which Dynamo notes where an input comes from."""
    if hasattr(source, "_dynamo_source"):
        node._dynamo_source = source._dynamo_source


# Tracing.


def fake_mode_of(gm: fx.GraphModule) -> FakeTensorMode | None:
    """The fake mode of a Dynamo graph's example values. When a backend is called, the tracing
    context has a different one.
    """
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("example_value", node.meta.get("val"))):
            while is_traceable_wrapper_subclass(value):
                names, _ = value.__tensor_flatten__()
                value = getattr(value, names[0])
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


class NewGuard(GuardOnDataDependentSymNode):
    """A question about symbolic sizes needs a guard, a replacement or a runtime assertion.

    Torch treats it as the error of a size that depends on data: its shape rules handle it, and
    nothing is logged.
    """

    def __init__(self, condition: sympy.Basic, value: sympy.Basic):
        super().__init__(condition, f"it would need a guard, {condition} == {value}")


@contextlib.contextmanager
def no_new_guards(fake_mode: FakeTensorMode | None):
    """Inside, questions about sizes are answered from what is known or guarded already; any other
    raises NewGuard.

    A question with a default answer (guard_or_false) gets that answer, as with sizes that depend on
    data. The fake tensor cache, whose results may rest on it, is restored afterwards. ShapeEnv
    calls `_check_frozen` right before it records a guard or a runtime assertion, and before the
    replacements and ranges that follow from it. It does not remember an exception that is raised
    there: the same question may be asked again later.
    """
    env = fake_mode.shape_env if fake_mode is not None else None
    if env is None or "_check_frozen" in vars(env):
        yield
        return
    evaluate, results = env.evaluate_expr, env.fake_tensor_cache

    def refuse(condition, value):
        raise NewGuard(condition, value)

    def assume(*args, fallback_value=None, **options):
        try:
            return evaluate(*args, fallback_value=fallback_value, **options)
        except NewGuard:
            if fallback_value is None:
                raise
            return fallback_value

    env._check_frozen, env.evaluate_expr, env.fake_tensor_cache = refuse, assume, dict(results)
    try:
        with env.ignore_fresh_unbacked_symbols():
            yield
    finally:
        del env._check_frozen, env.evaluate_expr
        env.fake_tensor_cache = results


@contextlib.contextmanager
def refusals_unlogged():
    """Inside, PyTorch does not log operators that refuse fake tensors. It would log each as an
    error with a traceback. Other threads log as before.
    """
    log, mine = logging.getLogger(fake_tensor.__name__), threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != mine

    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


def trace(fn, args, fake_mode: FakeTensorMode | None = None) -> fx.GraphModule:
    """Trace `fn(*args)` on fake tensors into ATen above autograd: composites stay whole."""
    with contextlib.ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(tracing(TracingContext(fake_mode)))
            stack.enter_context(fake_mode)
        stack.enter_context(fx.traceback.preserve_node_meta())
        return make_fx(fn, pre_dispatch=True, tracing_mode="real", _allow_non_fake_inputs=True)(
            *args
        )


def hinted(sizes) -> tuple | None:
    """The sizes in the example that a graph was traced with; None where one depends on data."""
    if not all(
        type(size) is int or (isinstance(size, torch.SymInt) and size.node.has_hint())
        for size in sizes
    ):
        return None
    return tuple(size if type(size) is int else size.node.hint for size in sizes)


def sym_key(value):
    """A symbolic number as part of a dictionary key."""
    return (
        value.node.expr
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        else value
    )


def new_op(name: str, fn: Callable):
    """`fn` as the operator `namespace::name`, in place of one of that name. torch remembers the
    arguments of an operator by its name, and would call the new one with those of the old.
    """
    SIGNATURES.pop((name, ""), None)
    return triton_op(name, fn, mutates_args=())


def remove_op(call) -> None:
    """Unregister what `triton_op` returned. torch does so itself when the name is
    registered again.
    """
    call._lib._destroy()


def forced_into_memory(n: fx.Node) -> None:
    """Have Inductor write this value of an ATen graph to memory, for all that read it. Its sizes
    are numbers.
    """
    from torch._inductor import inductor_prims  # takes long to load

    force = inductor_prims.force_stride_order
    value = n.meta["val"]
    with n.graph.inserting_after(n):
        kept = n.graph.call_function(force, (n, list(value.stride())))
    kept.meta = {**n.meta}
    n.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def assert_all(condition: torch.Tensor, message: str) -> None:
    """An assertion where the tensor lives: a device-side one on CUDA, so that nothing
    waits for it.
    """
    # A sum, and not all(): of labels that are an arange Inductor computes the condition from
    # constants, and Triton 3.6 takes minutes to compile that reduction of them.
    torch.ops.aten._assert_async.msg((~condition).sum() == 0, message)


def operators_go_to(mode, handler):
    """Have a tracer's mode call `handler(op, types, args, kwargs)` for every operator. Returns its
    previous handler.
    """
    before = mode.__torch_dispatch__
    mode.__torch_dispatch__ = handler
    return before


def without_torch_function():
    """Inside, no torch function mode intercepts calls: they run, and questions about tensors are
    fast.
    """
    return torch._C.DisableTorchFunction()


def plain_tensors(tensors) -> bool:
    """Real tensors with memory: not fake, functional, or any other subclass."""
    return all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)


# Compiling.


def inductor(mode: str | None, options: dict | None):
    """The callable that torch.compile(backend="inductor", mode, options) uses; it
    validates both.
    """
    return torch._TorchCompileInductorWrapper(mode, options, None)


def pass_slot(options: dict) -> tuple[str, object]:
    """The Inductor option for the pass that carries our cache key, and the user's value of it."""
    name = "joint_custom_pre_pass"
    return name, options.get(name, getattr(inductor_config, name))


def at_end_of_backward(fn: Callable[[], None]) -> None:
    """Called within a backward: have autograd call `fn` when all of it has run without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def reset_cudagraphs() -> None:
    if torch.cuda.is_available():
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


def graph_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """The user's file:line at which Dynamo ended a graph early, and the cause, in one sentence;
    None where the graph ends with the function.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    explained = [line.removeprefix("Explanation: ") for line in lines if "Explanation: " in line]
    cause = [*explained, *lines, "Dynamo gives no cause"][0]
    if cause.startswith("generic_jump"):
        cause = "the code branches on the value of a tensor"
    elif cause == "step_unsupported":
        cause = "Dynamo cannot trace the code there; TORCH_LOGS=graph_breaks says why"
    frame = reason.user_stack[-1] if reason.user_stack else None
    return f"{frame.filename}:{frame.lineno}" if frame else "an unknown line", cause


def many_recompiles():
    """Inside, Dynamo has practically no recompile limit. It counts compilations by code object, so
    that explaining one model often would exceed the limit.
    """
    return dynamo_config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6)


@contextlib.contextmanager
def tracing_under(fake_mode: FakeTensorMode | None):
    """Inside, shape rules run on the fakes of an exported program."""
    with tracing(TracingContext(fake_mode)):
        yield


def cache_folder() -> str | None:
    """Inductor's cache folder; None when TORCHINDUCTOR_FORCE_DISABLE_CACHES asks for none."""
    return None if inductor_config.force_disable_caches else cache_dir()


def torch_version() -> str:
    return torch.__version__


@contextlib.contextmanager
def apart_from_context():
    """Inside, AOTAutograd notes what it finds in a copy of Dynamo's tracing context, which has the
    same guards: a second compilation of a graph leaves the notes of the first.
    """
    context = TracingContext.try_get()
    with tracing(copy.copy(context)) if context is not None else contextlib.nullcontext():
        yield


def interposed(args) -> bool:
    """Is a call traced, intercepted or recorded: on fake tensors, under a dispatch mode, a level of
    functorch or compiled autograd, or while a CUDA graph is captured?
    """
    return (
        any(isinstance(a, FakeTensor) for a in args)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or compiled_autograd.compiled_autograd_enabled
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def namespace_of(target) -> str | None:
    """`aten` of aten.add.Tensor and aten.add; None of a call that is no operator of the
    dispatcher's.
    """
    if isinstance(target, OpOverload):
        return target.namespace
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return "higher_order" if isinstance(target, HigherOrderOperator) else None


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (TORCH_TRACE), where tlparse shows it."""
    trace_structured_artifact(name, "string", text)
