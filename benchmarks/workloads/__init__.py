"""Comes in: the patterns of fusion_backend.
Goes out: pieces of work with sizes, arguments, bytes and operations, and the
ones that a command line asks for.
May import: measure.
"""
