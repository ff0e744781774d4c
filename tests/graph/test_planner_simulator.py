"""The simulator, its lower bound and the schedules that are no search."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_simulator import plain_peak_bytes, plain_step_us
from problems import problems, stack

from graphshard.planner import (
    Bucket,
    Problem,
    ReductionTask,
    Schedule,
    ScheduledStep,
    Transfer,
    check_schedule,
    fixed_size_schedule,
    fsdp2_schedule,
    lower_bound_us,
    per_parameter_schedule,
    simulate,
)

quick = settings(max_examples=80)
MAKERS = {
    "fsdp2": fsdp2_schedule,
    "per_parameter": per_parameter_schedule,
    "fixed_size": lambda problem: fixed_size_schedule(problem, 100),
}
makers = st.sampled_from(sorted(MAKERS))


@quick
@given(problems(), makers)
def test_baselines_are_schedules_of_any_problem(problem: Problem, maker: str) -> None:
    check_schedule(problem, MAKERS[maker](problem))


@quick
@given(problems(), makers)
def test_simulation_equals_a_plain_one(problem: Problem, maker: str) -> None:
    schedule = MAKERS[maker](problem)
    found = simulate(problem, schedule)
    assert found.step_us == pytest.approx(plain_step_us(problem, schedule))
    assert found.peak_bytes == plain_peak_bytes(problem, schedule)


def test_waits_in_front_of_a_large_op_make_room_for_it_together() -> None:
    numbers, transfer = range(3), Transfer(0, ((10.0, 0.0),))
    reductions = tuple(ReductionTask(f"w{i}", "u", 0, transfer, 1, 1, 1, 0) for i in numbers)
    problem = Problem("backward", ("small", "large"), (1.0, 1.0), (0, 20), (), reductions, streams=("shards",))
    launches = (ScheduledStep(0, "launch", number) for number in numbers)
    waits = (ScheduledStep(1, "wait", number) for number in numbers)
    schedule = Schedule(tuple(Bucket("reduce", (number,)) for number in numbers), (*launches, *waits))
    check_schedule(problem, schedule)
    results = len(numbers)
    assert simulate(problem, schedule).peak_bytes == plain_peak_bytes(problem, schedule) == 20 + results


@quick
@given(problems(), makers)
def test_simulation_is_never_below_the_lower_bound(problem: Problem, maker: str) -> None:
    assert simulate(problem, MAKERS[maker](problem)).step_us >= lower_bound_us(problem) * (1 - 1e-9) - 1e-9


@quick
@given(problems(), makers)
def test_simulation_keeps_streams_in_order(problem: Problem, maker: str) -> None:
    events = simulate(problem, MAKERS[maker](problem)).events
    for stream in range(-1, len(problem.streams)):
        own = [event for event in events if event.stream == stream]
        assert all(a.end_us <= b.start_us + 1e-9 for a, b in pairwise(own))


def slower(problem: Problem, what: str, i: int) -> Problem:
    if what == "op" and problem.ops:
        us = list(problem.op_us)
        us[i % len(us)] += 7.0
        return replace(problem, op_us=tuple(us))
    if what == "launch":
        return replace(problem, launch_us=problem.launch_us + 1.0)
    items = problem.gathers if i % 2 else problem.reductions
    changed = []
    for item in items:
        rates = tuple((alpha_us + 2.0, us_per_byte + 0.1) for alpha_us, us_per_byte in item.transfer.rates)
        changed.append(
            replace(item, transfer=replace(item.transfer, rates=rates))
            if what == "transfer"
            else replace(item, copy_in_us=item.copy_in_us + 1.0, copy_out_us=item.copy_out_us + 1.0)
        )
    return replace(problem, gathers=tuple(changed)) if i % 2 else replace(problem, reductions=tuple(changed))


@quick
@given(problems(), makers, st.sampled_from(("op", "launch", "transfer", "copy")), st.integers(0, 20))
def test_simulation_is_monotone_in_every_cost(problem: Problem, maker: str, what: str, i: int) -> None:
    schedule = MAKERS[maker](problem)
    after = simulate(slower(problem, what, i), schedule).step_us
    assert after >= simulate(problem, schedule).step_us - 1e-9


@quick
@given(problems(), makers)
def test_simulation_does_not_depend_on_names(problem: Problem, maker: str) -> None:
    renamed = replace(
        problem,
        ops=tuple(f"other.{op}" for op in problem.ops),
        gathers=tuple(replace(g, fqn=f"z{g.fqn}", unit=f"z{g.unit}") for g in problem.gathers),
        reductions=tuple(replace(r, fqn=f"z{r.fqn}", unit=f"z{r.unit}") for r in problem.reductions),
    )
    assert MAKERS[maker](renamed) == MAKERS[maker](problem)
    assert simulate(renamed, MAKERS[maker](renamed)) == simulate(problem, MAKERS[maker](problem))


def broken(schedule: Schedule) -> dict[str, Schedule]:
    steps, buckets = schedule.steps, schedule.buckets
    first = steps[0]
    return {
        "no such": replace(schedule, steps=(*steps, ScheduledStep(steps[-1].before, "launch", len(buckets)))),
        "in this order": replace(schedule, steps=steps[1:]),
        "two of step": replace(schedule, steps=(first, *steps)),
        "out of order": replace(schedule, steps=(steps[-1]._replace(before=10**6), *steps[1:])),
        "each of": replace(schedule, buckets=buckets[1:]),
    }


@pytest.mark.parametrize("fault", ["no such", "in this order", "two of step", "out of order", "each of"])
def test_check_schedule_rejects_what_is_broken(fault: str) -> None:
    problem = stack(2, backward=True)
    with pytest.raises(ValueError, match="schedule: ") as error:
        check_schedule(problem, broken(fsdp2_schedule(problem))[fault])
    assert fault == "no such" or fault in str(error.value)


def test_check_schedule_rejects_late_waits_and_early_launches() -> None:
    problem = stack(2, backward=True)
    schedule = fsdp2_schedule(problem)
    late = [s._replace(before=len(problem.ops)) if s.kind == "wait" else s for s in schedule.steps]
    early = [s._replace(before=0) if s.kind == "launch" else s for s in schedule.steps]
    for steps, words in ((late, "behind the first use"), (early, "before its members are ready")):
        steps.sort(key=lambda step: step.before)
        with pytest.raises(ValueError, match=words):
            check_schedule(problem, replace(schedule, steps=tuple(steps)))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_problem_refuses_numbers_that_are_no_costs(value: float) -> None:
    problem = stack(1)
    with pytest.raises(ValueError, match=r"problem: op_us\[2\]: got"):
        replace(problem, op_us=(*problem.op_us[:2], value, *problem.op_us[3:]))
    gather = replace(problem.gathers[1], copy_in_us=value)
    with pytest.raises(ValueError, match=r"problem: gathers\[1\].copy_in_us: got"):
        replace(problem, gathers=(problem.gathers[0], gather, *problem.gathers[2:]))
    with pytest.raises(ValueError, match="problem: contention: got"):
        replace(problem, contention=value)
