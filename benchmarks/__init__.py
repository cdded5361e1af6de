"""Benchmarks and the demo; run as `python -m benchmarks.<name>` from the checkout. Not part of the
wheel.
"""
