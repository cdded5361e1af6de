"""Comes in: what was measured, and the machine and the commit that it was measured on.
Goes out: JSON files under benchmarks/results/ and their rows as objects.
May import: nothing.
"""
