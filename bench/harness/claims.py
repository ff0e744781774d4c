"""What is claimed of graphshard, and whether it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """Something that is said of graphshard, and the number that was found.

    Attributes:
        says: the claim, with its bound.
        got: the number, as printed.
        holds: whether it does; None: it was not measured.
    """

    backend: str
    says: str
    got: str
    holds: bool | None
