"""Generated spellings and near misses of a pattern, and the proof that they are recognised and left
right.
"""
