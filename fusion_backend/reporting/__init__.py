"""Reports: each recognised site, whether it was fused and why, as text, JSON and log lines.

Comes in: decisions, near misses and exceptions.
Goes out: reports, warnings and log lines.
May import: compat.
"""
