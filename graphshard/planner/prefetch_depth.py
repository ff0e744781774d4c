"""Several regions planned as one: how many gathers are launched ahead of the regions that need them.

Only the boundaries between regions are there to launch and to await at. A region's gathers have arrived before it runs;
then those of the next regions are launched. Its reductions are launched behind it, each when the one before has been
awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from graphshard.planner.problem import GatherTask, Problem, ReductionTask, Transfer
from graphshard.planner.schedule import Bucket, Schedule, ScheduledStep
from graphshard.planner.simulator import Simulation, simulate

DEPTHS = (1, 2, 3)


@dataclass(frozen=True)
class Regions:
    """Regions in a row, as one problem.

    Attributes:
        problem: all of them.
        starts: position of the first op of each region, then the end.
        gathers, reductions: of each region, one bucket for each unit: indices into the problem's.
    """

    problem: Problem
    starts: tuple[int, ...]
    gathers: tuple[tuple[tuple[int, ...], ...], ...]
    reductions: tuple[tuple[tuple[int, ...], ...], ...]

    def schedule(self, depth: int) -> Schedule:
        """Gathers of the next `depth` regions that have any are under way while a region runs."""
        buckets: list[Bucket] = []
        steps: list[ScheduledStep] = []
        launched: dict[int, range] = {}  # region -> its buckets
        in_flight: list[int] = []

        def launch(region: int, at: int) -> None:
            if region not in launched:
                launched[region] = range(len(buckets), len(buckets) + len(self.gathers[region]))
                steps.extend(ScheduledStep(at, "launch", number) for number in launched[region])
                buckets.extend(Bucket("gather", members) for members in self.gathers[region])

        def await_reduction(at: int) -> None:
            while in_flight:
                number = in_flight.pop()
                steps.append(ScheduledStep(at, "wait", number))
                if self.problem.reductions[buckets[number].members[0]].then is not None:
                    steps.append(ScheduledStep(at, "finish", number))

        gathering = [region for region, found in enumerate(self.gathers) if found]
        for region, (start, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            launch(region, start)
            steps += [ScheduledStep(start, "wait", number) for number in launched[region]]
            for later in [later for later in gathering if later > region][:depth]:
                launch(later, start)
            for members in self.reductions[region]:
                await_reduction(end)
                in_flight.append(len(buckets))
                steps.append(ScheduledStep(end, "launch", len(buckets)))
                buckets.append(Bucket("reduce", members))
        await_reduction(self.starts[-1])
        return Schedule(tuple(buckets), tuple(steps))


def join_regions(problems: Sequence[Problem]) -> Regions:
    """One problem of the problems of regions, in the order in which they run, each of which gathers and reduces all.

    What regions save for backward is in no problem but their own: `op_bytes` are those of the region that runs.
    """
    starts = (0, *accumulate(len(problem.ops) for problem in problems))
    end = starts[-1]
    streams = tuple(dict.fromkeys(name for problem in problems for name in problem.streams))
    gathers: list[GatherTask] = []
    reductions: list[ReductionTask] = []
    own = []
    grouped_gathers, grouped_reductions = [], []
    keys: dict[tuple[int, int], int] = {}
    for region, (problem, start) in enumerate(zip(problems, starts, strict=False)):
        stream = [streams.index(name) for name in problem.streams]

        def moved(transfer: Transfer, stream: list[int] = stream) -> Transfer:
            return replace(transfer, stream=stream[transfer.stream])

        def key(number: int, region: int = region) -> int:
            return keys.setdefault((region, number), len(keys))

        grouped_gathers.append(_grouped([(g.unit, g.key) for g in problem.gathers], len(gathers)))
        grouped_reductions.append(_grouped([(r.unit, r.key) for r in problem.reductions], len(reductions)))
        gathers += [
            replace(
                gather,
                key=key(gather.key),
                transfer=moved(gather.transfer),
                first_use=start + gather.first_use,
                last_use=start + gather.last_use if gather.last_use < len(problem.ops) else end,
                ready=start + gather.ready if gather.ready else 0,
            )
            for gather in problem.gathers
        ]
        reductions += [
            replace(
                reduction,
                key=key(reduction.key),
                transfer=moved(reduction.transfer),
                then=None if reduction.then is None else moved(reduction.then),
                ready=start + reduction.ready,
            )
            for reduction in problem.reductions
        ]
        own += [
            replace(
                found,
                name=f"{region}:{found.name}",
                stream=stream[found.stream],
                launch=start + found.launch,
                wait=start + found.wait,
            )
            for found in problem.own
        ]
    joined = Problem(
        problems[0].direction,
        tuple(f"{region}:{op}" for region, problem in enumerate(problems) for op in problem.ops),
        tuple(us for problem in problems for us in problem.op_us),
        tuple(num_bytes for problem in problems for num_bytes in problem.op_bytes),
        tuple(gathers),
        tuple(reductions),
        tuple(own),
        streams,
        max(problem.contention for problem in problems),
        max(problem.launch_us for problem in problems),
    )
    return Regions(joined, starts, tuple(grouped_gathers), tuple(grouped_reductions))


def _grouped(names: Sequence[tuple[str, int]], first: int) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[str, int], list[int]] = {}
    for i, name in enumerate(names, start=first):
        groups.setdefault(name, []).append(i)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True)
class Depth:
    """How far ahead gathers are launched.

    Attributes:
        depth: in regions.
        simulation: of it.
        tried: (depth, time in us, peak bytes) of all.
    """

    depth: int
    simulation: Simulation
    tried: tuple[tuple[int, float, int], ...]


def choose_depth(problems: Sequence[Problem], budget_bytes: int | None = None) -> Depth:
    """The depth of `DEPTHS` with the shortest time that fits the budget; the least one where times are equal.

    Args:
        problems: of regions, in the order in which they run; at least one.
        budget_bytes: most that any of them may allocate; None: what the least depth does, which is FSDP2's. The least
            depth is taken where none fits.
    """
    regions = join_regions(problems)
    simulations = {depth: simulate(regions.problem, regions.schedule(depth)) for depth in DEPTHS}
    least = DEPTHS[0]
    if budget_bytes is None:
        budget_bytes = simulations[least].peak_bytes
    fitting = [depth for depth, found in simulations.items() if found.peak_bytes <= budget_bytes]
    best = min(fitting or [least], key=lambda depth: (simulations[depth].step_us, depth))
    tried = tuple((depth, found.step_us, found.peak_bytes) for depth, found in simulations.items())
    return Depth(best, simulations[best], tried)
