"""Attention whose scores are never in memory, with the masks that graphs have; its gradients."""
