"""What a decision is worth where it stands: regions of a graph, compiled with and without it and
timed.

Comes in: decisions and the view.
Goes out: measured answers, which are kept on disk.
May import: options, rewrite, decide, match, ops, kernels, ir, cache, capture, reporting, compat.
"""
