"""Rules, ops and patterns as their authors define them, and the torch operators made of them.

Comes in: plain torch functions.
Goes out: `torch.ops.fusion.*`, with a gradient and providers, and the rules to search for.
May import: kernels, reporting, compat.
"""
