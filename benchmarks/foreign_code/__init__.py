"""Comes in: the name of a problem, and a size.
Goes out: a module and its inputs, in the shapes and the style of public code that was not written
for this project.
May import: nothing.
"""
