"""The project's identity in Inductor's caches, and traced patterns on disk.

Comes in: patterns, options and decisions.
Goes out: keys, fingerprints, and the templates of an earlier process.
May import: the package itself, ir, ops, reporting, compat.
"""
