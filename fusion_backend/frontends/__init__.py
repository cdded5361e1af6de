"""The ways into the pipeline: `torch.compile`, `torch.export`, `explain` and the command line.

Comes in: a user's model, graph or exported program.
Goes out: a compiled function, a rewritten program, or a report.
May import: everything.
"""
