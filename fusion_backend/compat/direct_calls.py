"""Operators that Inductor's code calls without PyTorch's dispatcher.

An operator that Inductor cannot see into is called as torch.ops.…, and the dispatcher then calls
the Python function behind it. Where that is all that the dispatcher would do, the generated code
calls the function itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._inductor.codegen.custom_extern_kernel_codegen import (
    CUSTOM_EXTERN_KERNEL_CODEGEN,
    CustomCodegen,
)
from torch._ops import OpOverload


def call_directly(op: OpOverload, function: Callable) -> None:
    """Let Inductor's Python code call `function` with the arguments of `op`. Its C++ code, which
    cannot, calls the operator.
    """
    op.python_function = function  # type: ignore[attr-defined]  # where generated code finds it

    def write(node, writeline: Callable[[str], None]) -> None:
        args = ", ".join([*node.codegen_args(), *node.codegen_kwargs()])
        writeline(f"{node.get_name()} = torch.ops.{op}.python_function({args})")

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}"] = CustomCodegen(python=write)
