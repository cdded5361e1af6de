"""Capture: a Dynamo graph is retraced into ATen operators above autograd, as a view that is read
and never compiled.

Comes in: a Dynamo graph or an exported graph.
Goes out: a view: each ATen node and the Dynamo node it belongs to.
May import: reporting, compat.
"""
