"""Generated spellings of a pattern and near misses, and how many of them the pass recognises and
leaves alone.
"""
