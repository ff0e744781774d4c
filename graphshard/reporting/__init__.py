"""What happened, for users who ask afterwards: records of programs, measured collectives, names in traces.

Imports `graph` and what is below it.
"""
