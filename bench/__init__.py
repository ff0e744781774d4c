"""Measurements; `python -m bench.NAME` prints one table."""
