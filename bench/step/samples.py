"""What processes send back: raw measurements, in seconds and bytes."""

from __future__ import annotations

from typing import NamedTuple


class FirstSteps(NamedTuple):
    """What one rank did before anything is measured but the first step's seconds.

    Attributes:
        first_step_s: the first step, compilation included.
        loss: of the first step, this rank's.
        grad_norms: FQN -> norm of the gradient in the first step, over all ranks.
        launches: collectives of one step by kind, as the profiler sees them.
    """

    first_step_s: float
    loss: float
    grad_norms: dict[str, float]
    launches: dict[str, int]


class TrainingTurn(NamedTuple):
    """Some training steps of one rank.

    Attributes:
        steps_s: seconds of each, the optimizer's included.
        idle_rss_bytes: resident before them.
        peak_rss_bytes: most that was resident during them.
        peak_is_of_turn: False where the kernel keeps only the peak since the process began.
        loss: of the last step.
    """

    steps_s: list[float]
    idle_rss_bytes: int
    peak_rss_bytes: int
    peak_is_of_turn: bool
    loss: float
