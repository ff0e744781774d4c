"""Places launches and waits: as the plan says, or gathers one unit ahead and reduce-scatters awaited late.

Needs: a graph with launches and waits, no marker, and ``meta["steps"]`` on what the plan places. Leaves: a permutation.
Without a plan the first gather is launched at the top; each
other one when the gather before it has arrived and is copied out, so that it overlaps the compute of the unit before. A
reduce-scatter is launched when its gradients are ready and awaited when the next one's copy-in begins, the last one at
the end; an all-reduce behind it is launched right then. All-reduces are awaited at the end.

    ag0; w0; compute0; ag1; w1; compute1   ->   ag0; w0; ag1; compute0; w1; compute1

A unit for which the user chose others to prefetch launches these when it has arrived itself.
Source: FSDP2's implicit forward and backward prefetch (depth 1), its one reduce-scatter input buffer in flight, or as
many as `set_reduce_scatter_max_input_buffers` says, and `set_modules_to_forward_prefetch` and `..._backward_prefetch`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, Node

from graphshard.graph.emit_reduction import ALL_REDUCE_BUCKET
from graphshard.graph.ir import Collective, PassContext, collective, launches, output_node, waits_of


@dataclass(frozen=True)
class Move:
    """`nodes`, in their order, go right before or after `anchor`."""

    nodes: tuple[str, ...]
    where: Literal["before", "after"]
    anchor: str


@dataclass(frozen=True)
class OrderEdit:
    """Moves that are made together: an anchor that moves takes what is attached to it along."""

    moves: tuple[Move, ...]

    def __bool__(self) -> bool:
        return bool(self.moves)


def decide(graph: Graph, ctx: PassContext) -> OrderEdit:
    """Places every launch and wait of graphshard's own collectives."""
    roles: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if "bucket_of" in node.meta:
            roles[node.meta["bucket_of"], node.meta["role"]].append(node)
    ours = [(launch, found) for launch in launches(graph) if (found := collective(launch)) is not None]
    copies_in = {launch: [*roles[found.bucket, "copy_in"], launch] for launch, found in ours}
    copies_out = {launch: [*roles[found.bucket, "wait"], *roles[found.bucket, "copy_out"]] for launch, found in ours}

    if any("steps" in launch.meta for launch, _ in ours):
        edit = OrderEdit(tuple(_as_planned(graph, ours, copies_in, copies_out)))
        return edit if new_order(graph, edit) != list(graph.nodes) else OrderEdit(())
    # In the order of their waits, which stay: prefetches that users chose permute the launches.
    position = {node: i for i, node in enumerate(graph.nodes)}
    gathers = [(launch, found.unit) for launch, found in ours if found.kind == "all_gather"]
    gathers.sort(key=lambda gather: position[waits_of(gather[0])[0]])
    moves = _prefetch(graph, [(copies_in[launch], copies_out[launch][-1], unit) for launch, unit in gathers], ctx)
    in_flight = max((settings.scatter_buffers for _, settings in ctx.flags.units), default=1)
    moves += _late_waits(graph, ours, copies_in, copies_out, in_flight)
    edit = OrderEdit(tuple(moves))
    return edit if new_order(graph, edit) != list(graph.nodes) else OrderEdit(())


def _as_planned(
    graph: Graph,
    ours: list[tuple[Node, Collective]],
    copies_in: dict[Node, list[Node]],
    copies_out: dict[Node, list[Node]],
) -> list[Move]:
    """Everything that the plan places, in its order."""
    launch_of = {found.bucket: launch for launch, found in ours}
    placed = []
    for launch, found in ours:
        for number, step, before in launch.meta.get("steps", ()):
            behind = launch_of.get(found.bucket + ALL_REDUCE_BUCKET)
            if found.bucket.endswith(ALL_REDUCE_BUCKET):
                nodes = copies_out[launch] if step == "finish" else []
            elif step == "launch":
                nodes = copies_in[launch]
            else:
                nodes = copies_out[launch] if step == "wait" else []
                if step == "wait" and behind is not None:
                    nodes = [*nodes, *copies_in[behind]]
            if nodes:
                placed.append((number, Move(_names(nodes), "before", before or output_node(graph).name)))
    return [move for _, move in sorted(placed, key=lambda entry: entry[0])]


