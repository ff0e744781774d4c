"""What the local search varies: bucket boundaries and priorities of one run of the list scheduler, and its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.planner.schedule import Bucket, Schedule, ScheduledStep, StepKind

# For each sequence of tasks, the places at which a bucket ends.
BucketEnds = tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Candidate:
    """What one run of the list scheduler gets.

    Attributes:
        gather_ends, reduction_ends: where buckets end.
        lookahead: a collective is launched when this part of the one before it on its stream is still to come.
        max_slack: a gather is launched only if its slack is at most this multiple of its own time.
        reserve_bytes: left free by gathers that are launched ahead.
        wait_margin: a reduction is awaited when it should have been done for this part of its own time.
        gathers_first: of a gather without slack and a reduction the gather is launched first.
    """

    gather_ends: BucketEnds
    reduction_ends: BucketEnds
    lookahead: float = 0.0
    max_slack: float = 2.0
    reserve_bytes: int = 0
    wait_margin: float = 0.5
    gathers_first: bool = True


@dataclass(frozen=True)
class ScheduledCandidate:
    """What the list scheduler made of a candidate.

    Attributes:
        step_us: its time.
        steps: (position, kind, bucket), in program order.
        candidate: that was scheduled; a bucket that did not fit was cut.
    """

    step_us: float
    steps: tuple[tuple[int, StepKind, Bucket], ...]
    candidate: Candidate

    @property
    def num_buckets(self) -> int:
        """How many collectives there are."""
        return sum(1 for _, kind, _ in self.steps if kind == "launch")

    def schedule(self) -> Schedule:
        """As a schedule."""
        number_of: dict[Bucket, int] = {}
        for _, _, bucket in self.steps:
            number_of.setdefault(bucket, len(number_of))
        steps = (ScheduledStep(at, kind, number_of[bucket]) for at, kind, bucket in self.steps)
        return Schedule(tuple(number_of), tuple(steps))
