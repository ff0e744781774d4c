"""A rank whose graphs are not those of the other ranks does what they do, bucket by bucket.

Imports `state` and what is below it; is told of regions by `runtime`.
"""
