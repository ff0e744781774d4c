"""The model's own collectives in a graph, such as those of tensor parallelism, or of features of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch.fx import Node

from graphshard.graph.ir import LAUNCHES, collective

# Those that `LAUNCHES` does not name count as the ones that move as much.
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class OwnLaunch(NamedTuple):
    """One of them: its launch, its kind, the name of its process group."""

    node: Node
    kind: str
    group: str


def own_launches(nodes: Iterable[Node]) -> list[OwnLaunch]:
    """In their order."""
    found = []
    for node in nodes:
        if node.op != "call_function" or collective(node) is not None:
            continue
        if kind := LAUNCHES.get(node.target) or _KINDS.get(getattr(node.target, "_opname", "")):
            group = next((argument for argument in reversed(node.args) if isinstance(argument, str)), "")
            found.append(OwnLaunch(node, kind, group))
    return found
