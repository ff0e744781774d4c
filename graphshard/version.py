"""The version of graphshard."""

__version__ = "0.2.0"
