"""Which launcher Inductor gives the kernels of a graph.

Inductor has a launcher of its own for the kernels that it generates. For the Triton kernels that a
graph calls it uses Triton's launcher, which takes the host longer. A kernel with Inductor's
launcher is also stored with the compiled graph and loaded with it from the cache; a kernel with
Triton's goes through the compile processes again. Inductor's option
`static_launch_user_defined_triton_kernels` is meant to give Inductor's launcher to the kernels of a
graph as well, but the option does not reach the compile processes, which make the choice. So this
file chooses again when a compiled kernel arrives from them.

Inductor's launcher takes no kernel with scratch memory, such as one that makes tensor descriptors;
here such a kernel allocates its own memory (`WithScratch`). Kernels that an operator of ours
launches, not Inductor, get the same launcher once Triton has launched them (`relauncher`).

On an H200 a call with one kernel of ours then takes the host 4 microseconds less
(docs/performance/compile-time.md). With USED = False, or under `benchmarks.host --launcher
triton`, our kernels keep Triton's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator

from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._inductor.runtime.triton_heuristics import (
    CachingAutotuner,
    StaticTritonCompileResult,
    TritonCompileResult,
)

from fusion_backend.compat.triton import has_hooks, launch_again, scratch

log = logging.getLogger(__name__)

USED = True


@contextlib.contextmanager
def inductors_launcher(names: Callable[[], Collection[str]]) -> Iterator[None]:
    """Inside, compiled kernels of these names get Inductor's own launcher wherever it takes them,
    if USED is true.

    It takes none with launch hooks, clusters or cooperative grids, and none under the options
    `cpp_wrapper` and `use_static_cuda_launcher=False`: they keep Triton's.
    """
    if not USED:
        yield
        return
    precompile = CachingAutotuner._precompile_worker

    def precompiled(tuner: CachingAutotuner) -> None:
        precompile(tuner)
        ours = names()
        tuner.compile_results = [chosen(result, ours) for result in tuner.compile_results]

    CachingAutotuner._precompile_worker = precompiled
    try:
        yield
    finally:
        CachingAutotuner._precompile_worker = precompile


def chosen(compiled, names: Collection[str]):
    """The compiled kernel in the form for Inductor's launcher, if its name is among the names and
    the launcher takes it; otherwise unchanged.
    """
    if not isinstance(compiled, TritonCompileResult) or base_name(compiled) not in names:
        return compiled
    static = static_kernel(compiled)
    if static is None:
        return compiled
    meta = compiled.compile_meta, compiled.inductor_meta
    return StaticTritonCompileResult(static, compiled.config, *meta)


def base_name(compiled: TritonCompileResult) -> str:
    """The name of the kernel's function, to which Inductor appends a number."""
    return re.sub(r"_\d+$", "", compiled.kernel.src.fn.__name__)


def static_kernel(compiled: TritonCompileResult):
    """The kernel in the form for Inductor's launcher. None if the launcher does not take it, or if
    the check fails; Triton's launcher takes every kernel.
    """
    meta = compiled.inductor_meta, compiled.compile_meta
    kernel, size = compiled.kernel, scratch_size(compiled.kernel)
    try:
        asked = WithoutScratch(kernel) if size else kernel
        # USER_AUTOTUNE, which it is, would be refused
        static = StaticTritonCompileResult.can_statically_launch(asked, *meta, HeuristicType.FIXED)
        if not size:
            return static
        return WithScratch(asked, size) if type(static) is StaticallyLaunchedCudaKernel else None
    except Exception as error:
        log.info("%s keeps Triton's launcher: %s", base_name(compiled), error)
        return None


def scratch_size(kernel) -> int:
    """Bytes of scratch memory in global memory, for each program."""
    return getattr(getattr(kernel, "metadata", None), "global_scratch_size", None) or 0


class WithoutScratch:
    """A compiled kernel of Triton's that seems to need no scratch memory."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.metadata = kernel.metadata._replace(global_scratch_size=0)
        self._cubin_path = getattr(kernel, "_cubin_path", None)  # set by Inductor

    def __getattr__(self, name: str):
        return getattr(self.kernel, name)


class WithScratch(StaticallyLaunchedCudaKernel):
    """Inductor's form of a kernel that needs `size` bytes of scratch memory for each program, which
    each launch allocates, as Triton's launcher does.
    """

    def __init__(self, kernel: WithoutScratch, size: int):
        super().__init__(kernel)
        self.size = size
        # an ordinary argument after the kernel's own; Inductor would add a null pointer
        self.has_global_scratch, self.arg_tys = False, self.arg_tys + "O"

    @property
    def run(self) -> Callable[..., None]:
        """Not a bound method: from torch 2.14 on Inductor asks a bound one for its kernel, and
        launches that in C++, without the memory.
        """
        return functools.partial(run_with_scratch, self)


def run_with_scratch(kernel: WithScratch, x: int, y: int, z: int, stream: int, *args) -> None:
    """Launch a grid of x · y · z programs."""
    memory = scratch(x * y * z * kernel.size, 128, stream)
    super(WithScratch, kernel).run(x, y, z, stream, *args, memory)


def relauncher(kernel, constants: tuple) -> Callable[[int, int, tuple], None]:
    """A function that launches a kernel once more that Triton has compiled and launched for this
    GPU. It takes the number of programs, the stream, and the arguments that are no constants.
    """
    by_triton = functools.partial(launch_again, kernel, constants)
    static = with_loaded_code(kernel) if USED else None
    return by_triton if static is None else functools.partial(launch_statically, static, by_triton)


def with_loaded_code(kernel) -> WithScratch | None:
    """The kernel in the form for Inductor's launcher, with the code that Triton has loaded. None if
    the launcher does not take it.
    """
    try:
        static = WithScratch(WithoutScratch(kernel), scratch_size(kernel))
        static.function = kernel.function
        static.owner = kernel  # from Triton 3.8 on a kernel that nobody holds unloads its code
        return static
    except Exception as error:
        log.info("%s keeps Triton's launcher: %s", kernel.name, error)
        return None


def launch_statically(
    static: WithScratch, by_triton: Callable, programs: int, stream: int, args: tuple
) -> None:
    """Inductor's launcher calls no hooks: where there are some, of a profiler, Triton's does."""
    if has_hooks():
        by_triton(programs, stream, args)
    elif programs:  # Triton compiles None as a constant
        static.run(programs, 1, 1, stream, *[value for value in args if value is not None])
