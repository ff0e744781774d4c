"""Measurements, a room for each: `python -m bench.NAME` prints one table. What several of them share is `harness`."""
