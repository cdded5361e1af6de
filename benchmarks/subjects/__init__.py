"""Comes in: names, sizes, or the user's own function.
Goes out: whole models with random or pretrained weights, and their inputs.
May import: nothing.
"""
