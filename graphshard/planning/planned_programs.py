"""What a compiled model has planned so far, as the content of a plan file."""

from __future__ import annotations

import torch

from graphshard.plan_file import (
    FORMAT,
    VERSION,
    Costs,
    Plan,
    ordered_programs,
    outline_of,
    program_flags,
    stored_program,
)
from graphshard.planning.planning import Planning
from graphshard.reporting.report import Report
from graphshard.version import __version__


def planned_so_far(planning: Planning, report: Report, model: str) -> Plan:
    """The plans of all programs that were lowered and had something to plan.

    Args:
        planning: of the model.
        report: likewise.
        model: its name in the flags of its programs.
    """
    programs = [
        stored_program(
            record.region,
            program_flags(record.flags, model),
            record.decision,
            outline_of(record.decision.problem, planning.ranks_of),
        )
        for record in report.programs
        if record.decision is not None
    ]
    cost = planning.scene.cost
    return Plan(
        FORMAT,
        VERSION,
        __version__,
        str(torch.__version__),
        Costs(cost.hardware.name, cost.fingerprint),
        "fsdp2" if planning.mode == "fsdp2" else "auto",
        planning.budget_bytes,
        ordered_programs(programs),
    )
