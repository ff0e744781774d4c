"""An agreed order of collectives in the program of another rank: kept, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problems

from graphshard.planner import (
    Bucket,
    GatherTask,
    OrderImpossible,
    OwnCollective,
    OwnPlace,
    Problem,
    ReductionTask,
    Schedule,
    Transfer,
    check_schedule,
    fsdp2_schedule,
    own_places,
    realised_schedule,
    simulate,
)
from graphshard.planner.schedule import StepKind
from graphshard.planner.search import searched

TRANSFER = Transfer(0, ((1.0, 1.0),))


def launches(schedule: Schedule) -> list[Bucket]:
    return [schedule.buckets[step.bucket] for step in schedule.steps if step.kind == "launch"]


def searched_for(problem: Problem) -> tuple[Schedule, list[Bucket], list[tuple[StepKind, int]]]:
    """A good schedule, its buckets in order of launch, and its steps as hints."""
    found = searched(problem, 10**9, trials=20).best
    assert found is not None
    planned = found.schedule()
    buckets = launches(planned)
    number_of = {bucket: number for number, bucket in enumerate(buckets)}
    return planned, buckets, [(step.kind, number_of[planned.buckets[step.bucket]]) for step in planned.steps]


def stretched(problem: Problem, factor: int) -> Problem:
    """The same with `factor` ops in the place of each: what other shapes make of it."""

    def moved(item: GatherTask | ReductionTask) -> GatherTask | ReductionTask:
        if isinstance(item, ReductionTask):
            return replace(item, ready=item.ready * factor)
        return replace(
            item, ready=item.ready * factor, first_use=item.first_use * factor, last_use=item.last_use * factor
        )

    return replace(
        problem,
        ops=tuple(f"{name}_{i}" for name in problem.ops for i in range(factor)),
        op_us=tuple(us for us in problem.op_us for _ in range(factor)),
        op_bytes=tuple(size for size in problem.op_bytes for _ in range(factor)),
        gathers=tuple(map(moved, problem.gathers)),  # type: ignore[arg-type]
        reductions=tuple(map(moved, problem.reductions)),  # type: ignore[arg-type]
        own=tuple(replace(own, launch=own.launch * factor, wait=own.wait * factor) for own in problem.own),
    )


@given(problems(own=False), st.integers(1, 3), st.booleans(), st.booleans())
def test_order_of_launches_is_kept_in_another_program(problem: Problem, factor: int, hints: bool, early: bool) -> None:
    _, buckets, steps = searched_for(problem)
    other = stretched(problem, factor)
    found = realised_schedule(other, buckets, steps if hints else (), early)
    check_schedule(other, found)
    assert launches(found) == buckets
    simulate(other, found)


@given(problems(), st.integers(1, 3), st.booleans(), st.booleans())
def test_places_of_a_model_s_own_collectives_are_kept(problem: Problem, factor: int, hints: bool, early: bool) -> None:
    planned, buckets, steps = searched_for(problem)
    other = stretched(problem, factor)
    own = own_places(problem, planned)
    try:
        found = realised_schedule(other, buckets, steps if hints else (), early, own)
    except OrderImpossible:
        assert not hints
        return
    assert launches(found) == buckets
    assert own_places(other, found) == own


def test_bucket_on_the_wrong_side_of_a_model_s_own_collective_is_refused_by_name() -> None:
    gather = GatherTask("w", "u", 0, TRANSFER, 1, 1, first_use=1, last_use=2)
    own = OwnCollective("sum", 0, 1.0, launch=2, wait=3)
    problem = Problem("forward", ("a", "b", "c"), (1.0,) * 3, (0,) * 3, (gather,), (), (own,))
    with pytest.raises(OrderImpossible, match="the gather of w cannot be launched on that side of the model's own"):
        realised_schedule(problem, [Bucket("gather", (0,))], own=[OwnPlace(0)])


@given(problems(own=False))
def test_late_gathers_hold_no_more_memory_than_early_ones(problem: Problem) -> None:
    gathers = replace(problem, reductions=())
    buckets = launches(fsdp2_schedule(gathers))
    early, late = (simulate(gathers, realised_schedule(gathers, buckets, early=e)).peak_bytes for e in (True, False))
    assert late <= early


def test_order_that_computation_forbids_is_refused_by_name() -> None:
    gather = GatherTask("late", "u", 0, TRANSFER, 1, 1, first_use=1, last_use=2)
    reduction = ReductionTask("early", "v", 1, TRANSFER, 1, 1, 1, ready=2)
    problem = Problem("backward", ("a", "b", "c"), (1.0,) * 3, (0,) * 3, (gather,), (reduction,))
    buckets = [Bucket("reduce", (0,)), Bucket("gather", (0,))]
    assert launches(realised_schedule(problem, buckets[::-1])) == buckets[::-1]
    with pytest.raises(OrderImpossible, match="the gather of late is needed before the reduce of early"):
        realised_schedule(problem, buckets)


def test_steps_stand_behind_what_came_before_them() -> None:
    gathers = tuple(
        GatherTask(f"g{i}", "u", 0, TRANSFER, 1, 1, first_use=at, last_use=6) for i, at in enumerate((1, 4))
    )
    reductions = tuple(ReductionTask(f"r{i}", "u", 1, TRANSFER, 1, 1, 1, ready=at) for i, at in enumerate((2, 3, 5)))
    problem = Problem("backward", tuple("abcdef"), (1.0,) * 6, (0,) * 6, gathers, reductions)
    g0, g1, r0, r1, r2 = range(5)
    buckets = [*(Bucket("gather", (i,)) for i in range(2)), *(Bucket("reduce", (i,)) for i in range(3))]
    steps: list[tuple[StepKind, int]] = [("launch", g0), ("wait", g0), ("launch", g1), ("launch", r0), ("launch", r1)]
    steps += [("wait", r0), ("wait", g1), ("wait", r1), ("launch", r2), ("wait", r2)]
    placed = {early: realised_schedule(problem, buckets, steps, early).steps for early in (True, False)}
    assert [tuple(step) for step in placed[True]] == [
        (0, "launch", g0), (1, "wait", g0), (1, "launch", g1), (2, "launch", r0), (3, "launch", r1), (3, "wait", r0),
        (4, "wait", g1), (4, "wait", r1), (5, "launch", r2), (5, "wait", r2),
    ]  # fmt: skip
    assert [step.before for step in placed[False] if step.kind == "launch"] == [1, 4, 4, 4, 5]


def test_gather_that_is_needed_before_an_earlier_one_is_launched_in_time() -> None:
    gathers = tuple(
        GatherTask(f"g{i}", "u", 0, TRANSFER, 1, 1, first_use=at, last_use=6) for i, at in enumerate((2, 4))
    )
    reduction = ReductionTask("r", "u", 1, TRANSFER, 1, 1, 1, ready=1)
    problem = Problem("backward", tuple("abcdef"), (1.0,) * 6, (0,) * 6, gathers, (reduction,))
    found = realised_schedule(problem, [Bucket("gather", (1,)), Bucket("gather", (0,)), Bucket("reduce", (0,))])
    assert [tuple(step) for step in found.steps] == [
        (0, "launch", 0), (2, "launch", 1), (2, "launch", 2), (2, "wait", 1), (4, "wait", 0), (4, "wait", 2),
    ]  # fmt: skip


def test_hints_of_another_order_are_refused() -> None:
    gathers = tuple(GatherTask(f"w{i}", "u", 0, TRANSFER, 1, 1, first_use=i, last_use=2) for i in range(2))
    problem = Problem("forward", ("a", "b"), (1.0,) * 2, (0,) * 2, gathers, ())
    buckets = [Bucket("gather", (0,)), Bucket("gather", (1,))]
    with pytest.raises(OrderImpossible, match="in their order"):
        realised_schedule(problem, buckets, [("launch", 1), ("launch", 0), ("wait", 0), ("wait", 1)])
