"""One bucket per unit, in FSDP2's parameter order, of one group, and of one dtype where it reduces."""

from __future__ import annotations

import pytest

from graphshard.graph.ir import launches
from graphshard.lowering import driver
from graphshard.passes import assign_buckets
from tests.graph.graphs import (
    BF16,
    F16,
    F32,
    Marked,
    Weight,
    toy_backward,
    toy_forward,
    toy_weights,
    two_gathers,
    two_reductions,
)


def buckets(marked: Marked) -> dict[str, list[str]]:
    """FQNs by bucket, as `decide` orders them; checks that `apply` writes the same."""
    edit = assign_buckets.decide(marked.graph, marked.ctx)
    assign_buckets.apply(marked.graph, edit)
    assert not assign_buckets.decide(marked.graph, marked.ctx)
    fqns = {}
    for bucket, names in edit.buckets:
        nodes = [marked.node(name) for name in names]
        assert [node.meta["bucket"] for node in nodes] == [(bucket, place) for place in range(len(nodes))]
        fqns[bucket] = [marked.ctx.params[_shard_name(node)].fqn for node in nodes]
    return fqns


def _shard_name(marker: object) -> str:
    return next(node.name for node in marker.all_input_nodes if node.name.endswith("_shard"))  # type: ignore[attr-defined]


def test_buckets_are_units() -> None:
    assert buckets(toy_forward(toy_weights())) == {
        "gather:blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "gather:blocks.1": ["blocks.1.weight", "blocks.1.bias"],
        "gather:root": ["head"],
    }


def test_buckets_of_backward_hold_gathers_and_reductions_apart() -> None:
    assert buckets(toy_backward(toy_weights())) == {
        "gather:root": ["head"],
        "gather:blocks.1": ["blocks.1.weight"],
        "reduce:root": ["head"],
        "reduce:blocks.1": ["blocks.1.weight", "blocks.1.bias"],
        "reduce:blocks.0": ["blocks.0.weight", "blocks.0.bias"],
    }


def test_buckets_follow_the_order_of_parameters_and_not_of_reads() -> None:
    weights = [Weight(f"block.p{index}", (3,), index) for index in (2, 0, 10, 1)]
    assert buckets(two_gathers(*weights)) == {"gather:block": ["block.p0", "block.p1", "block.p2", "block.p10"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "1"},
        {"world_size": 4},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_buckets_split_the_gathers_of_unlike_parameters(changes: dict[str, object]) -> None:
    unlike = Weight("block.b", (3,), 1, **changes)  # type: ignore[arg-type]
    like = [Weight("block.a", (4, 2), 0), Weight("block.c", (5,), 2)]
    assert buckets(two_gathers(like[0], unlike, like[1])) == {
        "gather:block": ["block.a", "block.c"],
        "gather:block#2": ["block.b"],
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": BF16},
        {"param_dtype": BF16},
        {"reduce_dtype": F16},
        {"replicas": 2},
        {"dim": 1},
    ],
    ids=str,
)
def test_buckets_gather_unlike_parameters_of_one_group_together(changes: dict[str, object]) -> None:
    weights = [Weight("block.a", (4, 2)), Weight("block.b", (2, 4), 1, **changes)]  # type: ignore[arg-type]
    assert buckets(two_gathers(*weights)) == {"gather:block": ["block.a", "block.b"]}


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": BF16, "param_dtype": F32},
        {"reduce_dtype": F16},
        {"param_dtype": BF16},
        {"group": "1"},
        {"world_size": 4},
        {"replicas": 2},
    ],
    ids=str,
)
def test_buckets_split_the_reductions_of_unlike_parameters(changes: dict[str, object]) -> None:
    unlike = Weight("block.b", (3,), 1, **changes)  # type: ignore[arg-type]
    like = [Weight("block.a", (4, 2), 0), Weight("block.c", (5,), 2, dim=0)]
    assert buckets(two_reductions(like[0], unlike, like[1])) == {
        "reduce:block": ["block.a", "block.c"],
        "reduce:block#2": ["block.b"],
    }


def test_buckets_reduce_parameters_of_other_shard_dims_together() -> None:
    weights = [Weight("block.a", (4, 2)), Weight("block.b", (2, 4), 1, dim=1)]
    assert buckets(two_reductions(*weights)) == {"reduce:block": ["block.a", "block.b"]}


def test_buckets_keep_a_member_that_has_one() -> None:
    marked = two_gathers(Weight("block.a", (4,)), Weight("block.b", (4,), 1))
    marked.node("unshard_default").meta["bucket"] = ("planned", 0)
    edit = assign_buckets.decide(marked.graph, marked.ctx)
    assert edit.buckets == (("gather:block", ("unshard_default_1",)),)


def test_buckets_make_one_collective_each(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = toy_backward(toy_weights(3, dtype=F32))
    lowered = driver.lower(marked.gm, marked.ctx, "bucketed").gm
    assert len(launches(lowered.graph)) == 3 + 4
    monkeypatch.setenv("GRAPHSHARD_DISABLE", "assign_buckets")
    lowered = driver.lower(marked.gm, marked.ctx, "alone").gm
    assert len(launches(lowered.graph)) == 3 + 7
