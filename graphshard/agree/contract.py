"""What the collectives of one program are, in order: one rank decides, every program that any rank lowers realises it.

Where launches and waits stand among computation is each rank's own; what is sent, and in which order, is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from torch.fx import Graph, Node

from graphshard.files import parse_json
from graphshard.graph.emit_reduction import ALL_REDUCE_BUCKET
from graphshard.graph.ir import Collective, collective, launches
from graphshard.graph.own_launches import own_launches
from graphshard.graph.plan import Decision, PlannedBucket, PlannedStep
from graphshard.plan_file.decoding import decode
from graphshard.planner import OwnPlace


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
        own: of the model's own collectives, those of the groups that buckets use, in order.
    """

    buckets: tuple[PlannedBucket, ...]
    steps: tuple[PlannedStep, ...]
    params: tuple[ContractParam, ...]
    chosen: str = "fsdp2"
    without: tuple[str, ...] = ()
    own: tuple[OwnPlace, ...] = ()

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
    def launches(self) -> tuple[object, ...]:
        """What is sent, in order: equal for contracts that can meet."""
        return (*((bucket.kind, bucket.members) for bucket in self.buckets), *self.own)


def _renamed(member: str, names: Mapping[str, str]) -> str:
    fqn, mark, number = member.partition("#")
    return names.get(fqn, fqn) + mark + number


def contract_of(graph: Graph, decision: Decision | None, params: Sequence[ContractParam]) -> Contract:
    """What a lowered graph launches. `decision`: that it was lowered by, if there was one."""
    planned = {} if decision is None else {bucket.name: bucket for bucket in decision.plan.buckets}
    buckets: list[PlannedBucket] = []
    for _, found in _ours(graph):
        if found.bucket.endswith(ALL_REDUCE_BUCKET):
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
    chosen = "fsdp2" if decision is None else decision.choice.name
    return Contract(tuple(buckets), steps, tuple(params), chosen, own=_own_places(graph))


def _ours(graph: Graph) -> list[tuple[Node, Collective]]:
    return [(node, found) for node in launches(graph) if (found := collective(node)) is not None]


def _own_places(graph: Graph) -> tuple[OwnPlace, ...]:
    ours = _ours(graph)
    groups = {found.group for _, found in ours}
    passing_on = [node for node, found in ours if found.bucket.endswith(ALL_REDUCE_BUCKET)]
    first = [node for node, found in ours if not found.bucket.endswith(ALL_REDUCE_BUCKET)]
    return tuple(
        OwnPlace(sum(node < own.node for node in first), sum(node < own.node for node in passing_on))
        for own in own_launches(graph.nodes)
        if own.group in groups
    )


def _fqns(bucket: PlannedBucket) -> list[str]:
    return [member.partition("#")[0] for member in bucket.members]
