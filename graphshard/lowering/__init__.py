"""From a graph with markers to one that runs: the passes in order, verified, within a memory budget.

Imports `passes`, `planning` and what is below them.
"""
