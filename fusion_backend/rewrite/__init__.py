"""Writes `torch.ops.fusion.*` into the Dynamo graph at the accepted sites.

Comes in: decisions and the view.
Goes out: a graph module, the very same object where nothing was accepted.
May import: decide, match, masks, ops, ir, capture, kernels, reporting, compat.
"""
