"""Graphs that run operator by operator where Inductor would generate and compile C++.

Dynamo, the pass, AOTAutograd and Inductor's passes over the joint graph work as they always do, so
guards, aliases, strides, what is saved for backward and the numbers are those of a user. Only the
last step is replaced, which compiles for a second or more a graph. `python -m pytest --full`
compiles everything with Inductor.
"""

import contextlib
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
from functorch.compile import make_boxed_func


@contextlib.contextmanager
def eager_kernels(seen=lambda gm, options: None):
    """Inside, what Inductor compiles runs with eager kernels; `seen` gets every such graph."""

    def inner(gm, example_inputs, **options):
        seen(gm, options)
        gm.recompile()
        return make_boxed_func(gm.forward)

    with (
        mock.patch.object(compile_fx, "_compile_fx_inner", inner),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
