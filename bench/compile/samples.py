"""What processes send back: raw measurements, in seconds."""

from __future__ import annotations

from typing import NamedTuple


class FirstStep(NamedTuple):
    """The first training step of one rank: forward and backward, compilation included.

    Attributes:
        step_s: seconds of it.
        cpu_s: processor seconds of it, those of the C++ compiler too.
        second_step_s: the next step, with nothing left to compile.
        loss: of the first step, this rank's.
        grad_norm: of all gradients of the first step, over all ranks.
        timed_s: seconds of torch's timers, by name.
        graphs: that were given to Inductor.
        kernels: sources in C++ that were written to Inductor's cache, by all ranks.
        joint_passes_s: in graphshard's passes on joint graphs.
        passes_s: in graphshard's passes on programs.
        planner_s: in graphshard's planner.
        programs: that graphshard lowered.
    """

    step_s: float
    cpu_s: float
    second_step_s: float
    loss: float
    grad_norm: float
    timed_s: dict[str, float]
    graphs: int
    kernels: int
    joint_passes_s: float = 0.0
    passes_s: float = 0.0
    planner_s: float = 0.0
    programs: int = 0
