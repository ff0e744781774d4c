"""What graphshard costs the host in a step, what it takes to compile, and what ranks take to agree: `__main__`.

Imports `harness`.
"""
