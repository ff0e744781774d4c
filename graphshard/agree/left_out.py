"""Which optional passes a program is lowered without: those that have failed on any rank.

What a program sends may depend on them, so ranks meet before a contract is posted, once for each program, where
GRAPHSHARD_VERIFY=2 looks for failures. A rank that has no graph of the program comes with an empty hand.
"""

from __future__ import annotations

from collections.abc import Collection

from graphshard.agree.consensus import Consensus


class LeftOut:
    """Of one model.

    Args:
        consensus: of its ranks.
        meets: whether ranks are asked; False: what fails on a rank is left out there alone.
    """

    def __init__(self, consensus: Consensus, meets: bool) -> None:
        self._consensus = consensus
        self._meets = meets and consensus.has_peers
        self._agreed: dict[str, frozenset[str] | None] = {}

    def agreed(self, key: str, failed: Collection[str] = ()) -> frozenset[str] | None:
        """Passes that all ranks leave out of a program; None: ranks did not all come, and none is asked any more.

        Args:
            key: of the program, the same on every rank.
            failed: passes that fail on this one.
        """
        if not self._meets:
            return None
        if key not in self._agreed:
            found = self._consensus.union(f"passes\n{key}", failed, self._consensus.patience_s)
            self._agreed[key] = found
            self._meets = found is not None
        return self._agreed[key]
