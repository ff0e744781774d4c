"""Several regions planned as one: launches at their boundaries, as far ahead as it pays and fits."""

from __future__ import annotations

import pytest

from graphshard.planner import GatherTask, OwnCollective, Problem, ReductionTask, Transfer, check_schedule, simulate
from graphshard.planner.prefetch_depth import DEPTHS, choose_depth, join_regions

MB = 10**6


def region(
    unit: str,
    *,
    compute_us: float = 100.0,
    gather_us: float = 50.0,
    reduce_us: float = 0.0,
    then: bool = False,
    streams: tuple[str, ...] = ("shards",),
) -> Problem:
    """Three ops; two parameters of one unit are gathered for the second, and reduced behind it."""
    stream = streams.index("shards")
    wire = Transfer(stream, ((0.0, gather_us / (2 * MB)),))
    back = Transfer(stream, ((0.0, reduce_us / (2 * MB)),))
    gathers = [GatherTask(f"{unit}.{i}", unit, 0, wire, MB, MB, 1, 2, copy_out_us=0.0) for i in range(2) if gather_us]
    copies = Transfer(stream, ((10.0, 0.0),))
    reductions = [
        ReductionTask(f"{unit}.{i}", unit, 0, back, MB, MB, MB // 2, 2, then=copies if then else None)
        for i in range(2)
        if reduce_us
    ]
    return Problem(
        "backward",
        ("a", "b", "c"),
        (0.0, compute_us, 0.0),
        (100, 200, 100),
        tuple(gathers),
        tuple(reductions),
        streams=streams,
    )


def steps(problems: list[Problem], depth: int) -> list[str]:
    """`position: step unit`, in order."""
    regions = join_regions(problems)
    schedule = regions.schedule(depth)
    check_schedule(regions.problem, schedule)
    named = []
    for at, step, number in schedule.steps:
        member = schedule.members(regions.problem, number)[0]
        kind = "gather" if isinstance(member, GatherTask) else "reduction"
        named.append(f"{at}: {step} {kind} {member.unit}")
    return named


def test_region_launches_the_gather_of_the_next_one() -> None:
    assert steps([region(unit) for unit in "xyz"], 1) == [
        "0: launch gather x",
        "0: wait gather x",
        "0: launch gather y",
        "3: wait gather y",
        "3: launch gather z",
        "6: wait gather z",
    ]


def test_depth_looks_past_regions_without_gathers() -> None:
    problems = [region("x"), region("none", gather_us=0.0), region("y"), region("z")]
    assert [step for step in steps(problems, 2) if "launch" in step] == [
        "0: launch gather x",
        "0: launch gather y",
        "0: launch gather z",
    ]


def test_reduction_is_awaited_when_the_next_one_is_launched() -> None:
    assert [step for step in steps([region(unit, reduce_us=5.0, then=True) for unit in "xy"], 1) if "red" in step] == [
        "3: launch reduction x",
        "6: wait reduction x",
        "6: finish reduction x",
        "6: launch reduction y",
        "6: wait reduction y",
        "6: finish reduction y",
    ]


def test_parameters_of_a_unit_share_one_collective_in_each_region() -> None:
    regions = join_regions([region("x", reduce_us=1.0), region("x", reduce_us=1.0)])
    assert regions.gathers == (((0, 1),), ((2, 3),)) == regions.reductions
    assert len({gather.key for gather in regions.problem.gathers}) == 2


def test_process_groups_are_found_by_name() -> None:
    second = region("y", streams=("other", "shards"))
    joined = join_regions([region("x"), second]).problem
    assert joined.streams == ("shards", "other")
    assert {gather.transfer.stream for gather in joined.gathers} == {0}


def test_own_collectives_move_with_their_region() -> None:
    first = region("x")
    own = OwnCollective("sum", 0, 5.0, 1, 2)
    second = Problem(first.direction, first.ops, first.op_us, first.op_bytes, (), (), (own,), first.streams)
    (found,) = join_regions([first, second]).problem.own
    assert (found.launch, found.wait) == (4, 5)


def test_one_region_ahead_hides_what_fits_into_its_computation() -> None:
    regions = join_regions([region(unit) for unit in "wxyz"])
    assert simulate(regions.problem, regions.schedule(1)).exposed_us == pytest.approx(50.0)  # of the first alone


def test_deeper_is_chosen_where_it_is_faster_and_fits() -> None:
    # Two long computations, then a region that needs more than one of them.
    problems = [region("x"), region("y"), region("z", gather_us=150.0, compute_us=1.0), region("z2")]
    tried = {depth: (us, peak) for depth, us, peak in choose_depth(problems, 10**9).tried}
    assert tuple(tried) == DEPTHS
    assert tried[2][0] < tried[1][0] and tried[2][1] > tried[1][1]
    assert choose_depth(problems, 10**9).depth == 2
    assert choose_depth(problems, tried[2][1] - 1).depth == 1
    assert choose_depth(problems).depth == 1  # as much memory as one region ahead
    assert choose_depth(problems, 1).depth == 1


def test_least_depth_is_chosen_where_times_are_equal() -> None:
    assert choose_depth([region(unit) for unit in "wxyz"], 10**9).depth == 1
