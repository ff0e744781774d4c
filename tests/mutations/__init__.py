"""Deliberate breaks of graphshard, a few in each room, each of which a test has to notice: `make mutants`."""
