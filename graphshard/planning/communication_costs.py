"""What collectives and copies of a problem take; each process group becomes a stream."""

from __future__ import annotations

from collections.abc import Callable

from graphshard.cost import CollectiveKind, CostModel, GroupShape
from graphshard.planner import Transfer


class CommunicationCosts:
    """Times by a cost model; process groups are numbered in the order in which they are asked for.

    Args:
        cost: times of everything.
        group_shape: of a process group, by its name.
        coalesces: whether a process group has a collective of a kind that takes several tensors, and may use it.
    """

    def __init__(
        self,
        cost: CostModel,
        group_shape: Callable[[str], GroupShape],
        coalesces: Callable[[str, CollectiveKind], bool],
    ) -> None:
        self._cost, self._group_shape, self._coalesces = cost, group_shape, coalesces
        self._streams: dict[str, int] = {}

    @property
    def groups(self) -> tuple[str, ...]:
        """Name of the process group of each stream."""
        return tuple(self._streams)

    def stream(self, group: str) -> int:
        """Of a process group."""
        return self._streams.setdefault(group, len(self._streams))

    def transfer(self, kind: CollectiveKind, group: str) -> Transfer:
        """Collectives of a kind on a process group."""
        return Transfer(self.stream(group), self._cost.rates(kind, self._group_shape(group)))

    def collective_us(self, kind: CollectiveKind, num_bytes: int, group: str) -> float:
        """Of one collective, whose full tensor has `num_bytes`."""
        return self._cost.collective_us(kind, num_bytes, self._group_shape(group))

    def coalesced_us(self, kind: CollectiveKind, group: str, plain: bool) -> float | None:
        """What a tensor adds to a coalesced collective: counted as a kernel of its own, since none was measured.

        None: it cannot be in one; one that is not `plain` never can.
        """
        return self._cost.hardware.kernel_us if plain and self._coalesces(group, kind) else None

    def copy_us(self, num_bytes: int, fused: bool = False) -> float:
        """Of one tensor's copy; a fused one has one kernel for all of a bucket, which is as good as none."""
        return self._cost.copy_us(num_bytes, 0 if fused else 1)
