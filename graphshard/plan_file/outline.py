"""What a plan depends on, apart from times: the same program on any machine has the same outline, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from graphshard.planner import GatherTask, OwnCollective, Problem, ReductionTask, Transfer


@dataclass(frozen=True)
class OpOutline:
    """One op of the computation.

    Attributes:
        name: of the node that it begins with.
        num_bytes: what is allocated while it runs.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True)
class MemberOutline:
    """One parameter that is gathered, or one gradient that is reduced.

    Attributes:
        kind: which of the two.
        fqn, unit: of the parameter, and of its unit.
        key: members of one kind and key may share a bucket.
        group: index of the process group that it is moved over.
        then: index of the group of the all-reduce that follows, None for none.
        wire_bytes: of the full tensor as it is sent, padded.
        full_bytes: of the gathered parameter, or of the gradient where nothing but its reduction reads it.
        shard_bytes: of one rank's part.
        copied_bytes: of the copy out of a bucket of its own; 0: nothing is copied.
        ready: position from which it can be launched.
        first_use, last_use: positions of a gathered parameter's readers, None for a gradient.
    """

    kind: Literal["gather", "reduce"]
    fqn: str
    unit: str
    key: int
    group: int
    then: int | None
    wire_bytes: int
    full_bytes: int
    shard_bytes: int
    copied_bytes: int
    ready: int
    first_use: int | None
    last_use: int | None


@dataclass(frozen=True)
class OwnOutline:
    """A collective of the model itself: its node, index of its group, positions of its launch and wait."""

    name: str
    group: int
    launch: int
    wait: int


@dataclass(frozen=True)
class Outline:
    """One program without times.

    Attributes:
        direction: ``"forward"``, ``"backward"`` or ``"inference"``.
        ops: a position is an index here, and means: before this op. The end is `len(ops)`.
        members: gathers in order of first use, then reductions in order of readiness.
        own: the model's own collectives, in order of launch.
        group_ranks: number of ranks of each process group.
    """

    direction: str
    ops: tuple[OpOutline, ...]
    members: tuple[MemberOutline, ...]
    own: tuple[OwnOutline, ...]
    group_ranks: tuple[int, ...]


def outline_of(problem: Problem, ranks_of: Callable[[str], int]) -> Outline:
    """The outline of a problem.

    Args:
        problem: extracted from a graph.
        ranks_of: number of ranks of a process group, by its name.
    """
    return Outline(
        problem.direction,
        tuple(OpOutline(name, num_bytes) for name, num_bytes in zip(problem.ops, problem.op_bytes, strict=True)),
        (*map(_gather, problem.gathers), *map(_reduction, problem.reductions)),
        tuple(OwnOutline(own.name, own.stream, own.launch, own.wait) for own in problem.own),
        tuple(ranks_of(name) if name else 1 for name in problem.streams),
    )


def _gather(gather: GatherTask) -> MemberOutline:
    return MemberOutline(
        kind="gather",
        fqn=gather.fqn,
        unit=gather.unit,
        key=gather.key,
        group=gather.transfer.stream,
        then=None,
        wire_bytes=gather.wire_bytes,
        full_bytes=gather.full_bytes,
        shard_bytes=gather.shard_bytes,
        copied_bytes=gather.alone_out_bytes,
        ready=gather.ready,
        first_use=gather.first_use,
        last_use=gather.last_use,
    )


def _reduction(reduction: ReductionTask) -> MemberOutline:
    return MemberOutline(
        kind="reduce",
        fqn=reduction.fqn,
        unit=reduction.unit,
        key=reduction.key,
        group=reduction.transfer.stream,
        then=None if reduction.then is None else reduction.then.stream,
        wire_bytes=reduction.wire_bytes,
        full_bytes=reduction.grad_bytes,
        shard_bytes=reduction.shard_bytes,
        copied_bytes=0,
        ready=reduction.ready,
        first_use=None,
        last_use=None,
    )


def problem_of(outline: Outline) -> Problem:
    """The problem of an outline, all of whose times are 0: enough to tell whether a schedule is one for it."""

    def transfer(group: int) -> Transfer:
        return Transfer(group, ((0.0, 0.0),))

    return Problem(
        outline.direction,
        tuple(op.name for op in outline.ops),
        (0.0,) * len(outline.ops),
        tuple(op.num_bytes for op in outline.ops),
        tuple(
            GatherTask(
                member.fqn,
                member.unit,
                member.key,
                transfer(member.group),
                member.wire_bytes,
                member.full_bytes,
                member.first_use or 0,
                member.last_use or 0,
                member.ready,
                alone_out_bytes=member.copied_bytes,
                shard_bytes=member.shard_bytes,
            )
            for member in outline.members
            if member.kind == "gather"
        ),
        tuple(
            ReductionTask(
                member.fqn,
                member.unit,
                member.key,
                transfer(member.group),
                member.wire_bytes,
                member.full_bytes,
                member.shard_bytes,
                member.ready,
                None if member.then is None else transfer(member.then),
            )
            for member in outline.members
            if member.kind == "reduce"
        ),
        tuple(OwnCollective(own.name, own.group, 0.0, own.launch, own.wait) for own in outline.own),
        tuple(str(number) for number in range(len(outline.group_ranks))),
    )


def outline_hash(outline: Outline) -> str:
    """A short hash of all of it: 16 hexadecimal digits."""
    text = json.dumps(asdict(outline), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
