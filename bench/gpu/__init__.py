"""What is claimed of one GPU, in one table: `__main__` runs `bench.copies` and `bench.overlap` as processes.

Imports `harness`.
"""
