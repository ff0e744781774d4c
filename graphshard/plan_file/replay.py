"""Whether a stored plan fits a program, and what it decides for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphshard.graph.plan import Decision
from graphshard.plan_file.changes import listed, outline_changes
from graphshard.plan_file.contents import Plan, StoredProgram
from graphshard.plan_file.outline import Outline, outline_of
from graphshard.planner import (
    Choice,
    Problem,
    check_schedule,
    fixed_size_schedule,
    fsdp2_schedule,
    lower_bound_us,
    per_parameter_schedule,
    simulate,
)

_SIDES = ("in the file", "in the model")


class PlanMismatch(ValueError):
    """A plan file has a plan for a program, but the program is not the one that was planned."""


@dataclass(frozen=True)
class ProgramProblem:
    """A program that a plan may fit: its name, and its problem.

    Attributes:
        region: number of its region.
        direction: ``"forward"``, ``"backward"`` or ``"inference"``.
        flags: the run-time state that it serves.
        extract: its problem. Takes names of ops to begin, None for those that costs say: which nodes make one op is a
            matter of their times, and a plan must fit on every machine.
        ranks_of: number of ranks of a process group, by its name.
        fqns: of all its parameters, those that are gathered already included.
    """

    region: int
    direction: str
    flags: str
    extract: Callable[[frozenset[str] | None], Problem]
    ranks_of: Callable[[str], int]
    fqns: frozenset[str]


def replay(plan: Plan, program: ProgramProblem, where: str, budget_bytes: int | None = None) -> Decision | None:
    """What `plan` decides for `program`; None: it has no plan of that name, but may be of the same model.

    Args:
        plan: of a file.
        program: to lower.
        where: says in errors where `plan` is from.
        budget_bytes: most that the program may allocate, beside what the file says.

    Raises:
        PlanMismatch: the program is not the one that was planned, or its plan does not do what the file says.
    """
    candidates = plan.find(program.region, program.direction, program.flags)
    if not candidates:
        _check_known(plan, program, where)
        return None
    extracted = [(stored, *_extracted(stored, program)) for stored in candidates]
    for stored, problem, outline in extracted:
        if outline == stored.outline:
            return _decision(plan, stored, problem, where, budget_bytes)
    # Several of one name: the one with the most parameters in common says best what has changed.
    stored, _, outline = max(extracted, key=lambda entry: len({*entry[0].outline.members} & {*entry[2].members}))
    changes = "; ".join(outline_changes(stored.outline, outline, _SIDES))
    raise _mismatch(where, stored, f"the program is not the one that was planned: {changes}", plan)


def _check_known(plan: Plan, program: ProgramProblem, where: str) -> None:
    """Raises:
    PlanMismatch: the parameters of `program` are not those of its region in the file, whatever the flags.
    """
    region = [stored for stored in plan.programs if stored.region == program.region]
    own = [stored for stored in region if stored.outline.direction == program.direction]
    known = {(member.kind, member.fqn): member.wire_bytes for stored in region for member in stored.outline.members}
    planned = {_parameter(fqn) for _, fqn in known}
    if not own or planned.isdisjoint(program.fqns):  # another one of the equal blocks that share a region
        return
    moved = outline_of(program.extract(None), program.ranks_of).members
    changes = {
        "parameters only in the file": min(
            (sorted({_parameter(m.fqn) for m in stored.outline.members} - program.fqns) for stored in own), key=len
        ),
        "parameters only in the model": sorted({_parameter(m.fqn) for m in moved} - planned),
        "parameters of other sizes": [m.fqn for m in moved if known.get((m.kind, m.fqn), m.wire_bytes) != m.wire_bytes],
    }
    if said := [f"{what}: {listed(names)}" for what, names in changes.items() if names]:
        raise _mismatch(where, own[0], f"the model is not the one that was planned: {'; '.join(said)}", plan)


def _parameter(member: str) -> str:
    """The FQN of a member, which may be one of several of one parameter."""
    return member.partition("#")[0]


def _extracted(stored: StoredProgram, program: ProgramProblem) -> tuple[Problem, Outline]:
    problem = program.extract(frozenset(op.name for op in stored.outline.ops))
    return problem, outline_of(problem, program.ranks_of)


def _decision(plan: Plan, stored: StoredProgram, problem: Problem, where: str, budget_bytes: int | None) -> Decision:
    schedule = stored.schedule
    try:
        check_schedule(problem, schedule)
    except ValueError as error:
        raise _mismatch(where, stored, str(error), plan) from error
    if plan.mode == "fsdp2" and schedule != fsdp2_schedule(problem):
        raise _mismatch(where, stored, "got mode 'fsdp2' and other buckets or steps, want mode 'auto'", plan)
    simulation = simulate(problem, schedule)
    for name, most in (("budget_bytes", stored.budget_bytes), ("memory_budget", budget_bytes)):
        if most is not None and simulation.peak_bytes > most:
            got = f"got a plan that allocates {simulation.peak_bytes} bytes"
            raise _mismatch(where, stored, f"{got}, want at most its {name}, {most}", plan)
    makers = {"fsdp2": fsdp2_schedule, "per_parameter": per_parameter_schedule, "fixed_size": fixed_size_schedule}
    compared = makers if plan.mode == "auto" else {}
    baselines = {name: simulate(problem, make(problem)) for name, make in compared.items()}
    choice = Choice(
        schedule,
        simulation,
        lower_bound_us(problem),
        stored.chosen,
        tuple((name, baseline.step_us, baseline.peak_bytes) for name, baseline in baselines.items()),
    )
    return Decision(problem, choice, stored.plan, stored.budget_bytes, stored.kept)


def _mismatch(where: str, stored: StoredProgram, what: str, plan: Plan) -> PlanMismatch:
    return PlanMismatch(
        f"{where}: {stored.name}: {what}. It was planned with torch {plan.torch} and graphshard {plan.graphshard}. "
        "Give the model, mesh and arguments (strategy, reshard_after_forward, mp_policy, backend) that it was planned "
        "for, or plan anew with plan='auto' and write it with graphshard.save_plan"
    )
