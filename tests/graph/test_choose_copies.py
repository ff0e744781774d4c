"""Buckets whose members are sent one by one: who is asked, and what the markers say then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphshard.passes import assign_buckets, choose_copies
from tests.graph.graphs import Marked, toy_backward, toy_forward, toy_weights

Answer = Callable[[str, Sequence[str]], bool]


def coalesced(marked: Marked, answer: Answer | None) -> set[str]:
    """The buckets whose markers say so, all of each or none; checks that nothing is left to decide."""
    assign_buckets.apply(marked.graph, assign_buckets.decide(marked.graph, marked.ctx))
    ctx = replace(marked.ctx, coalesces=answer)
    choose_copies.apply(marked.graph, choose_copies.decide(marked.graph, ctx))
    assert not choose_copies.decide(marked.graph, ctx)
    markers = [node for node in marked.graph.nodes if "bucket" in node.meta]
    found = {node.meta["bucket"][0] for node in markers if node.meta.get("coalesced")}
    assert all(bool(node.meta.get("coalesced")) == (node.meta["bucket"][0] in found) for node in markers)
    return found


def test_nothing_is_coalesced_without_costs() -> None:
    assert coalesced(toy_forward(toy_weights()), None) == set()


def test_buckets_are_asked_for_by_kind_and_members() -> None:
    asked = []

    def only_the_first_block(kind: str, members: Sequence[str]) -> bool:
        asked.append((kind, {*members}))
        return kind == "reduce" and "blocks.0.bias" in members

    assert coalesced(toy_backward(toy_weights()), only_the_first_block) == {"reduce:blocks.0"}
    assert {kind for kind, _ in asked} == {"gather", "reduce"}
    assert ("reduce", {"blocks.0.weight", "blocks.0.bias"}) in asked


def test_all_that_are_wanted_are_coalesced() -> None:
    wanted = {"gather:blocks.0", "gather:blocks.1", "gather:root"}
    assert coalesced(toy_forward(toy_weights()), lambda *_: True) == wanted
