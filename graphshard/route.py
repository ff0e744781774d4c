"""Which parameters the parts of a call use, where no rank has one graph of it: compared between ranks when it changes.

Programs of equal blocks are one program, so that ranks which run them for other blocks than each other would mix their
parameters and never notice.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphshard.contracts import Contracts
from graphshard.dispatch import Binding
from graphshard.shards import Shard

_SUBJECT = "the units that they use, in order, and the parameters of each"
_ADVICE = (
    "this call has mixed parameters: do not step on its gradients. Graph breaks leave parts of it on every rank "
    "(TORCH_LOGS=graph_breaks shows them): want the same modules in use on all ranks, or "
    "set_reduce_scatter_unused_params(True) on these units, or no breaks"
)


class Route:
    """The routes of a model's calls.

    Args:
        contracts: of the model.
    """

    def __init__(self, contracts: Contracts) -> None:
        self._contracts = contracts
        self._latest: dict[str, tuple[Binding | Shard, ...]] = {}  # by what the calls are, in words
        self._running: list[Binding | Shard] = []

    def begin(self) -> None:
        """A call begins."""
        self._running = []

    def use(self, used: Binding | Shard) -> None:
        """A part of the call uses the parameters of a region, or reads one outside any graph."""
        self._running.append(used)

    def end(self, what: str, number: int) -> None:
        """The call has ended.

        Args:
            what: it is, in words.
            number: of the call, the same on every rank.

        Raises:
            RanksDiffer: it used other parameters than the call before it, and on another rank others.
        """
        route, latest = tuple(self._running), self._latest.get(what, ())
        self._running = []
        if route == latest:
            return
        self._latest[what] = route
        if (lines := _lines(route)) != _lines(latest):
            self._contracts.compare(f"route {number}\n{what}", f"call {number}, {what}", lines, _SUBJECT, _ADVICE)


def _lines(route: Iterable[Binding | Shard]) -> list[str]:
    units: dict[str, set[str]] = {}
    for used in route:
        for shard in (used,) if isinstance(used, Shard) else used.shards:
            if not shard.unit.reduce_unused:  # gathered and reduced as a whole, for this
                units.setdefault(shard.unit.name or "root", set()).add(shard.fqn)
    return [f"{unit}: {', '.join(sorted(fqns))}" for unit, fqns in units.items()]
