"""Comes in: the launchers of the patterns.
Goes out: what they would launch, compiled for sm_90 or run in Triton's interpreter, without a GPU.
May import: records, measure.
"""
