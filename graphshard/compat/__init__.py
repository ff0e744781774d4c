"""Everything private of torch (2.11 to 2.15), each behind a plain function; a file for each part of torch.

Imports nothing of graphshard.
"""
