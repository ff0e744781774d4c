"""Gathers are launched one unit ahead, reductions awaited late, and nothing else moves."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph import verify
from graphshard.graph.ir import ALL_GATHER, WAIT, aten, collective, launches
from graphshard.lowering import driver
from graphshard.passes import order_launches
from graphshard.passes.order_launches import Move, OrderEdit
from tests.graph.graphs import GraphBuilder, Marked, Weight, lowered_until, toy_backward, toy_forward, toy_weights
from tests.graph.lockstep import mesh_groups, run_ranks

COMPUTE = {aten.mm.default: "mm", aten.addmm.default: "addmm", aten.relu.default: "relu", aten.neg.default: "neg"}


def ordered(marked: Marked) -> Marked:
    lowered = lowered_until(marked, "insert_collectives")
    names, random = [node.name for node in lowered.graph.nodes], verify.random_operators(lowered.graph)
    edit = order_launches.decide(lowered.graph, lowered.ctx)
    order_launches.apply(lowered.graph, edit)
    verify.check_lint(lowered.graph)
    verify.check_permutation(lowered.graph, names, random)
    verify.check_hazards(lowered.graph)
    assert not order_launches.decide(lowered.graph, lowered.ctx)
    lowered.gm.recompile()
    return lowered


def events(marked: Marked) -> list[str]:
    """Launches as ``+bucket``, waits as ``-bucket``, and the compute of `COMPUTE`, in graph order."""
    found = []
    for node in marked.graph.nodes:
        launch = node.all_input_nodes[0] if node.target is WAIT else node
        if (carried := collective(launch)) is not None:
            found.append(("-" if node is not launch else "+") + carried.bucket)
        elif node.target in COMPUTE:
            found.append(COMPUTE[node.target])
    return found


def test_order_prefetches_one_unit_ahead_in_forward() -> None:
    assert events(ordered(toy_forward(toy_weights(3)))) == [
        *("+gather:blocks.0", "-gather:blocks.0"),
        *("+gather:blocks.1", "addmm", "relu", "-gather:blocks.1"),
        *("+gather:blocks.2", "addmm", "relu", "-gather:blocks.2"),
        *("+gather:root", "addmm", "relu", "-gather:root"),
        "mm",
    ]


def test_order_launches_the_first_gather_at_the_top() -> None:
    build = GraphBuilder()
    hidden = build.call(aten.neg.default, build.input("x", [4]))
    marked = build.finish(build.call(aten.add.Tensor, hidden, build.unshard(Weight("w", (4,)))))
    assert events(ordered(marked)) == ["+gather:root", "neg", "-gather:root"]


def test_order_awaits_reductions_late_in_backward() -> None:
    assert events(ordered(toy_backward(toy_weights(3)))) == [
        *("+gather:root", "mm", "+reduce:root"),
        *("-gather:root", "+gather:blocks.2", "mm"),
        *("-gather:blocks.2", "+gather:blocks.1", "mm", "-reduce:root", "+reduce:blocks.2", "mm"),
        *("-gather:blocks.1", "mm", "-reduce:blocks.2", "+reduce:blocks.1", "mm"),
        *("mm", "-reduce:blocks.1", "+reduce:blocks.0", "-reduce:blocks.0"),
    ]


def test_order_launches_an_all_reduce_when_its_reduction_arrives_and_awaits_it_last() -> None:
    found = events(ordered(toy_backward(toy_weights(2, replicas=2))))
    assert [event for event in found if "reduce" in event] == [
        "+reduce:root",
        *("-reduce:root", "+reduce:root/all_reduce", "+reduce:blocks.1"),
        *("-reduce:blocks.1", "+reduce:blocks.1/all_reduce", "+reduce:blocks.0"),
        *("-reduce:blocks.0", "+reduce:blocks.0/all_reduce"),
        *("-reduce:root/all_reduce", "-reduce:blocks.1/all_reduce", "-reduce:blocks.0/all_reduce"),
    ]


def test_order_awaits_all_reduces_of_copies_last() -> None:
    found = events(ordered(toy_backward(toy_weights(2, world_size=1, replicas=2))))
    assert [event for event in found if "reduce" in event] == [
        *("+reduce:root", "+reduce:blocks.1", "+reduce:blocks.0"),
        *("-reduce:root", "-reduce:blocks.1", "-reduce:blocks.0"),
    ]


def test_order_leaves_no_all_reduce_where_gradients_stay_partial() -> None:
    local = tuple((unit, UnitSettings(all_reduce=False)) for unit in ("", "blocks.0"))
    found = events(ordered(toy_backward(toy_weights(1, replicas=2)).flagged(units=local)))
    assert [event for event in found if "reduce" in event] == [
        *("+reduce:root", "-reduce:root"), *("+reduce:blocks.0", "-reduce:blocks.0")
    ]  # fmt: skip


def gathers_of(marked: Marked) -> list[str]:
    return [event.replace("gather:", "") for event in events(ordered(marked)) if "gather" in event]


def choosing(direction: str, **chosen: tuple[str, ...]) -> tuple[tuple[str, UnitSettings], ...]:
    """Settings of units; `b0` stands for ``blocks.0``, `root` for the root."""
    names = {"root": "", **{f"b{i}": f"blocks.{i}" for i in range(4)}}
    return tuple(
        (names[unit], UnitSettings(**{f"{direction}_prefetch": tuple(names[other] for other in others)}))  # type: ignore[arg-type]
        for unit, others in chosen.items()
    )


def test_order_prefetches_in_forward_what_the_user_chose_and_the_next_unit() -> None:
    marked = toy_forward(toy_weights(4))
    assert gathers_of(marked.flagged(units=choosing("forward", b0=("b1", "b2"), b2=("b3",)))) == [
        *("+blocks.0", "-blocks.0", "+blocks.1", "+blocks.2", "-blocks.1"),
        *("-blocks.2", "+blocks.3", "-blocks.3", "+root", "-root"),
    ]
    # Nobody chose blocks.1: it is not left to the moment at which it is used.
    assert gathers_of(marked.flagged(units=choosing("forward", b0=("b2",)))) == [
        *("+blocks.0", "-blocks.0", "+blocks.1", "+blocks.2", "-blocks.1"),
        *("-blocks.2", "+blocks.3", "-blocks.3", "+root", "-root"),
    ]


def test_order_prefetches_in_backward_only_what_the_user_chose_where_he_did() -> None:
    marked = toy_backward(toy_weights(4))
    assert gathers_of(marked.flagged(units=choosing("backward", root=("b2",)))) == [
        *("+root", "-root", "+blocks.2", "+blocks.3", "-blocks.3"),
        *("-blocks.2", "+blocks.1", "-blocks.1"),
    ]
    assert gathers_of(marked.flagged(units=choosing("backward", root=("b3", "b2", "b1")))) == [
        *("+root", "-root", "+blocks.3", "+blocks.2", "+blocks.1"), *("-blocks.3", "-blocks.2", "-blocks.1")
    ]  # fmt: skip


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_order_ignores_a_choice_for_the_other_direction_or_of_what_is_past(direction: str) -> None:
    make = toy_forward if direction == "forward" else toy_backward
    marked = make(toy_weights(3))
    default = gathers_of(marked)
    other = "backward" if direction == "forward" else "forward"
    assert gathers_of(marked.flagged(units=choosing(other, b1=("b2", "root")))) == default
    last = {"root": ("b0", "b1", "b2")} if direction == "forward" else {"b1": ("b2", "root")}
    assert gathers_of(marked.flagged(units=choosing(direction, **last))) == default


def test_order_copies_into_a_gather_behind_the_copy_out_before_it() -> None:
    order = list(ordered(toy_forward(toy_weights())).graph.nodes)
    first_wait = next(node for node in order if node.target is WAIT)
    bucket = first_wait.meta["bucket_of"]
    copied_out = max(i for i, node in enumerate(order) if node.meta.get("bucket_of") == bucket)
    assert [node.target for node in order[copied_out + 1 : copied_out + 3]] == [aten.cat.default, ALL_GATHER]


def test_order_leaves_a_gather_of_a_computed_shard() -> None:
    build = GraphBuilder()
    weight = Weight("block.w", (4,))
    first = build.call(aten.neg.default, build.unshard(Weight("first", (4,))))
    alias = build.call(aten.alias.default, build.shard(weight))
    second = build.call(torch.ops.graphshard.unshard.default, alias, str(weight.spec))
    marked = build.finish(build.call(aten.add.Tensor, first, second))
    assert events(ordered(marked)) == ["+gather:root", "-gather:root", "neg", "+gather:block", "-gather:block"]


def test_order_leaves_a_wait_whose_gradient_is_used() -> None:
    build = GraphBuilder("backward")
    a, b = Weight("a.w", (4,)), Weight("b.w", (4,))
    build.shard(a), build.shard(b)
    tangent = build.input("tangents_1", [4])
    clipped = build.call(aten.neg.default, build.reduce(tangent, a))
    marked = build.finish(clipped, build.reduce(build.call(aten.relu.default, tangent), b))
    assert events(ordered(marked)) == ["+reduce:a", "-reduce:a", "neg", "relu", "+reduce:b", "-reduce:b"]


def test_order_leaves_collectives_of_the_model() -> None:
    build = GraphBuilder()
    x = build.input("x", [4])
    own = build.call(WAIT, build.call(ALL_GATHER, x, 2, "tp"))
    marked = build.finish(build.call(aten.mul.Tensor, own, build.unshard(Weight("w", (8,)))))
    assert not order_launches.decide(marked.graph, marked.ctx)
    ordered(marked)


def test_order_of_one_unit_decides_nothing() -> None:
    lowered = lowered_until(toy_forward(toy_weights(0)), "insert_collectives")
    assert not order_launches.decide(lowered.graph, lowered.ctx)


def test_order_apply_refuses_to_lose_nodes() -> None:
    marked = toy_forward(toy_weights())
    edit = OrderEdit((Move(("t_default",), "after", "nowhere"),))
    with pytest.raises(AssertionError, match="1 nodes lost"):
        order_launches.apply(marked.graph, edit)


def test_order_loses_nothing_in_a_long_graph() -> None:
    blocks = 170
    marked = ordered(toy_forward(toy_weights(blocks)))
    assert len(marked.graph.nodes) > 2000
    found = [event for event in events(marked) if not re.match(r"\w", event)]
    units = [*(f"blocks.{i}" for i in range(blocks)), "root"]
    expected = ["+gather:blocks.0"]
    for unit, following in zip(units, [*units[1:], None], strict=True):
        expected += [f"-gather:{unit}", *([f"+gather:{following}"] if following else [])]
    assert found == expected


UNITS = st.sampled_from(["u0", "u1", "u2", "elsewhere"])


@st.composite
def programs(draw: st.DrawFn) -> Marked:
    """A backward graph that gathers and reduces a few parameters, and draws random numbers, in any order; its units
    prefetch any others.
    """
    build = GraphBuilder("backward")
    replicas = draw(st.integers(1, 2))
    weights = [Weight(f"u{i % 3}.p{i}", (4,), i, replicas=replicas) for i in range(draw(st.integers(1, 6)))]
    for weight in weights:
        build.shard(weight)
    values: list[Node] = [build.input("tangents_1", [4])]
    reduced: dict[str, Node] = {}
    steps = draw(
        st.lists(st.tuples(st.sampled_from(["gather", "reduce", "random", "compute"]), st.integers(0, 50)), max_size=14)
    )
    for kind, number in steps:
        weight, value = weights[number % len(weights)], values[number % len(values)]
        if kind == "gather":
            values.append(build.call(aten.add.Tensor, value, build.unshard(weight)))
        elif kind == "reduce" and weight.fqn not in reduced:
            reduced[weight.fqn] = build.reduce(value, weight)
        elif kind == "random":
            values.append(build.call(aten.bernoulli.p, value, 0.5))
        else:
            values.append(build.call(aten.sub.Tensor, values[-1], value))
    chosen = draw(st.dictionaries(UNITS, st.lists(UNITS, unique=True).map(tuple), max_size=2))
    units = tuple((unit, UnitSettings(backward_prefetch=others)) for unit, others in chosen.items())
    return build.finish(*reduced.values(), values[-1]).flagged(units=units)


@settings(max_examples=60)
@given(programs())
def test_order_permutes_any_program_without_changing_it(marked: Marked) -> None:
    ranks = range(4)  # of shards and of their copies, if there are any
    args = [[torch.full((2,), float(4 * rank + i)) for i in range(len(marked.ctx.params))] for rank in ranks]
    tangents = [torch.arange(4.0) + rank for rank in ranks]
    results = []
    for lowered in (lowered_until(marked, "insert_collectives"), ordered(marked)):
        assert len(launches(lowered.graph)) == sum(node.target is WAIT for node in lowered.graph.nodes)
        torch.manual_seed(0)
        given = [[*mine, tangent] for mine, tangent in zip(args, tangents, strict=True)]
        results.append(run_ranks(lowered.gm, given, mesh_groups(2, 2)))
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    driver.lower(marked.gm, marked.ctx, "random")  # with every check of the driver


def test_order_keeps_as_many_reduce_scatters_in_flight_as_fsdp2_is_told() -> None:
    units = (("blocks.0", UnitSettings(scatter_buffers=2)),)
    found = events(ordered(toy_backward(toy_weights(3)).flagged(units=units)))
    assert [event for event in found if "reduce" in event] == [
        *("+reduce:root", "+reduce:blocks.2", "-reduce:root", "+reduce:blocks.1"),
        *("-reduce:blocks.2", "+reduce:blocks.0", "-reduce:blocks.1", "-reduce:blocks.0"),
    ]
