"""How a model comes to be captured: which modules are units, what Dynamo sees in place of their parameters and hooks.

Knows modules, not graphs' nodes. Imports `graph.markers`, `fsdp2` and `compat`.
"""
