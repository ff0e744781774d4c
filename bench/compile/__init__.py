"""Where the seconds of the first training step go, by phase of the compilers, and how they grow with depth: `__main__`.

Imports `harness`.
"""
