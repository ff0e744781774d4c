"""What is planned for the programs of one model: the problem read off a graph, the schedule kept for it, plan files.

Imports `agree`, `kernels` and what is below them; knows no engine.
"""
