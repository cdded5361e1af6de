"""The Dynamo graph with `torch.ops.fusion.*` at the accepted sites.

Comes in: decisions and the view.
Goes out: a graph module, the very same object where nothing was accepted.
May import: decide, match, masks, ops, ir, capture, reporting, compat.
"""
