"""What the collectives of one program are, in order: one rank decides, every program that any rank lowers realises it.

Where launches and waits stand among computation is each rank's own; what is sent, and in which order, is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch.fx import Graph

from graphshard.files import parse_json
from graphshard.graph.emit_reduction import ALL_REDUCE_BUCKET
from graphshard.graph.ir import collective, launches
from graphshard.graph.plan import Decision, PlannedBucket, PlannedStep
from graphshard.plan_file.decoding import decode


@dataclass(frozen=True)
class ContractParam:
    """A parameter of a program, for programs of equal blocks to find their own: ordinal of its unit, index in it."""

    unit: int
    index: int
    fqn: str


@dataclass(frozen=True)
class Contract:
    """The collectives of one program.

    Attributes:
        buckets: in order of launch; of a reduce-scatter and the all-reduce behind it, the first.
        steps: of the program that it was decided for; where its nodes are not these, only their order counts.
        params: all parameters of that program.
        chosen: what made it: the planner's search, or one of its baselines.
        without: names of optional passes that every rank leaves out of that program.
    """

    buckets: tuple[PlannedBucket, ...]
    steps: tuple[PlannedStep, ...]
    params: tuple[ContractParam, ...]
    chosen: str = "fsdp2"
    without: tuple[str, ...] = ()

    def text(self) -> str:
        """As it is posted."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Contract:
        """Of a text.

        Raises:
            ValueError: it is none; says where.
        """
        found: Contract = decode(Contract, parse_json(text), "contract")
        return found

    def for_params(self, params: Sequence[ContractParam]) -> Contract:
        """The same for the parameters of an equal block."""
        own = {(place.unit, place.index): place.fqn for place in params}
        names = {place.fqn: own.get((place.unit, place.index), place.fqn) for place in self.params}
        if all(name == other for name, other in names.items()):
            return self
        buckets = tuple(replace(b, members=tuple(_renamed(m, names) for m in b.members)) for b in self.buckets)
        return replace(self, buckets=buckets, params=tuple(params))

    @property
    def launches(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(kind, members) in order of launch."""
        return tuple((bucket.kind, bucket.members) for bucket in self.buckets)


def _renamed(member: str, names: Mapping[str, str]) -> str:
    fqn, mark, number = member.partition("#")
    return names.get(fqn, fqn) + mark + number


def contract_of(graph: Graph, decision: Decision | None, params: Sequence[ContractParam]) -> Contract:
    """What a lowered graph launches. `decision`: that it was lowered by, if there was one."""
    planned = {} if decision is None else {bucket.name: bucket for bucket in decision.plan.buckets}
    buckets: list[PlannedBucket] = []
    for node in launches(graph):
        found = collective(node)
        if found is None or found.bucket.endswith(ALL_REDUCE_BUCKET):
            continue
        own = PlannedBucket(
            found.bucket,
            "gather" if found.kind == "all_gather" else "reduce",
            tuple(member.fqn for member in found.members),
        )
        same = planned.get(found.bucket, own)
        buckets.append(same if _fqns(same) == _fqns(own) else own)
    steps = () if decision is None else decision.plan.steps
    if [step.bucket for step in steps if step.step == "launch"] != [bucket.name for bucket in buckets]:
        steps = ()
    return Contract(tuple(buckets), steps, tuple(params), "fsdp2" if decision is None else decision.choice.name)


def _fqns(bucket: PlannedBucket) -> list[str]:
    return [member.partition("#")[0] for member in bucket.members]
