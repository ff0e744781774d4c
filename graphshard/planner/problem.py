"""What a planner decides about: the computation of one program, and what it has to gather and to reduce.

All of it is numbers and names: the same on every rank, and free of graphs. Time is in microseconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from math import isfinite


@dataclass(frozen=True)
class Transfer:
    """How long collectives of one kind take on one process group.

    Attributes:
        stream: of the group; collectives on one stream run one after the other, in the order of their launches.
        rates: (latency in us, us per byte) of each protocol; the fastest is taken.
    """

    stream: int
    rates: tuple[tuple[float, float], ...]

    def us(self, num_bytes: int) -> float:
        """Time of one collective whose full tensor has `num_bytes`."""
        return min(alpha_us + num_bytes * us_per_byte for alpha_us, us_per_byte in self.rates)

    @property
    def alpha_us(self) -> float:
        """The least latency."""
        return min(alpha_us for alpha_us, _ in self.rates)

    @property
    def us_per_byte(self) -> float:
        """The least time of a byte."""
        return min(us_per_byte for _, us_per_byte in self.rates)


@dataclass(frozen=True)
class GatherTask:
    """One parameter that the program gathers.

    Attributes:
        fqn: of the parameter.
        unit: name of its unit.
        key: gathers of one key may share a bucket.
        transfer: of its all-gather.
        wire_bytes: of the gathered tensor as it is sent, padded.
        full_bytes: of what is copied out of a bucket.
        first_use: the op before which it must have arrived.
        last_use: the op behind which it is free; the number of ops: never.
        ready: the first op before which it can be launched.
        copy_in_us, copy_out_us: in a bucket with others.
        alone_in_us, alone_out_us: in a bucket of its own, or in one that is coalesced.
        alone_out_bytes: of what is copied out of a bucket of its own; 0: nothing is.
        shard_bytes: of this rank's part as it is sent, where a copy is made for it.
        scratch_bytes: that the copy into a bucket with others allocates besides, until it is done.
        coalesced_us: that it adds to a collective that takes several tensors; None: it cannot be one of them.
    """

    fqn: str
    unit: str
    key: int
    transfer: Transfer
    wire_bytes: int
    full_bytes: int
    first_use: int
    last_use: int
    ready: int = 0
    copy_in_us: float = 0.0
    copy_out_us: float = 0.0
    alone_in_us: float = 0.0
    alone_out_us: float = 0.0
    alone_out_bytes: int = 0
    shard_bytes: int = 0
    scratch_bytes: int = 0
    coalesced_us: float | None = None


@dataclass(frozen=True)
class ReductionTask:
    """One gradient that the program reduces.

    Attributes:
        fqn, unit, key: as of a gather.
        transfer: of its reduce-scatter, or of its all-reduce where nothing is sharded.
        then: of the all-reduce over copies of the shards that follows, None for none.
        wire_bytes: of the full gradient as it is sent.
        grad_bytes: of the full gradient as it is computed; it is free when it has been copied into a bucket.
        shard_bytes: of the result.
        ready: the first op before which it can be launched.
        copy_in_us, copy_out_us: in a bucket with others.
        alone_in_us, alone_out_us: as of a gather; `alone_in_us` 0: the gradient itself is sent.
        scratch_bytes: as of a gather; in a bucket of its own, what is sent is part of it.
        coalesced_us: as of a gather.
    """

    fqn: str
    unit: str
    key: int
    transfer: Transfer
    wire_bytes: int
    grad_bytes: int
    shard_bytes: int
    ready: int
    then: Transfer | None = None
    copy_in_us: float = 0.0
    copy_out_us: float = 0.0
    alone_in_us: float = 0.0
    alone_out_us: float = 0.0
    scratch_bytes: int = 0
    coalesced_us: float | None = None


# Of one kind: the members of a bucket, or all of a problem.
Tasks = Sequence[GatherTask] | Sequence[ReductionTask]


@dataclass(frozen=True)
class OwnCollective:
    """A collective of the model itself, such as those of tensor parallelism: it stays where it is.

    Attributes:
        name: of its launch.
        stream: of its process group.
        us: its time.
        launch, wait: the ops before which it is launched and awaited.
    """

    name: str
    stream: int
    us: float
    launch: int
    wait: int


@dataclass(frozen=True)
class Problem:
    """One program to plan.

    Attributes:
        direction: ``"forward"``, ``"backward"`` or ``"inference"``.
        ops: names of nodes: a position is an index here, and means: before this node. The end is `len(ops)`.
        op_us: time of each op, up to the next.
        op_bytes: what is allocated while it runs, without gathered parameters, gradients and buffers of collectives.
        gathers: in order of first use.
        reductions: in order of readiness.
        own: the model's own collectives, in order of launch.
        streams: name of the process group of each stream.
        contention: computation runs at the rate 1 / (1 + contention) while a collective is under way.
        launch_us: time that the computation loses to each launch.
    """

    direction: str
    ops: tuple[str, ...]
    op_us: tuple[float, ...]
    op_bytes: tuple[int, ...]
    gathers: tuple[GatherTask, ...]
    reductions: tuple[ReductionTask, ...]
    own: tuple[OwnCollective, ...] = ()
    streams: tuple[str, ...] = ("",)
    contention: float = 0.0
    launch_us: float = 0.0

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is negative or not finite, a position is not in the program, or a stream is not there.
        """
        for error in _errors(self):
            raise ValueError(f"problem: {error}")

    @cached_property
    def elapsed_us(self) -> tuple[float, ...]:
        """Time of the computation up to each position: one more entry than there are ops."""
        return (0.0, *accumulate(self.op_us))

    @property
    def compute_us(self) -> float:
        """Time of all computation, without copies."""
        return self.elapsed_us[-1]


