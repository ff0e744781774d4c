"""Reads a problem to plan off a marked graph: what is computed, gathered and reduced, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from graphshard.cost import CollectiveKind, CostModel, GroupShape
from graphshard.graph.ir import PassContext, gathered_source, unshards, val
from graphshard.planner import GatherTask, OwnCollective, Problem, ReductionTask
from graphshard.planning.communication_costs import CommunicationCosts
from graphshard.planning.gather_tasks import gather_tasks
from graphshard.planning.joined_ops import JoinedOps, join_ops
from graphshard.planning.own_collectives import own_collectives
from graphshard.planning.planned_markers import planned_markers
from graphshard.planning.program_memory import ProgramMemory
from graphshard.planning.reduction_tasks import reduction_tasks


@dataclass(frozen=True)
class Scene:
    """What sizes and times depend on besides the graph.

    Attributes:
        cost: times of everything.
        group_shape: of a process group, by its name.
        coalesces: whether a process group has a collective of a kind that takes several tensors, and may use it.
    """

    cost: CostModel
    group_shape: Callable[[str], GroupShape]
    coalesces: Callable[[str, CollectiveKind], bool] = lambda group, kind: False


def extract_problem(
    graph: Graph, ctx: PassContext, scene: Scene, cuts: frozenset[str] | None = None, exact: bool = False
) -> Problem:
    """The problem of one marked graph. Its members are named as `member_names` names them.

    Args:
        graph: with markers; flags and residency have been applied.
        ctx: its parameters and flags.
        scene: machine and process groups.
        cuts: names of nodes that begin an op, beside those that must; None: ops are as long as their times allow.
        exact: no other op begins but where it must.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    markers = planned_markers(graph, ctx)
    costs = CommunicationCosts(scene.cost, scene.group_shape, scene.coalesces)
    memory = ProgramMemory(graph, ctx, markers)
    # In this order: it numbers the streams.
    gathers = gather_tasks(place, markers, ctx, costs, memory)
    reductions = reduction_tasks(place, markers, ctx, costs, memory)
    own = own_collectives(place, costs)
    computed = scene.cost.graph_us(graph)
    moved = set(markers.gathers.values())
    at_rest = set(unshards(graph)) - moved
    times = [_cast_us(node, scene.cost) if node in at_rest else computed[node] for node in nodes]
    begins, wanted = _begins(gathers, own), _wanted(gathers, reductions)
    ops = join_ops(nodes, times, memory.computation_bytes(), begins, wanted, cuts, exact)
    at, behind = ops.position, ops.behind
    gathers = [
        replace(task, first_use=at[task.first_use], last_use=at[task.last_use], ready=behind[task.ready])
        for task in gathers
    ]
    reductions = [replace(task, ready=behind[task.ready]) for task in reductions]
    return Problem(
        ctx.direction,
        ops.names,
        ops.us,
        _with_early_grads(ops, reductions, [at[memory.grad_begin(markers.reductions[r.fqn])] for r in reductions]),
        tuple(sorted(gathers, key=lambda task: task.first_use)),
        tuple(sorted(reductions, key=lambda task: task.ready)),
        tuple(replace(c, launch=at[c.launch], wait=at[c.wait]) for c in own),
        costs.groups or ("",),
        scene.cost.contention,
    )


def _cast_us(gather: Node, cost: CostModel) -> float:
    """What is left of a gather that moves nothing."""
    return cost.copy_us(val(gather).nbytes * 2, 1) if val(gather).dtype != val(gathered_source(gather)).dtype else 0.0


def _begins(gathers: Sequence[GatherTask], own: Sequence[OwnCollective]) -> set[int]:
    """Places that cannot be moved: of what is computed before it is gathered, and of the model's own collectives."""
    found = {place for task in gathers if task.ready for place in (task.first_use, task.ready)}
    return found | {place for c in own for place in (c.launch, c.wait)}


def _wanted(gathers: Sequence[GatherTask], reductions: Sequence[ReductionTask]) -> set[int]:
    """Places at which something may be launched, is needed or becomes free."""
    found = {place for task in gathers for place in (task.first_use, task.ready, task.last_use + 1)}
    return found | {task.ready for task in reductions}


def _with_early_grads(ops: JoinedOps, reductions: Sequence[ReductionTask], begun: Sequence[int]) -> tuple[int, ...]:
    """Bytes of the ops: a gradient is there before its last view, from which on its reduction counts it."""
    op_bytes = list(ops.num_bytes)
    for task, first in zip(reductions, begun, strict=True):
        for position in range(first, task.ready - 1):
            op_bytes[position] += task.grad_bytes
    return tuple(op_bytes)
