"""Convolutions with what is computed from their result."""
