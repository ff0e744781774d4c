"""Process groups in Python: a network that is pretended in one process, and what every such group needs.

Imports graphshard, and nothing of bench.
"""
