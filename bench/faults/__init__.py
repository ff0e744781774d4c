"""What becomes of a job in which something goes wrong on one rank: `__main__`.

Imports `networks`, for its process group, and `harness`.
"""
