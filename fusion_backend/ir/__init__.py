"""Canonical, hash-consed expressions: equal values are one object however they were spelt.

Comes in: ATen operators.
Goes out: expressions.
May import: capture, reporting, compat.
"""

from fusion_backend.ir.builder import Builder
from fusion_backend.ir.expr import Expr
from fusion_backend.ir.rules import Count, composite, counts, reset_counts, rule
from fusion_backend.ir.schema_args import Call

__all__ = ["Builder", "Call", "Count", "Expr", "composite", "counts", "reset_counts", "rule"]
