"""What runs when a compiled model is called: the engine, its backend for Dynamo, regions and what happens between them.

Imports every room below; only the top level and `scale`, which traces with it, import it.
"""
