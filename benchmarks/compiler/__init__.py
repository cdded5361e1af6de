"""Comes in: graphs and whole models.
Goes out: what the pass costs on them, what it recognises in them, and whether its results are
right.
May import: measure, subjects, launches.
"""
