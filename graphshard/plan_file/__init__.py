"""Plan files: what was decided for every program of a model, to be read, diffed, checked in and replayed.

Data and its text, no graph. Imports `graph.plan` and `planner`.
"""

from graphshard.plan_file.changes import outline_changes, plan_changes
from graphshard.plan_file.contents import (
    FORMAT,
    VERSION,
    Costs,
    Plan,
    Prediction,
    StoredProgram,
    StoredStep,
    ordered_programs,
    program_flags,
    program_name,
    stored_program,
)
from graphshard.plan_file.outline import (
    MemberOutline,
    OpOutline,
    Outline,
    OwnOutline,
    outline_hash,
    outline_of,
    problem_of,
)
from graphshard.plan_file.replay import PlanMismatch, ProgramProblem, replay
from graphshard.plan_file.text import load_plan, parse_plan, plan_digest, plan_text, write_plan

__all__ = [
    "FORMAT",
    "VERSION",
    "Costs",
    "MemberOutline",
    "OpOutline",
    "Outline",
    "OwnOutline",
    "Plan",
    "PlanMismatch",
    "Prediction",
    "ProgramProblem",
    "StoredProgram",
    "StoredStep",
    "load_plan",
    "ordered_programs",
    "outline_changes",
    "outline_hash",
    "outline_of",
    "parse_plan",
    "plan_changes",
    "plan_digest",
    "plan_text",
    "problem_of",
    "program_flags",
    "program_name",
    "replay",
    "stored_program",
    "write_plan",
]
