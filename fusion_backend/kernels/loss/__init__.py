"""Losses of rows of logits, and their gradients."""
