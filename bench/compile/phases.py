"""The phases of a first step: those of torch's compilers, graphshard's own, and the rest."""

from __future__ import annotations

from bench.compile.samples import FirstStep
from graphshard.compat.compile_phases import (
    AOT_AUTOGRAD,
    CODE_GENERATION,
    DYNAMO,
    KERNELS,
    LOWERING,
    PARTITIONER,
    exclusive_seconds,
)

PASSES, PLANNER, REST = "passes", "planner", "running and the rest"
# In the order in which they are printed; together they are the whole step.
ALL_PHASES = (DYNAMO, AOT_AUTOGRAD, PARTITIONER, PASSES, PLANNER, LOWERING, CODE_GENERATION, KERNELS, REST)
# What grows with every operator of a model: the others can be shared by equal blocks.
TRACES = (DYNAMO, AOT_AUTOGRAD)
# Of a step: a timer of torch's that is not known and takes less changes nothing that is printed.
LEAST_SHARE = 0.01
# Between the clocks of torch's timers and the step's.
CLOCK_S = 1e-3


def phase_seconds(first: FirstStep) -> dict[str, float]:
    """Seconds of each of `ALL_PHASES`; their sum is `first.step_s`.

    Raises:
        RuntimeError: torch's timers are not nested as is known, or phases take longer than what they are of.
    """
    phases = exclusive_seconds(first.timed_s, LEAST_SHARE * first.step_s)
    # They run inside the partitioner, which some versions of torch do not time.
    around = PARTITIONER if phases[PARTITIONER] else AOT_AUTOGRAD
    phases[around] -= first.joint_passes_s
    if phases[around] < -CLOCK_S:
        raise RuntimeError(
            f"bench: passes on joint graphs took {first.joint_passes_s:.3f} s, want no more than the {around}, inside "
            "which they run"
        )
    phases[PASSES] = first.joint_passes_s + first.passes_s
    phases[PLANNER] = first.planner_s
    phases[REST] = first.step_s - sum(phases.values())
    if phases[REST] < -CLOCK_S:
        taken = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items() if name != REST)
        raise RuntimeError(f"bench: phases take longer than the step's {first.step_s:.3f} s: {taken}")
    return {name: phases[name] for name in ALL_PHASES}
