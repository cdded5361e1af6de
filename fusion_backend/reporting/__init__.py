"""Why a site was fused or not, in sentences, as text and as JSON.

Comes in: decisions, near misses and exceptions.
Goes out: reports, warnings and log lines.
May import: compat.
"""
