"""Kernels are compiled before a graph depends on them: in threads, several at a time, every
distinct launch once.

Triton's passes and ptxas run without Python's lock. Values that are no function of the arguments,
such as the device, Triton looks up in the deciding thread (`AsyncCompileMode`); the other threads
see neither its fake mode nor its context.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from fusion_backend.compat.torch import inductor_config
from fusion_backend.compat.triton import AsyncCompileMode, FutureKernel, forget_compiled
from fusion_backend.decide.call import Call
from fusion_backend.kernels.common.launch import trial
from fusion_backend.ops.op import Op
from fusion_backend.ops.operator import fake_seed, operator_of


class Trials:
    """The launches of a view's sites, and what became of them.

    `trial` calls it in place of a launch: it begins to compile a launch that it has not seen, and
    returns. If kernels have failed, the sites are decided once more, and now their launches raise
    Triton's exception. Each site is thus decided as if its kernels had been compiled on the spot,
    and a smaller site may replace a larger one that has failed.
    """

    def __init__(self):
        self.seen: set[tuple] = set()
        self.failed: dict[tuple, Exception] = {}
        self.started: dict[tuple, object] = {}  # in this round

    def rounds(self) -> Iterator[None]:
        """Yields once for each time that the sites must be decided, until no further kernel
        fails.
        """
        failures = -1
        while failures < len(self.failed):
            failures = len(self.failed)
            pool = ThreadPoolExecutor(inductor_config.compile_threads or 1, "fusion-compile")
            # the mode holds in this context alone, and need not be left, whatever happens
            self.context = contextvars.Context()
            self.context.run(AsyncCompileMode(pool).__enter__)
            try:
                yield
                self.settle()
                pool.shutdown()  # Inductor may fork
            finally:  # an interrupted compilation does not wait for the others
                pool.shutdown(wait=False, cancel_futures=True)
                # Triton 3.8 and 3.9 would give the cancelled ones to the next caller
                for (kernel, _), started in self.started.items():
                    future = started.future if isinstance(started, FutureKernel) else None
                    if future is not None and future.cancelled():
                        forget_compiled(kernel)

    def __call__(self, kernel, grid, args, options) -> None:
        for a in args:
            if isinstance(a, int) and a >= 1 << 31:  # Inductor would fail on the whole graph
                raise OverflowError(
                    f"Inductor passes a kernel no constant like {a}, of more than 32 bits"
                )
        given = [
            a.dtype if isinstance(a, torch.Tensor) else 16 if isinstance(a, torch.SymInt) else a
            for a in args
        ]
        key = (kernel, repr((given, sorted(options.items()))))
        if key in self.failed:
            raise self.failed[key].with_traceback(None)
        if key not in self.seen:
            self.started[key] = self.context.run(kernel.warmup, *given, grid=(1,), **options)
            self.seen.add(key)

    def settle(self) -> None:
        """Wait for all compilations that were started. Launches that are equal to Triton share one
        outcome.
        """
        errors = {id(kernel): kernel for kernel in self.started.values()}
        errors = {i: error_of(kernel) for i, kernel in errors.items()}
        failed = {key: errors[id(kernel)] for key, kernel in self.started.items()}
        self.failed |= {key: error for key, error in failed.items() if error is not None}
        self.started.clear()


def error_of(kernel) -> Exception | None:
    """The exception that Triton raised, without its traceback; a kernel that was compiled before
    has no result.
    """
    try:
        if isinstance(kernel, FutureKernel):
            kernel.result()
    except Exception as error:
        return error.with_traceback(None)
    return None


def compile_kernels(trials: Trials, op: Op, values: dict, call: Call, chosen: dict) -> None:
    """Compile the kernels that an op would launch on these fake arguments, by name."""
    operator = operator_of(op)
    tensor = next(v for v in values.values() if isinstance(v, torch.Tensor))
    with tensor.fake_mode, torch.no_grad(), trial(trials):
        seeds = {name: fake_seed(tensor) for name in op.seed_arguments}
        flat = operator.flatten(values | seeds)
        if chosen["forward"] == "kernel":
            operator.forward(*flat, **chosen)
        if chosen["backward"] == "kernel":
            results, saved = call.values[: op.outputs], call.values[op.outputs :]
            kept = call.values if op.backward_result else saved
            operator.backward(*results, *kept, [True] * len(operator.tensors), *flat)
