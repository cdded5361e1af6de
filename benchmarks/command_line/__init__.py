"""Comes in: command lines of the benchmarks.
Goes out: arguments, refused before anything is measured, and lines on stderr that say what a run is
doing.
May import: nothing.
"""
