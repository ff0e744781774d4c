"""What a compiled model has planned so far: as the content of a plan file, and explained."""

from __future__ import annotations

import torch

from graphshard.explain import Explanation, PlannedProgram
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
from graphshard.reporting.report import ProgramRecord, Report
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


def explanation_of(planning: Planning | None, report: Report) -> Explanation:
    """What was decided for each program of a model, and why; `planning`: of the model, None: as in FSDP2."""
    explained = (explained_program(record, planning) for record in report.programs)
    programs, notes = [program for program in explained if program is not None], []
    if not programs:
        notes.append("no program has been planned yet: run a step")
    if not any(program.measured for program in programs):
        notes.append(
            "times are predicted; `with graphshard.measure(model):` around some steps puts measured ones beside"
        )
    return Explanation(tuple(programs), _hardware(planning), (*notes, *report.fallbacks, *report.notes))


def explained_program(record: ProgramRecord, planning: Planning | None) -> PlannedProgram | None:
    """The same of one program; None: nothing was planned for it."""
    if (decision := record.decision) is None:
        return None
    flags = "" if record.flags == "default" else f" [{record.flags}]"
    return PlannedProgram(
        f"region {record.region} {record.direction}{flags}",
        decision.problem,
        decision.choice.schedule,
        decision.choice.simulation,
        decision.choice.lower_bound_us,
        "fsdp2" if planning is None else planning.mode,
        tuple(bucket.name for bucket in decision.plan.buckets),
        decision.choice.baselines,
        decision.budget_bytes,
        record.timings or None,
    )


def explained_text(record: ProgramRecord, planning: Planning | None) -> str:
    """The same as text."""
    found = explained_program(record, planning)
    return "" if found is None else Explanation((found,), _hardware(planning)).to_text()


def _hardware(planning: Planning | None) -> str:
    return "none" if planning is None else planning.scene.cost.hardware.name
