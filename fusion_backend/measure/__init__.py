"""Measures what a decision gains in its graph: regions are compiled with and without it, and timed.

Comes in: decisions and the view.
Goes out: measured answers, which are kept on disk.
May import: options, rewrite, decide, match, ops, kernels, ir, cache, capture, reporting, compat.
"""
