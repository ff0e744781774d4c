"""Reads a schedule of graphshard's planner off a graph whose launches and waits another placed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from bench.schedule.deep_graph import settle_markers
from graphshard.cost import CostModel
from graphshard.graph.ir import PassContext, is_marker, member_names, reductions, shard_placeholder, unshards
from graphshard.planner import Bucket, Problem, Schedule, ScheduledStep, StepKind, check_schedule
from graphshard.planner.baselines import in_launch_order

_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
}


class Unreadable(Exception):
    """A graph follows no schedule of the program; says why."""


def kind_of(node: Node) -> Any:
    """What kind of collective a node launches; None: none."""
    if node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional":
        return _KINDS.get(getattr(node.target, "_opname", ""))
    return None


def reorder(marked: Graph, scheduled: Graph) -> None:
    """Puts the operations of a marked graph in the order that they have in `scheduled`, which was made of it.

    Raises:
        Unreadable: `scheduled` lacks some.
    """
    by_name = {node.name: node for node in marked.nodes if node.op not in ("placeholder", "output")}
    names = [node.name for node in scheduled.nodes if node.name in by_name]
    if lost := {name for name, node in by_name.items() if not is_marker(node)} - set(names):
        raise Unreadable(f"the graph lacks {len(lost)} operations, among them %{min(lost)}")
    output = next(iter(marked.find_nodes(op="output")))
    for name in names:
        output.prepend(by_name[name])
    markers = [node for node in marked.nodes if is_marker(node)]
    for marker in markers:
        output.prepend(marker)
    settle_markers(marked)
    marked.lint()


def read_schedule(scheduled: Graph, marked: Graph, ctx: PassContext, problem: Problem, cost: CostModel) -> Schedule:
    """The schedule that `scheduled` follows.

    Args:
        scheduled: with launches and waits; what it has besides the operations of `marked` are copies.
        marked: the same with markers, in the same order.
        ctx: of `marked`.
        problem: of `marked`.
        cost: that `problem` was made with.

    Raises:
        Unreadable: it is none for `problem`.
    """
    steps: list[tuple[int, int, StepKind, int]] = []
    order = {node: i for i, node in enumerate(scheduled.nodes)}
    place = _Positions(scheduled, marked, problem, cost)
    gathers = {gather.fqn: i for i, gather in enumerate(problem.gathers)}
    reduced = {reduction.fqn: i for i, reduction in enumerate(problem.reductions)}
    shard_of = {
        shard_placeholder(node).name: gathers[name]
        for name, node in member_names(unshards(marked), ctx).items()
        if name in gathers
    }
    grad_of = {
        node.all_input_nodes[0].name: reduced[name]
        for name, node in member_names(reductions(marked), ctx).items()
        if name in reduced
    }
    buckets: list[Bucket] = []
    for node in scheduled.nodes:
        if (kind := kind_of(node)) is None:
            continue
        wait = next((user for user in node.users if getattr(user.target, "_opname", "") == "wait_tensor"), None)
        if wait is None:
            raise Unreadable(f"%{node.name} is awaited by nothing")
        members = _sources(node, shard_of if kind == "all_gather" else grad_of)
        number = len(buckets)
        buckets.append(Bucket("gather" if kind == "all_gather" else "reduce", tuple(members)))
        steps.append((place.before(node, late=False), order[node], "launch", number))
        steps.append((place.before(wait, late=True), order[wait], "wait", number))
    in_order = tuple(ScheduledStep(at, kind, number) for at, _, kind, number in sorted(steps))
    found = in_launch_order(Schedule(tuple(buckets), in_order))
    try:
        check_schedule(problem, found)
    except ValueError as error:
        raise Unreadable(str(error)) from error
    return found


def _sources(launch: Node, member_of: dict[str, int]) -> Sequence[int]:
    """The members that a launch sends, in order."""
    found: dict[int, None] = {}
    waiting, seen = [launch], {launch}
    while waiting:
        node = waiting.pop()
        if node.name in member_of and node is not launch:
            found[member_of[node.name]] = None
            continue
        for source in reversed(node.all_input_nodes):
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    if not found:
        raise Unreadable(f"%{launch.name} sends nothing that is known")
    return list(found)


class _Positions:
    """Positions in a problem of places between the operations of a graph."""

    def __init__(self, graph: Graph, marked: Graph, problem: Problem, cost: CostModel) -> None:
        starts, computed = set(problem.ops), {node.name for node, us in cost.graph_us(marked).items() if us}
        nodes = list(graph.nodes)
        self._place = {node: i for i, node in enumerate(nodes)}
        self._starts = [i for i, node in enumerate(nodes) if node.name in starts]
        # Where operations are, of which some are joined to the one before.
        self._busy = [i for i, node in enumerate(nodes) if node.name in starts or node.name in computed]

    def before(self, node: Node, late: bool) -> int:
        """The position before which `node` happens; among what is joined, behind it if `late`, else in front of it."""
        position = bisect_left(self._starts, self._place[node])
        following = bisect_left(self._busy, self._place[node])
        is_inside = following < len(self._busy) and self._busy[following] not in self._starts[position : position + 1]
        return position - 1 if is_inside and not late else position
