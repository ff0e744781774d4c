"""What a graph with communication is made of: markers, collectives, plans, and what can be read off nodes.

Knows nodes only: no engine, no call, no process. Imports `planner`, `cost`, `fsdp2.settings`, `compat` and `errors`.
"""
