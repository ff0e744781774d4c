"""What the process sends back: raw measurements, in seconds."""

from __future__ import annotations

from typing import NamedTuple


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
