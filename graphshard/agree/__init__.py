"""How ranks come to the same, through the store: lines compared, decisions one rank makes for all, what was executed.

Runs no collective. Imports `reporting`, `plan_file` and what is below them.
"""
