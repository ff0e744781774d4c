"""What processes send back: raw measurements, in seconds."""

from __future__ import annotations

from typing import NamedTuple


class StepTime(NamedTuple):
    """One training step."""

    forward_s: float
    backward_s: float


class CompileTime(NamedTuple):
    """One compilation, on one rank.

    Attributes:
        first_step_s: forward and backward, compilation included.
        first_step_cpu_s: processor seconds of that, the C++ compiler's too: other programs disturb them less.
        second_step_s: the same again, with nothing left to compile.
        passes_s: seconds in graphshard's passes and their checks, joint and program.
        regions: graphs that graphshard captured.
        programs: graphs that graphshard lowered.
    """

    first_step_s: float
    first_step_cpu_s: float
    second_step_s: float
    passes_s: float = 0.0
    regions: int = 0
    programs: int = 0


class DispatchTime(NamedTuple):
    """What it took to choose the programs of one step.

    Attributes:
        step_s: forward and backward.
        bind_s: finding the shards behind the arguments.
        states_s: reading what shards hold and what flags ask.
        look_up_s: key and dictionary.
        set_s: the user's calls that set flags before the step.
    """

    step_s: float
    bind_s: float
    states_s: float
    look_up_s: float
    set_s: float = 0.0

    @property
    def chosen_s(self) -> float:
        return self.bind_s + self.states_s + self.look_up_s


class FirstFlip(NamedTuple):
    """The steps after a flag was set for the first time, and set back.

    Attributes:
        programs: that were lowered in them, by direction.
        regions: graphs that were captured: Dynamo compiled.
        added_s: what these steps took beyond ordinary ones.
        lowering_s: of that, graphshard's passes and their checks.
    """

    programs: dict[str, int]
    regions: int
    added_s: float
    lowering_s: float


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


class Turn(NamedTuple):
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