def _errors(problem: Problem) -> Iterator[str]:
    for name in ("op_us", "op_bytes"):
        values = getattr(problem, name)
        if len(values) != len(problem.ops):
            yield f"{name}: got {len(values)} numbers, want {len(problem.ops)}, one for each op"
        yield from (f"{name}[{i}]: {_want(value)}" for i, value in enumerate(values) if _want(value))
    for name in ("contention", "launch_us"):
        if _want(getattr(problem, name)):
            yield f"{name}: {_want(getattr(problem, name))}"
    for name in ("gathers", "reductions", "own"):
        for i, item in enumerate(getattr(problem, name)):
            yield from (f"{name}[{i}].{error}" for error in _item_errors(problem, item))


def _item_errors(problem: Problem, item: GatherTask | ReductionTask | OwnCollective) -> Iterator[str]:
    for field in fields(item):
        value = getattr(item, field.name)
        if isinstance(value, Transfer):
            for i, (alpha_us, us_per_byte) in enumerate(value.rates):
                error = _want(alpha_us) or _want(us_per_byte)
                if error:
                    yield f"{field.name}.rates[{i}]: {error}"
            if not value.rates or not 0 <= value.stream < len(problem.streams):
                yield f"{field.name}: got {value}, want rates, and a stream of the {len(problem.streams)} there are"
        elif isinstance(value, int | float) and field.name not in ("key", "stream"):
            if _want(value):
                yield f"{field.name}: {_want(value)}"
            if field.name in ("first_use", "last_use", "ready", "launch", "wait") and value > len(problem.ops):
                yield f"{field.name}: got {value}, want a position of {len(problem.ops)} ops"
    if isinstance(item, GatherTask) and not item.ready <= item.first_use <= item.last_use:
        yield f"first_use: got {item.first_use}, want one from {item.ready} (ready) to {item.last_use} (last_use)"
    if isinstance(item, OwnCollective) and not (item.launch <= item.wait and 0 <= item.stream < len(problem.streams)):
        yield f"wait: got {item.wait}, want it behind the launch at {item.launch}, and a stream that is there"


def _want(value: float) -> str:
    """What is wrong with a number."""
    return "" if isfinite(value) and value >= 0 else f"got {value}, want a finite number, not negative"


def is_coalesced(members: Tasks) -> bool:
    """Whether the collective of a bucket takes its members one by one: copies of a flat buffer would take longer."""
    if len(members) == 1:
        return False
    apart_us = flat_us = 0.0
    for member in members:
        if member.coalesced_us is None:
            return False
        apart_us += member.coalesced_us + member.alone_in_us + member.alone_out_us
        flat_us += member.copy_in_us + member.copy_out_us
    return apart_us < flat_us


def is_flat(members: Tasks) -> bool:
    """Whether the members of a bucket are copied into one buffer, or out of one."""
    return len(members) > 1 and not is_coalesced(members)


def copy_in_us(members: Tasks) -> float:
    """Time of the copy into a bucket."""
    if is_flat(members):
        return sum(member.copy_in_us for member in members)
    return sum(member.alone_in_us for member in members)


def copy_out_us(members: Tasks) -> float:
    """Time of the copy out of a bucket."""
    if is_flat(members):
        return sum(member.copy_out_us for member in members)
    return sum(member.alone_out_us for member in members)


def transfer_us(members: Tasks) -> float:
    """Time of a bucket's collective."""
    more_us = sum(member.coalesced_us or 0.0 for member in members) if is_coalesced(members) else 0.0
    return members[0].transfer.us(sum(member.wire_bytes for member in members)) + more_us


def then_us(members: Sequence[ReductionTask]) -> float:
    """Time of the all-reduce that follows a bucket's reduce-scatter."""
    then = members[0].then
    return 0.0 if then is None else then.us(sum(member.shard_bytes for member in members))
