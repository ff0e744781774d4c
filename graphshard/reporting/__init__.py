"""What happened, for users who ask afterwards: records of programs, measured collectives, names in traces, tables.

Imports `graph` and what is below it.
"""
