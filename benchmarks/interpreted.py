"""Every pattern's Triton kernels on small CPU tensors, in Triton's interpreter.

    TRITON_INTERPRET=1 python -m benchmarks.interpreted

For each pattern this prints how many kernels were launched, and the errors of result and gradients
against fp64, with those of the plain torch code in fp32. Integer results must be exactly those of
the plain code. Exit status: 1 where a kernel is worse than twice the plain code's error; 2 without
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import sys

import fusion_backend.patterns  # noqa: F401  (fills the registry)

from benchmarks.launches.interpreted import compare
from fusion_backend.kernels.common.reachable import kernels_of
from fusion_backend.ops.pattern import Pattern
from fusion_backend.ops.registry import FUSION_RULES


def main() -> int:
    if os.environ.get("TRITON_INTERPRET") != "1":
        print(
            "benchmarks.interpreted: set TRITON_INTERPRET=1 before Python starts", file=sys.stderr
        )
        return 2
    return not all([compare(pattern) for pattern in with_kernels()])


def with_kernels() -> list[Pattern]:
    """The patterns with Triton kernels, and with inputs to run them with; conv_relu has a call of
    cuDNN instead.
    """
    known = (rule for rule in FUSION_RULES.values() if isinstance(rule, Pattern))
    return [p for p in known if p.inputs_fn and kernels_of([p.kernel_fn])]


if __name__ == "__main__":
    sys.exit(main())
