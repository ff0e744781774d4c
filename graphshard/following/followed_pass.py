"""How a rank whose graphs are not those of the other ranks does what they do, bucket by bucket in the contract's order.

A graph break on one rank leaves it with several regions where the others have one. The others' contract goes on: each
region does the part of it that it needs, and what stands in front of that. What a bucket gathers for other regions is
handed on to them; what it reduces of other regions' gradients is taken in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, GraphModule, Node

from graphshard.agree.contract import Contract
from graphshard.compat.inductor import copy_graph
from graphshard.compat.results import keep_strides
from graphshard.compat.tensors import fake_tensors
from graphshard.errors import RanksDiffer
from graphshard.fsdp2 import Unit
from graphshard.graph.ir import Direction, output_args, output_node, shard_placeholder, unshards
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.plan import PlannedBucket
from graphshard.state.marked_graph import MarkedGraph, marked_graph
from graphshard.state.shards import Shard
from graphshard.state.signatures import WholeCall


@dataclass(frozen=True)
class Part:
    """What one program does of a contract.

    Attributes:
        buckets: in order.
        gathers, reductions: FQNs of what these buckets gather or reduce of parameters that the graph does not.
        handed: FQNs of what the graph gathers itself and others may need, too.
    """

    buckets: tuple[PlannedBucket, ...] = ()
    gathers: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()
    handed: tuple[str, ...] = ()


@dataclass
class FollowedPass:
    """One forward, or one backward, of a rank that follows a contract.

    Attributes:
        whole: the call as the other ranks make it.
        contract: of its forward or backward.
        direction: of that.
        shards: its parameters by FQN.
        done: how many buckets were launched.
        uses: how many programs have used each parameter; infinitely many where it is read outside any graph.
        usual: the same of earlier passes, the most of each.
        again: of a backward: what an earlier call uses, too, whose backward is still to come.
        brought: FQNs of what will have been gathered before, of a pass that is not entered yet.
        staying: of a backward: units that stay gathered behind it.
        reached: of a backward: what the other ranks have gradients of.
        unreduced: of a backward: units whose gradients they reduce behind it.
        reduced_early: of a backward: units whose gradients they reduce, though users want to have them accumulated.
        end: does what they do behind it.
    """

    whole: WholeCall
    contract: Contract
    direction: Direction
    shards: Mapping[str, Shard] = field(init=False)
    done: int = 0
    uses: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    usual: Mapping[str, float] = field(default_factory=dict)
    again: frozenset[Shard] = frozenset()
    brought: frozenset[str] = frozenset()
    staying: frozenset[Unit] = frozenset()
    reached: frozenset[Shard] = frozenset()
    unreduced: frozenset[Unit] = frozenset()
    reduced_early: frozenset[Unit] = frozenset()
    end: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.shards = {shard.fqn: shard for shard in self.whole.binding.shards}
        for bucket in self.contract.buckets:
            if unknown := [fqn for fqn in bucket.members if fqn not in self.shards]:
                raise RanksDiffer(
                    f"contract: {bucket.name} of the other ranks has '{unknown[0]}', once or once more, which a rank "
                    "whose graphs break where theirs do not cannot follow; want no graph break on this rank alone"
                )

    def part(
        self,
        needed: Collection[str],
        ready: Collection[str],
        is_expected: Callable[[Shard], bool],
        where: str,
    ) -> tuple[PlannedBucket, ...]:
        """The buckets that a program must launch: up to the last that it needs, and the reductions that follow.

        Args:
            needed: FQNs of parameters that it uses and that are not gathered.
            ready: FQNs of parameters whose gradients it computes to the end.
            is_expected: whether a later program computes a gradient of a parameter, or a part of it.
            where: in words, for errors.

        Raises:
            RanksDiffer: the contract's order cannot be kept.
        """
        buckets = self.contract.buckets
        missing, end = set(needed), self.done
        for number in range(self.done, len(buckets)):
            if buckets[number].kind == "gather" and not missing.isdisjoint(buckets[number].members):
                missing -= set(buckets[number].members)
                end = number + 1
        if missing:
            raise RanksDiffer(
                f"contract: {where} of this rank needs '{min(missing)}', which the other ranks gather earlier or not "
                "at all; want modules that use the same parameters, as often, on every rank"
            )
        for number in range(self.done, len(buckets)):
            waits_for = self._unready(buckets[number], ready, is_expected)
            if number < end and waits_for:
                raise RanksDiffer(
                    f"contract: {where} of this rank needs the {buckets[end - 1].name} before the gradient of "
                    f"'{waits_for}', which the other ranks reduce first: backward runs in another order here"
                )
            if number >= end and (buckets[number].kind == "gather" or waits_for):
                break
            end = max(end, number + 1)
        return buckets[self.done : end]

    def _unready(
        self, bucket: PlannedBucket, ready: Collection[str], is_expected: Callable[[Shard], bool]
    ) -> str | None:
        if bucket.kind == "gather":
            return None
        waiting = (fqn for fqn in bucket.members if fqn not in ready and is_expected(self.shards[fqn]))
        return next(waiting, None)

    def reduces(self, unit: Unit) -> bool:
        """Whether the other ranks reduce the unit's gradients, in this backward or behind it."""
        return unit.reduce_grads or unit in self.reduced_early

    def use(self, shards: Sequence[Shard], outside: bool = False) -> None:
        """Is told that a program uses parameters."""
        for shard in shards:
            self.uses[shard.fqn] += math.inf if outside else 1

    def is_used_up(self, shard: Shard) -> bool:
        """Whether no program to come will use a parameter that one has used, as far as earlier passes tell."""
        return math.inf > self.uses[shard.fqn] >= self.usual.get(shard.fqn, math.inf)

    def rest(self) -> tuple[PlannedBucket, ...]:
        """The buckets that no program has launched."""
        return self.contract.buckets[self.done :]

    def contract_for(self, part: Part) -> Contract:
        """The contract of one program."""
        names = {bucket.name for bucket in part.buckets}
        steps = tuple(step for step in self.contract.steps if step.bucket in names)
        contract = self.contract
        return Contract(part.buckets, steps, contract.params, contract.chosen, contract.without)


