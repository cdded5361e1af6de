"""Comes in: jobs, and what a process does with one.
Goes out: what the processes found, many at a time, or why one is lost; turns on the GPU that they
share.
May import: nothing.
"""
