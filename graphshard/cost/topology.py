"""Where the ranks of a process group are: all that a cost needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupShape:
    """The shape of a process group: on a regular mesh the same for every rank's group.

    Attributes:
        ranks: number of ranks.
        nodes: number of nodes that they are on.
    """

    ranks: int
    nodes: int

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(
                f"GroupShape: got {self.ranks} ranks on {self.nodes} nodes, want at least 1 node and 1 rank on each"
            )

    @property
    def ranks_per_node(self) -> float:
        """Ranks of the group on each of its nodes, on average."""
        return self.ranks / self.nodes


def group_shape(ranks: Sequence[int], ranks_per_node: int) -> GroupShape:
    """The shape of the group of `ranks`, where global ranks fill one node after the other.

    Args:
        ranks: global ranks, in any order.
        ranks_per_node: of the machine.

    Raises:
        ValueError: if there is no rank, one stands twice or is negative, or `ranks_per_node` is below 1.
    """
    if ranks_per_node < 1:
        raise ValueError(f"group_shape: ranks_per_node: got {ranks_per_node}, want at least 1")
    if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
        raise ValueError(f"group_shape: ranks: got {list(ranks)}, want different ranks, at least one, from 0 up")
    return GroupShape(len(ranks), len({rank // ranks_per_node for rank in ranks}))
