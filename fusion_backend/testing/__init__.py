"""Tests of patterns and graph rewrites, for the project and for its users.

rewritten, assert_fuses and check_pattern test a pattern; spellings and near_misses generate other
ways to write it, and recall says how many of them are recognised.

Comes in: a function or a pattern.
Goes out: a rewritten graph, an assertion, or a proof.
May import: frontends, match, ops, kernels, ir, capture, cache, reporting, compat.
"""

from fusion_backend.testing.asserts import (
    assert_fuses,
    collect,
    fused_nodes,
    graph_text,
    rewritten,
    with_kernels,
)
from fusion_backend.testing.check_pattern import check_pattern
from fusion_backend.testing.compare import (
    FACTOR,
    ULPS,
    DropoutOfKernels,
    arguments,
    close,
    in_fp64,
    supported_forms,
    unfused,
    value_and_gradients,
)
from fusion_backend.testing.proof import Proof
from fusion_backend.testing.spelling.generate import near_misses, spellings
from fusion_backend.testing.spelling.recall import recall

__all__ = [
    "FACTOR",
    "ULPS",
    "DropoutOfKernels",
    "Proof",
    "arguments",
    "assert_fuses",
    "check_pattern",
    "close",
    "collect",
    "fused_nodes",
    "graph_text",
    "in_fp64",
    "near_misses",
    "recall",
    "rewritten",
    "spellings",
    "supported_forms",
    "unfused",
    "value_and_gradients",
    "with_kernels",
]
