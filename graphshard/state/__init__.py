"""What outlives a program: shards, calls before their backward, what stays gathered; and which program that asks for.

Imports `lowering` and what is below it; knows no region.
"""
