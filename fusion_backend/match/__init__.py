"""The search for rules in a canonical graph.

Comes in: canonical expressions and rules.
Goes out: matches, and near misses with the reason why they are none.
May import: ir, ops, cache, capture, reporting, compat.
"""
