"""Explains a plan: what it takes, what the computation waits for and why, as text, page, picture or trace.

From data alone: no model, no graph, no process group. Imports `planner`.
"""

from graphshard.explain.explanation import Explanation
from graphshard.explain.program import PlannedProgram
from graphshard.explain.terminal import print_explanation

__all__ = ["Explanation", "PlannedProgram", "print_explanation"]
