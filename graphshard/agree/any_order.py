"""Contracts that any order of computation can keep: what is gathered first, what is reduced last.

A contract has the order of the graph that it was decided for. Where a later graph of the same call computes in another
one, as when modules run in the order of a batch's keys, it may need a parameter that the contract gathers only behind
gradients that this graph has later still. Ranks that are alike come to that together: they agree that from then on
the contract asks for less order, which is the same on all of them and needs no graph. A rank that comes alone differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from graphshard.agree.consensus import Consensus
from graphshard.agree.contract import Contract
from graphshard.errors import OrderDiffers
from graphshard.planner import OwnPlace

T = TypeVar("T")
_AGREED = (
    "modules run in another order than in an earlier call, on every rank: from now on such a backward gathers all that "
    "it needs first and reduces all last, which takes more memory; with regions='unit' it does not"
)


class AnyOrder:
    """Of one model.

    Args:
        consensus: of its ranks.

    Attributes:
        changes: how often ranks have agreed: programs of earlier contracts are made again.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._keys: set[str] = set()
        self.changes = 0

    def of(self, key: str, contract: Contract) -> Contract:
        """The contract of a program by now. `key`: of the program, the same on every rank."""
        if key not in self._keys:
            return contract
        kinds = ("gather", "reduce")
        buckets = tuple(bucket for kind in kinds for bucket in contract.buckets if bucket.kind == kind)
        gathers = sum(bucket.kind == "gather" for bucket in buckets)
        return replace(contract, buckets=buckets, steps=(), own=(OwnPlace(gathers),) * len(contract.own))

    def kept(
        self, key: str, what: str, contract: Contract, lower: Callable[[Contract], T], say: Callable[[str], object]
    ) -> tuple[T, Contract]:
        """What `lower` makes of a program's contract, or of what all ranks make of that where none can keep its order.

        Args:
            key: of the program, the same on every rank.
            what: in words, for errors.
            contract: as it was decided.
            lower: makes the program of one.
            say: is told that ranks have agreed.

        Raises:
            OrderDiffers: this rank cannot, and others can.
        """
        contract = self.of(key, contract)
        try:
            return lower(contract), contract
        except OrderDiffers:
            if not self._agreed(key, what):
                raise
        say(_AGREED)
        contract = self.of(key, contract)
        return lower(contract), contract

    def _agreed(self, key: str, what: str) -> bool:
        if key in self._keys:
            return False  # it asks for no order any more
        if self._consensus.meet(f"any order\n{key}", what, "", self._consensus.patience_s) is None:
            return False
        self._keys.add(key)
        self.changes += 1
        return True
