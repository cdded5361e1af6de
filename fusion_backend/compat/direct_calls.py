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
from torch._inductor.virtualized import V
from torch._ops import OpOverload


def call_directly(op: OpOverload, function: Callable) -> None:
    """Let Inductor's Python code call `function` with the arguments of `op`. Its C++ code, which
    cannot, calls the operator.
    """
    op.directly = function  # type: ignore[attr-defined]  # where the generated code finds it

    def write(node, writeline: Callable[[str], None]) -> None:
        node.set_python_kernel_name(f"torch.ops.{op}.directly")
        V.graph.wrapper_code.generate_fallback_kernel(node)

    CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{op}"] = CustomCodegen(python=write)
