"""Normalisations, forward and backward: of rows (layer, RMS, unit length), groups and channels."""
