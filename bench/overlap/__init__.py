"""How much of the communication no computation hides, on pretended networks: `__main__`.

Imports `networks` and `harness`.
"""
