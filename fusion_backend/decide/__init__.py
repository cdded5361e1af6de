"""Whether a site may be fused, whether it should be, and which provider computes it.

Comes in: matches and what is known of the graph around them.
Goes out: decisions, each with its reason.
May import: options, match, masks, ops, kernels, ir, capture, reporting, compat.
"""
