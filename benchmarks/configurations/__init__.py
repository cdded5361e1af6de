"""Comes in: kernels and the choices that their launchers have.
Goes out: the time of each choice, and the table of the fastest.
May import: records, measure, workloads, pattern_runs.
"""
