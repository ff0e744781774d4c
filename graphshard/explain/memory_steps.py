"""Memory against the clock: the simulator knows it by position, a timeline wants it by time."""

from __future__ import annotations

from graphshard.explain.program import PlannedProgram
from graphshard.planner import LiveBytes


def memory_steps(program: PlannedProgram) -> tuple[tuple[float, LiveBytes], ...]:
    """(from when on, in us; what is allocated), in order; of positions that take no time, the greatest.

    A position begins with the first thing that the computation does there.
    """
    begins: dict[int, float] = {}
    for event in program.simulation.events:
        if event.stream < 0:
            begins.setdefault(event.position, event.start_us)
    steps: list[tuple[float, LiveBytes]] = []
    now_us = 0.0
    for position, live in enumerate(program.live):
        now_us = begins.get(position, now_us)
        if steps and (position not in begins or steps[-1][0] == now_us):
            steps[-1] = (steps[-1][0], max(steps[-1][1], live, key=sum))
        else:
            steps.append((now_us, live))
    return tuple(step for i, step in enumerate(steps) if not i or step[1] != steps[i - 1][1])
