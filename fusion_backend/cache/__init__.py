"""The project's keys in Inductor's caches, and the templates of patterns on disk.

Comes in: patterns, options and decisions.
Goes out: keys, fingerprints, and the templates of an earlier process.
May import: the package itself, ir, ops, reporting, compat.
"""
