"""`graphshard.debug`: a page with all that becomes of a model while some steps run.

Dynamo's code, read by depyf, graphs before and after each pass, plans, generated code and the report. Imports
`explaining` and what is below it.
"""

from graphshard.debugging.session import debug

__all__ = ["debug"]
