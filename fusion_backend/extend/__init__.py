"""Extends matches of row kernels by the elementwise code around them, which is generated into the
kernel.

Comes in: matches and canonical expressions.
Goes out: larger matches, whose op is `generated_rows`.
May import: options, match, ops, kernels, ir, capture, reporting, compat.
"""
