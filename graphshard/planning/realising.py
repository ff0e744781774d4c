"""Schedules a marked graph for the contract of its program: the same collectives in the same order, on any rank."""

from __future__ import annotations

from torch.fx import Graph

from graphshard.agree.contract import Contract
from graphshard.errors import OrderDiffers, RanksDiffer
from graphshard.graph.ir import PassContext
from graphshard.graph.plan import END, PlannedBucket
from graphshard.planner import (
    Bucket,
    OrderImpossible,
    Problem,
    Schedule,
    ScheduledStep,
    check_schedule,
    own_places,
    realised_schedule,
    shared_own,
    simulate,
)
from graphshard.planning.extraction import Scene, extract_problem


def realise(
    graph: Graph, ctx: PassContext, scene: Scene, contract: Contract, budget_bytes: int | None
) -> tuple[Problem, Schedule]:
    """The problem of a marked graph, and its schedule by a contract.

    Args:
        graph: with markers.
        ctx: its parameters and flags.
        scene: to read the problem with.
        contract: of the program, with the names of `graph`'s parameters.
        budget_bytes: most that the program should allocate: gathers are launched late where it would allocate more.

    Raises:
        RanksDiffer: the graph gathers or reduces other parameters, or has more or fewer collectives of its own.
        OrderDiffers: it computes in an order that the contract forbids.
    """
    names = frozenset(step.before for step in contract.steps) - {END}
    problem = extract_problem(graph, ctx, scene, names if contract.steps else None)
    buckets = _indexed(problem, contract.buckets)
    _check_own(problem, contract)
    number_of = {bucket.name: number for number, bucket in enumerate(contract.buckets)}
    place = {name: at for at, name in enumerate(problem.ops)} | {END: len(problem.ops)}
    if contract.steps and names <= place.keys():  # the graph that it was decided for, perhaps of other shapes
        steps = (ScheduledStep(place[step.before], step.step, number_of[step.bucket]) for step in contract.steps)
        schedule = Schedule(tuple(buckets), tuple(steps))
        try:
            check_schedule(problem, schedule)
            if own_places(problem, schedule) == contract.own:
                return problem, schedule
        except ValueError:
            pass  # nodes of these names, but another graph
    problem = extract_problem(graph, ctx, scene)
    buckets = _indexed(problem, contract.buckets)
    hints = [(step.step, number_of[step.bucket]) for step in contract.steps]
    try:
        schedule = realised_schedule(problem, buckets, hints, own=contract.own)
        if budget_bytes is not None and simulate(problem, schedule).peak_bytes > budget_bytes:
            schedule = realised_schedule(problem, buckets, hints, early=False, own=contract.own)
    except OrderImpossible as error:
        raise OrderDiffers(
            f"contract: {ctx.direction}: {error}; want modules called in the same order on every rank, or "
            "regions='unit'"
        ) from None
    return problem, schedule


def _check_own(problem: Problem, contract: Contract) -> None:
    own = shared_own(problem)
    if len(own) != len(contract.own):
        names = f" ({', '.join(its.name for its in own[:2])}{', ...' if len(own) > 2 else ''})" if own else ""
        raise RanksDiffer(
            f"contract: the {problem.direction} of this rank has {len(own)} collectives of the model's own{names} over "
            f"groups that parameters are sharded over, the other ranks have {len(contract.own)}; want as many on every "
            "rank"
        )


def _indexed(problem: Problem, buckets: tuple[PlannedBucket, ...]) -> list[Bucket]:
    index = {("gather", gather.fqn): i for i, gather in enumerate(problem.gathers)}
    index |= {("reduce", reduction.fqn): i for i, reduction in enumerate(problem.reductions)}
    agreed = {(bucket.kind, member) for bucket in buckets for member in bucket.members}
    if more := index.keys() - agreed:
        kind, fqn = min(more)
        raise RanksDiffer(
            f"contract: the {problem.direction} of this rank sends the {kind} of '{fqn}', which the other ranks do "
            "not; want modules that use the same parameters on every rank"
        )
    if fewer := agreed - index.keys():
        raise RanksDiffer(
            f"contract: the {problem.direction} of this rank does not send the {' of '.join(min(fewer))}, which the "
            "other ranks do"
        )
    return [Bucket(bucket.kind, tuple(index[bucket.kind, member] for member in bucket.members)) for bucket in buckets]
