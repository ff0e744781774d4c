"""What it takes to choose the programs of a step, and to flip a flag: `__main__`.

Imports `harness`.
"""
