"""A schedule of numbers as a plan in names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from graphshard.graph.plan import END, PlannedBucket, PlannedStep, ProgramPlan, bucket_name
from graphshard.planner import Problem, Schedule, Tasks, is_coalesced


def bucket_is_coalesced(problem: Problem, kind: str, members: Sequence[str]) -> bool:
    """Whether a bucket of these gathers, or else reductions, of a problem is sent without a flat buffer."""
    items: Tasks = problem.gathers if kind == "gather" else problem.reductions
    found: Any = [item for item in items if item.fqn in members]
    return len(found) == len(members) and is_coalesced(found)


def named_plan(problem: Problem, schedule: Schedule) -> ProgramPlan:
    """A schedule in names: buckets by the units that they are of, members by FQN, positions by node."""
    names: Counter[str] = Counter()
    buckets = []
    for number, bucket in enumerate(schedule.buckets):
        members = schedule.members(problem, number)
        units = list(dict.fromkeys(member.unit for member in members))
        buckets.append(
            PlannedBucket(bucket_name(bucket.kind, units, names), bucket.kind, tuple(m.fqn for m in members))
        )
    ends = (*problem.ops, END)
    steps = (PlannedStep(ends[at], step, buckets[number].name) for at, step, number in schedule.steps)
    return ProgramPlan(tuple(buckets), tuple(steps))
