"""Softmax over rows, forward and backward, with a scale and a mask that broadcasts."""
