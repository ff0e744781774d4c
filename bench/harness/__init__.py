"""What several benches share: models, ways to run them, processes to measure in, what a table and a claim are.

Imports graphshard, and no bench.
"""
