"""What regions of equal blocks save in the first step and cost in later ones: `__main__`.

Imports `step`, whose training it is, and `harness`.
"""
