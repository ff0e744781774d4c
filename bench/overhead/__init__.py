"""What graphshard costs the host in a step, and what ranks take to agree: `__main__`.

Imports `harness`.
"""
