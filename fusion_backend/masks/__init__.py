"""Finds what an attention mask keeps, from the operators that compute it.

Comes in: a mask's node.
Goes out: a description: everything, causal, a band, a vector over the keys, or dense.
May import: ir, capture, reporting, compat.
"""
