"""Schedules on paper, of graphshard's planner and of others, on one simulator: `__main__`.

Imports `harness`.
"""
