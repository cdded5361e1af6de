"""Decides whether a site may be fused (legality), whether it should be (profitability), and which
call replaces it.

Comes in: matches and what is known of the graph around them.
Goes out: decisions, each with its reason and the call that replaces the site.
May import: options, match, masks, ops, kernels, ir, capture, reporting, compat.
"""
