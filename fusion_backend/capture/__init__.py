"""The view: a Dynamo graph retraced into ATen operators above autograd, only to be looked at.

Comes in: a Dynamo graph or an exported graph.
Goes out: a view: each ATen node and the Dynamo node it belongs to.
May import: reporting, compat.
"""