def _late_waits(
    graph: Graph,
    ours: list[tuple[Node, Collective]],
    copies_in: dict[Node, list[Node]],
    copies_out: dict[Node, list[Node]],
    in_flight: int,
) -> list[Move]:
    """A reduction is awaited when `in_flight` others have been launched behind it."""
    end = output_node(graph)
    reductions = [(launch, found) for launch, found in ours if found.kind != "all_gather"]
    second = {found.bucket: launch for launch, found in reductions if found.bucket.endswith(ALL_REDUCE_BUCKET)}
    first = [(launch, found) for launch, found in reductions if found.bucket not in second]
    moves = []
    followers: list[Node | None] = [*(launch for launch, _ in first[in_flight:]), *[None] * in_flight]
    for (launch, found), follower in zip(first, followers, strict=False):
        group, behind = copies_out[launch], second.get(found.bucket + ALL_REDUCE_BUCKET)
        if behind is not None:
            group = [*group, *copies_in[behind]]
        # An all-reduce keeps nothing that the gradients themselves would not: it is awaited last.
        anchor = end if follower is None or found.kind == "all_reduce" else copies_in[follower][0]
        if _may_move(group, {*group, *(copies_out[behind] if behind is not None else ())}):
            moves.append(Move(_names(group), "before", anchor.name))
    for launch in second.values():
        if _may_move(copies_out[launch], set(copies_out[launch])):
            moves.append(Move(_names(copies_out[launch]), "before", end.name))
    return moves


def _may_move(group: list[Node], own: set[Node]) -> bool:
    return all(user in own or user.op == "output" for node in group for user in node.users)


def _prefetch(graph: Graph, groups: list[tuple[list[Node], Node, str]], ctx: PassContext) -> list[Move]:
    """Where each gather's copy-in and launch go: the first to the top, any other one behind the copy-out of another, so
    that no third buffer is alive.

    Args:
        graph: the graph.
        groups: (copy-in and launch, last node of the copy-out, unit) of each gather, in order of arrival.
        ctx: holds the user's choices.
    """
    names = [unit for _, _, unit in groups]
    chosen = [_chosen(ctx, unit) for unit in names]
    behind: dict[int, int] = {}  # gather -> the gather whose arrival launches it
    for i, units in enumerate(chosen):
        for unit in units:
            for later in (j for j in range(i + 1, len(names)) if names[j] == unit and j not in behind):
                behind[later] = i
    moves: list[Move] = []
    top = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for i, (group, _, _) in enumerate(groups):
        if i not in behind and i > 0:
            if ctx.direction == "backward" and chosen[i - 1]:
                continue  # as in FSDP2, a choice replaces what would be prefetched there in backward
            behind[i] = i - 1
        anchor = top if i == 0 else groups[behind[i]][1]
        sources = {source for node in group for source in node.all_input_nodes} - set(group)
        if anchor is not None and all(source.op == "placeholder" for source in sources) and anchor not in group:
            moves.append(Move(_names(group), "before" if i == 0 else "after", anchor.name))
    return moves


def _chosen(ctx: PassContext, unit: str) -> tuple[str, ...]:
    settings = ctx.flags.settings(unit)
    return settings.backward_prefetch if ctx.direction == "backward" else settings.forward_prefetch


def _names(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def new_order(graph: Graph, edit: OrderEdit) -> list[Node]:
    """The nodes in the order that `edit` asks for."""
    by_name = {node.name: node for node in graph.nodes}
    attached: dict[tuple[str, str], list[Node]] = defaultdict(list)
    moved: set[str] = set()
    for move in edit.moves:
        attached[move.where, move.anchor] += [by_name[name] for name in move.nodes]
        moved.update(move.nodes)
    order: list[Node] = []
    # An explicit stack: depth-1 prefetch chains every gather to the one before it.
    stack: list[tuple[Node, bool]] = [(node, False) for node in reversed(list(graph.nodes)) if node.name not in moved]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
            continue
        stack += [(follower, False) for follower in reversed(attached["after", node.name])]
        stack.append((node, True))
        stack += [(leader, False) for leader in reversed(attached["before", node.name])]
    return order


def apply(graph: Graph, edit: OrderEdit) -> None:
    """Permutes the graph as `edit` says."""
    order = new_order(graph, edit)
    if len(order) != len(graph.nodes):
        raise AssertionError(f"order_launches: {len(graph.nodes) - len(order)} nodes lost by {edit}")
    tail = next(iter(graph.nodes))
    for node in order:
        if node is not tail:
            tail.append(node)
            tail = node
