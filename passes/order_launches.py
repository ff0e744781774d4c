"""Places launches and waits: gathers one unit ahead, reduce-scatters awaited late.

Needs: a graph with launches and waits, no marker. Leaves: a permutation. The first gather is launched at the top; each
other one when the gather before it has arrived, so that it overlaps the compute of the unit before. A reduce-scatter
is launched when its gradients are ready and awaited when the next one's copy-in begins, the last one at the end.

    ag0; w0; compute0; ag1; w1; compute1   ->   ag0; w0; ag1; compute0; w1; compute1

Source: FSDP2's implicit forward and backward prefetch (depth 1) and its single reduce-scatter input buffer in flight.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, Node

from graphshard.ir import WAIT, PassContext, collective, is_call, launches, output_node


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
    copies_out = {launch: [_wait(launch), *roles[found.bucket, "copy_out"]] for launch, found in ours}

    gathers = [launch for launch, found in ours if found.kind == "all_gather"]
    scatters = [launch for launch, found in ours if found.kind == "reduce_scatter"]
    moves = _prefetch(graph, [copies_in[launch] for launch in gathers])
    ends = [copies_in[launch][0] for launch in scatters[1:]] + [output_node(graph)]
    for launch, end in zip(scatters, ends, strict=False):  # without scatters one end is left
        group = copies_out[launch]
        if all(user in group or user.op == "output" for node in group for user in node.users):
            moves.append(Move(_names(group), "before", end.name))
    edit = OrderEdit(tuple(moves))
    return edit if new_order(graph, edit) != list(graph.nodes) else OrderEdit(())


def _prefetch(graph: Graph, groups: list[list[Node]]) -> list[Move]:
    """Each gather's copy-in and launch goes right behind the wait of the gather before it, the first one to the top."""
    moves: list[Move] = []
    top = next((node for node in graph.nodes if node.op != "placeholder"), None)
    anchor, where = top, "before"
    for group in groups:
        sources = {source for node in group for source in node.all_input_nodes} - set(group)
        if anchor is not None and all(source.op == "placeholder" for source in sources) and anchor not in group:
            moves.append(Move(_names(group), "before" if where == "before" else "after", anchor.name))
        anchor, where = _wait(group[-1]), "after"
    return moves


def _names(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _wait(launch: Node) -> Node:
    return next(user for user in launch.users if is_call(user, WAIT))


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
