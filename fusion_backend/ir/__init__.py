"""Canonical, hash-consed expressions: equal values are one object however they were spelt.

Comes in: ATen operators.
Goes out: expressions.
May import: capture, reporting, compat.
"""
