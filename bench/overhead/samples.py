"""What processes send back: raw measurements, in seconds."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """One training step."""

    forward_s: float
    backward_s: float


# Steps in which nothing is left to agree on.
STEADY_STEPS = 10


class AgreementTime(NamedTuple):
    """What one rank has measured.

    Attributes:
        first_s: seconds of each program's agreement, in which one rank posts a contract and the others take it over.
        election_s: the same of each entry, where all ranks say what they have captured.
        contract_bytes: of one contract's text.
        operations: on the store, in `STEADY_STEPS` steps of a model that has run before.
    """

    first_s: tuple[float, ...]
    election_s: tuple[float, ...]
    contract_bytes: int
    operations: int
