"""Comes in: calls and tensors.
Goes out: times, memory, operations, distances from exact results, and whether a difference is
noise.
May import: records.
"""
