"""Kernels are compiled before a graph depends on them: in threads, several at a time, every
distinct launch once.

Triton's passes and ptxas run without Python's lock. What is not a function of its arguments, the
device, say, Triton asks about in the thread that decides (`AsyncCompileMode`); the others see
neither its fake mode nor its context.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from fusion_backend.compat.torch import inductor_config
from fusion_backend.compat.triton import AsyncCompileMode, FutureKernel, forget_compiled


class Trials:
    """The launches of a view's sites, and what became of them.

    Called by `trial`, in place of a launch, it begins to compile what it has not seen and returns.
    When kernels have failed, the sites are decided once more, and now their launches raise what
    Triton raised: each site is answered as if its kernels had been compiled on the spot, and a
    smaller site may stand where a larger one has failed.
    """

    def __init__(self):
        self.seen: set[tuple] = set()
        self.failed: dict[tuple, Exception] = {}
        self.started: dict[tuple, object] = {}  # in this round

    def rounds(self) -> Iterator[None]:
        """For each time that the sites are to be decided: until nothing fails that has not failed
        before.
        """
        failures = -1
        while failures < len(self.failed):
            failures = len(self.failed)
            pool = ThreadPoolExecutor(inductor_config.compile_threads or 1, "fusion-compile")
            # where the mode holds: it need not be left, whatever happens
            self.context = contextvars.Context()
            self.context.run(AsyncCompileMode(pool).__enter__)
            try:
                yield
                self.settle()
                pool.shutdown()  # Inductor may fork
            finally:  # whoever interrupts a compile does not wait for the others
                pool.shutdown(wait=False, cancel_futures=True)
                # Triton 3.8 and 3.9 would give the cancelled to who asks next
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
        """Wait for what was started. Launches that differ in nothing that Triton looks at have one
        outcome.
        """
        errors = {id(kernel): kernel for kernel in self.started.values()}
        errors = {i: error_of(kernel) for i, kernel in errors.items()}
        failed = {key: errors[id(kernel)] for key, kernel in self.started.items()}
        self.failed |= {key: error for key, error in failed.items() if error is not None}
        self.started.clear()


def error_of(kernel) -> Exception | None:
    """What Triton raised, without the frames that it was raised in; a kernel that was compiled
    before has no result.
    """
    try:
        if isinstance(kernel, FutureKernel):
            kernel.result()
    except Exception as error:
        return error.with_traceback(None)
    return None