def check_own(contract: Contract) -> None:
    """Raises:
    RanksDiffer: a contract is one with collectives of the model's own, which cannot be followed bucket by bucket: a
        rank whose graphs break may launch them outside any graph.
    """
    if contract.own:
        raise RanksDiffer(
            "contract: the model has collectives of its own over a group that parameters are sharded over, which a "
            "rank whose graphs break where the others' do not cannot keep in order; want no graph break on this rank "
            "alone, or another group for them (dist.new_group())"
        )


def members(buckets: Sequence[PlannedBucket], kind: str) -> list[str]:
    """FQNs of what buckets gather, or reduce."""
    return [fqn for bucket in buckets if bucket.kind == kind for fqn in bucket.members]


def extended(
    graph: MarkedGraph, gathers: Sequence[Shard], reductions: Sequence[Shard], handed: Collection[str]
) -> MarkedGraph:
    """A graph that gathers and reduces parameters of other graphs besides.

    Its further arguments are the leaves of `gathers` and `reductions`, each once, what tensor subclasses send of
    `gathers` in their places, then the gradients of `reductions`, full size in the reduce dtype. Its further results
    are gathered parameters, of `handed`, then of `gathers`, then the reduced shards of `reductions`.

    Args:
        graph: with markers.
        gathers: what is gathered for others.
        reductions: whose gradients others have computed.
        handed: placeholders of shards that the graph gathers; others need them, too.
    """
    new = copy_graph(graph.gm)
    results = output_args(new)
    values = [node.meta["val"] for node in new.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    mode = values[0].fake_mode if values else fake_tensors()
    added: list[Node] = []

    def placeholder(name: str, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Node:
        existing = [node for node in new.nodes if node.op == "placeholder"]
        before = new.inserting_after(existing[-1]) if existing else new.inserting_before(next(iter(new.nodes)))
        with before:
            node = new.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(tuple(size), dtype=dtype, device=device)
        added.append(node)
        return node

    leaves = {
        shard.fqn: placeholder(f"others_shard_{i}", shard.leaf.shape, shard.leaf.dtype, shard.leaf.device)
        for i, shard in enumerate(_once(gathers, reductions))
    }
    wires = {
        shard.fqn: placeholder(f"others_wire_{i}", shard.source.shape, shard.source.dtype, shard.source.device)
        for i, shard in enumerate(_extended(gathers))
    }
    grads = [
        placeholder(f"others_grad_{i}", shard.param.size, shard.param.reduce_dtype, shard.unit.device)
        for i, shard in enumerate(reductions)
    ]

    def marker(target: Callable[..., torch.Tensor], *args: Node | str) -> Node:
        with new.inserting_before(output_node(new)):
            node = new.call_function(target, args)
        with mode, torch.no_grad():
            node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
        return node

    own = {shard_placeholder(node).name: node for node in reversed(unshards(new))}
    results += [own[name] for name in handed]
    for shard in gathers:
        wire = [wires[shard.fqn]] if shard.extension is not None else []
        results.append(marker(UNSHARD, leaves[shard.fqn], str(shard.gather_spec()), *wire))
    results += [
        marker(REDUCE_GRAD, grad, leaves[shard.fqn], str(shard.spec()))
        for grad, shard in zip(grads, reductions, strict=True)
    ]
    output_node(new).args = (tuple(results),)
    keep_strides(output_node(new), len(handed) + len(gathers) + len(reductions))
    inputs = [*graph.inputs, *(node.meta["val"] for node in added)]
    wider = GraphModule(graph.gm, new)
    return marked_graph(
        wider, graph.direction, inputs, graph.kwargs, graph.state, graph.part, num_results=graph.num_results
    )


def extra_args(gathers: Sequence[Shard], reductions: Sequence[Shard]) -> list[torch.Tensor]:
    """The further arguments of such a graph; what the shards held is theirs no more."""
    found = [shard.leaf.detach() for shard in _once(gathers, reductions)]
    found += [shard.source for shard in _extended(gathers)]
    for shard in reductions:
        if shard.pending is not None:  # of a later call
            shard.hold(shard.pending, shared=True)
            shard.pending = None
        if shard.held is None:  # this rank did not use it
            spec = shard.spec()
            found.append(torch.zeros(spec.size, dtype=spec.reduce_dtype, device=shard.unit.device))
        else:
            found.append(shard.held)
            shard.held = None
    return found


def _once(*several: Sequence[Shard]) -> list[Shard]:
    return list(dict.fromkeys(shard for shards in several for shard in shards))


def _extended(gathers: Sequence[Shard]) -> list[Shard]:
    return [shard for shard in gathers if shard.extension is not None]


def empty_graph(direction: Direction) -> GraphModule:
    """A graph that computes nothing."""
    graph = Graph()
    graph.output(())
    return GraphModule({}, graph)
