"""The ops of a problem: nodes are joined where nothing is launched, needed or free between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from graphshard.graph.ir import is_constant, is_marker

# Ops are joined into one as long as they take less than this part of the program.
_GRAIN = 1 / 2000


@dataclass(frozen=True)
class JoinedOps:
    """Ops, and where the nodes are among them.

    Attributes:
        names: of the node that each begins with.
        us: time of each.
        num_bytes: what is allocated while it runs.
        position: of each place in the graph, and of the two behind the last: the op that it is in.
        behind: the same: the first op that begins there or behind.
    """

    names: tuple[str, ...]
    us: tuple[float, ...]
    num_bytes: tuple[int, ...]
    position: tuple[int, ...]
    behind: tuple[int, ...]


def join_ops(
    nodes: Sequence[Node],
    node_us: Sequence[float],
    live_bytes: Sequence[int],
    begins: set[int],
    wanted: set[int],
    cuts: frozenset[str] | None,
    exact: bool = False,
) -> JoinedOps:
    """Joins nodes into ops.

    Args:
        nodes: of the graph.
        node_us: time of each.
        live_bytes: what is allocated at each.
        begins: places at which an op must begin.
        wanted: places at which one should begin, but not inside a stretch (``meta["seam"]`` is False).
        cuts: names of nodes that begin an op besides; None: ops are as long as their times allow.
        exact: only there, and where one must.
    """
    closed = _inside_stretches(nodes, cuts or frozenset(), exact)
    grain_us = sum(node_us) * _GRAIN
    position, behind = [0] * (len(nodes) + 2), [0] * (len(nodes) + 2)
    names: list[str] = []
    op_us: list[float] = []
    op_bytes: list[int] = []
    must = True
    for place, node in enumerate(nodes):
        live = live_bytes[place]
        must = must or place in begins or (place in wanted and not closed[place])
        position[place] = len(names) if must or not names else len(names) - 1
        behind[place] = len(names)
        if not _is_anchor(node):
            if op_bytes:
                op_bytes[-1] = max(op_bytes[-1], live)
            continue
        if not must and names and not closed[place]:
            must = "seam" in node.meta or (op_us[-1] + node_us[place] > grain_us if cuts is None else node.name in cuts)
        if must or not names:
            names.append(node.name)
            op_us.append(0.0)
            op_bytes.append(live)
            must = False
            behind[place] = len(names) - 1
        position[place] = len(names) - 1
        op_us[-1] += node_us[place]
        op_bytes[-1] = max(op_bytes[-1], live)
    position[len(nodes) :] = behind[len(nodes) :] = [len(names)] * 2
    return JoinedOps(tuple(names), tuple(op_us), tuple(op_bytes), tuple(position), tuple(behind))


def _inside_stretches(nodes: Sequence[Node], cuts: frozenset[str], exact: bool) -> list[bool]:
    """For each place, whether no op should begin with the next node that a plan can name."""
    found = [False] * len(nodes)
    inside = False
    for place in range(len(nodes) - 1, -1, -1):
        if _is_anchor(nodes[place]):
            inside = nodes[place].name not in cuts and (exact or nodes[place].meta.get("seam") is False)
        found[place] = inside
    return found


def _is_anchor(node: Node) -> bool:
    """Whether a plan can say: before this node. Markers go, arguments and results stay where they are, constants are
    made where they are read.
    """
    return node.op not in ("placeholder", "output") and not is_marker(node) and not is_constant(node)
