"""What torch (2.11 to 2.15) and CPython keep private, but for FSDP2: a plain function each, a file for each part of it.

Imports nothing of graphshard.
"""
