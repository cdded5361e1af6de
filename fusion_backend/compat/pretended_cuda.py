"""The code that Inductor would generate for a GPU, where there is none.

Graphs are traced on CPU tensors. After AOTAutograd, the tensors of the forward and backward graphs
are moved to a fake CUDA device. Inductor generates code for them, which is kept but neither
compiled nor run. Fake CUDA tensors cannot be used from the start, because a PyTorch without CUDA
aborts when one of them requires a gradient. Decisions that depend on the device during tracing,
such as which attention kernel torch chooses, are therefore made for a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

# The properties of an H200; Inductor splits reductions by them.
H200 = SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="",  # torch 2.13 asks before a matrix product; it names GPUs of AMD
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 << 30,
    L2_cache_size=60 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
)


class Generated(Exception):
    """Carries the code of a graph out of Inductor."""


@contextlib.contextmanager
def code_for_cuda() -> Iterator[list[str]]:
    """Inside, the code of each graph that Inductor is given goes to the list. A call of what was
    compiled returns uninitialised memory.
    """
    found: list[str] = []
    generate = compile_fx._compile_fx_inner

    def inner(gm: fx.GraphModule, example_inputs, **options):
        outputs = [described(node) for node in gm.graph.find_nodes(op="output")[0].args[0]]
        with pretended():
            inputs = moved(gm, example_inputs)
            found.append(code_of(lambda: generate(gm, inputs, **options)))

        def run(arguments: list):
            return [None if one is None else empty_like(*one) for one in outputs]

        run._boxed_call = True  # AOTAutograd hands over the list itself
        return run

    with (
        mock.patch.object(compile_fx, "_compile_fx_inner", inner),
        config.patch(force_disable_caches=True, compile_threads=1),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield found


def described(node) -> tuple | None:
    """A result's shape, strides and dtype; None where there is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else None


def empty_like(shape, stride, dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


def moved(gm: fx.GraphModule, example_inputs) -> list:
    """The inputs of a graph on the fake device; its nodes' values follow them."""
    mode = next(x.fake_mode for x in example_inputs if isinstance(x, FakeTensor))
    with mode:
        inputs = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")
            if isinstance(x, Tensor)
            else x
            for x in example_inputs
        ]
    for node in gm.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    gm.recompile()
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return inputs


def code_of(generate: Callable[[], object]) -> str:
    """The code at which Inductor arrives, before it is loaded."""

    def stop(graph: GraphLowering, *_):
        code, _ = graph.codegen()
        raise Generated(code if isinstance(code, str) else code.value)

    with mock.patch.object(GraphLowering, "compile_to_module", stop):
        try:
            generate()
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, Generated):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            return cause.args[0]
    raise RuntimeError("Inductor generated no code")


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """What Inductor asks of CUDA while it generates code has an answer."""
    answers = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_capability=lambda device=None: (9, 0),
        get_device_properties=lambda device=None: H200,
        get_rng_state=lambda device=None: torch.zeros(1),
        set_rng_state=lambda state, device=None: None,
        synchronize=lambda device=None: None,
        _lazy_init=lambda: None,
        _exchange_device=lambda index: 0,
        _maybe_exchange_device=lambda index: 0,
    )
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, answer))
        patches.enter_context(
            mock.patch.object(
                CudaInterface, "get_device_properties", staticmethod(lambda device=None: H200)
            )
        )
        patches.enter_context(mock.patch.object(scheduler, "has_triton", lambda *_, **__: True))
        patches.enter_context(
            mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
        )
        yield
