"""The version of graphshard."""

__version__ = "0.1.0"
