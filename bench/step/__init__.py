"""Whole training steps against those of FSDP2 and DDP: their time, their memory, the seconds of the first: `__main__`.

Imports `harness`.
"""
