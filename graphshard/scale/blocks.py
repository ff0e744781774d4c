"""Where the blocks of a model are in a graph, and whether each does all of its work in its own place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from graphshard.cost.traffic import is_free
from graphshard.graph.ir import ParamRef, is_marker, shard_placeholder, unshards


class NotRepeated(ValueError):
    """The blocks of a program are not equal, or do not follow one another."""


def block_starts(graph: Graph, params: Mapping[str, ParamRef], units: Sequence[str]) -> list[tuple[int, str]]:
    """(Place of the first node that reads a parameter of the block, its unit), in the order of the graph.

    Args:
        graph: with markers.
        params: its sharded parameters by placeholder.
        units: of the blocks; those that the graph does not gather are left out.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    first: dict[str, int] = {}
    for marker in unshards(graph):
        unit = params[shard_placeholder(marker).name].unit
        if unit in units and marker.users:
            used = min(place[user] for user in marker.users)
            first[unit] = min(first.get(unit, used), used)
    return sorted((start, unit) for unit, start in first.items())


def check_blocks(graph: Graph, params: Mapping[str, ParamRef], units: Sequence[str]) -> None:
    """Checks that a block in the middle is where all of its work is: a partitioner may collect it elsewhere.

    What the block computes is read by itself, by the next block, and as a result of the graph. What is computed in
    front of all blocks, or behind them, is not for it alone.

    Raises:
        NotRepeated: it is not so.
    """
    starts = [start for start, _ in block_starts(graph, params, units)]
    place = {node: i for i, node in enumerate(graph.nodes)}
    middle = range(2, len(starts) - 1)  # blocks by number from 1; 0 is in front of all

    def block_of(node: Node) -> int:
        return bisect_right(starts, place[node])

    for node in graph.nodes:
        if node.op != "call_function" or is_marker(node):
            continue
        own = block_of(node)
        users = [user for user in node.users if user.op != "output" and not is_marker(user)]
        for user in users:
            if own in middle and block_of(user) not in (own, own + 1):
                raise NotRepeated(f"{user.name} is not in the block of {node.name}, which it reads")
        readers = {block_of(user) for user in users}
        if own == 0 and not is_free(node) and len(readers) == 1 and readers <= set(middle):
            raise NotRepeated(f"{node.name}, in front of all blocks, is read by one of them alone")
