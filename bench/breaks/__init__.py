"""What a graph break in each block costs a sharded model: `__main__`."""
