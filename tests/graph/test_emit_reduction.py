"""Reduced buckets of any shard dim, over copies of shards, with the settings of their unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from graphshard.errors import ModelDeleted
from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph import user_comms, verify
from graphshard.graph.ir import ALL_REDUCE, REDUCE_SCATTER, WAIT, Member, aten, collective, launches, output_args, val
from graphshard.graph.markers import REDUCE_GRAD
from graphshard.graph.user_comms import ALL_REDUCE_HOOK, CUSTOM_REDUCE_SCATTER
from tests.graph.graphs import (
    BF16,
    F16,
    F32,
    GraphBuilder,
    Marked,
    Weight,
    lowered_until,
    result_nodes,
    two_reductions,
)
from tests.graph.lockstep import mesh_groups, run_ranks

HYBRID = Weight("w", (4, 3), replicas=3)


def inserted(marked: Marked, **settings: Any) -> Marked:
    """Behind the pass, with settings for the root."""
    if settings:
        flags = marked.ctx.flags
        marked = marked.flagged(partial=flags.partial, units=(("", UnitSettings(**settings)),))
    lowered = lowered_until(marked, "insert_collectives")
    verify.check_values(lowered.graph, {})
    verify.check_waits(lowered.graph)
    verify.check_dtypes(lowered.graph)
    return lowered


def kinds(marked: Marked) -> list[str]:
    return [found.kind for launch in launches(marked.graph) if (found := collective(launch))]


@pytest.mark.parametrize(("size", "dim"), [((4, 6), 1), ((3, 2, 4), 1), ((3, 2, 4), 2)])
def test_reduction_of_another_dim_puts_the_shards_one_behind_the_other(size: tuple[int, ...], dim: int) -> None:
    lowered = inserted(two_reductions(Weight("w", size, dim=dim)))
    (permute,) = lowered.calls(aten.permute.default)
    assert permute.args[1] == [dim, *range(dim), *range(dim + 1, len(size) + 1)]
    assert not lowered.calls(aten.constant_pad_nd.default)


def test_reduction_of_one_rank_moves_nothing_whatever_the_dim() -> None:
    lowered = inserted(two_reductions(Weight("w", (4, 6), dim=1, world_size=1)))
    assert not lowered.calls(aten.permute.default)


def test_reduction_over_copies_is_two_collectives_of_one_bucket() -> None:
    weights = [Weight("u.a", (4, 3), 0, replicas=3), Weight("u.b", (5,), 1, replicas=3)]
    lowered = inserted(two_reductions(*weights))
    scatter, reduce = launches(lowered.graph)
    assert (scatter.target, scatter.args[1:]) == (REDUCE_SCATTER, ("avg", 2, "0"))
    assert (reduce.target, reduce.args[1:]) == (ALL_REDUCE, ("avg", "copies"))
    first, second = collective(scatter), collective(reduce)
    assert first is not None and second is not None
    assert (first.bucket, second.bucket) == ("reduce:u", "reduce:u/all_reduce")
    assert (second.group, second.world_size, second.dtype, second.op) == ("copies", 3, F32, "avg")
    assert first.members == second.members == (Member("u.a", 0, 6, F32), Member("u.b", 6, 3, F32))
    assert [node.target for node in reduce.all_input_nodes] == [WAIT]


def test_reduction_of_copies_alone_is_an_all_reduce() -> None:
    lowered = inserted(two_reductions(Weight("w", (5, 3), world_size=1, replicas=3)))
    (launch,) = launches(lowered.graph)
    found = collective(launch)
    assert found is not None
    assert (found.kind, found.bucket, found.world_size) == ("all_reduce", "reduce:root", 3)
    assert val(launch).shape == (15,)


@pytest.mark.parametrize("world_size", [1, 2])
def test_reduction_that_stays_partial_is_not_divided_nor_cast(world_size: int) -> None:
    weight = Weight("w", (4, 3), world_size=world_size, replicas=2, reduce_dtype=F16)
    lowered = inserted(two_reductions(weight), all_reduce=False)
    assert kinds(lowered) == (["reduce_scatter"] if world_size > 1 else [])
    assert [val(node).dtype for node in result_nodes(lowered.graph)] == [F16]
    assert len(lowered.calls(aten.div.Tensor)) == 1  # before the sum


def test_reduction_adds_what_is_partial_between_its_collectives() -> None:
    marked = two_reductions(HYBRID).flagged(partial=("w_shard",))
    lowered = inserted(marked)
    (total,) = lowered.calls(aten.add.Tensor)
    first, _ = lowered.calls(WAIT)
    assert total.args == (first, lowered.node("partial_w_shard"))
    assert [user.target for user in total.users] == [ALL_REDUCE]
    assert (total.meta["bucket_of"], total.meta["role"]) == ("reduce:root/all_reduce", "copy_in")


def test_reduction_that_stays_partial_adds_what_is() -> None:
    lowered = inserted(two_reductions(HYBRID).flagged(partial=("w_shard",)), all_reduce=False)
    (total,) = lowered.calls(aten.add.Tensor)
    assert total.meta["role"] == "copy_out"
    assert output_args(lowered.graph) == [total]


@pytest.mark.parametrize(
    ("weight", "settings", "ops", "operators"),
    [
        (Weight("w", (4, 3)), {"force_sum": True}, ["sum"], [("div", 2.0)]),
        (Weight("w", (4, 3)), {"divide_factor": 2.0}, ["avg"], []),
        (Weight("w", (4, 3)), {"divide_factor": 3.0}, ["sum"], [("mul", 1 / 3)]),
        (Weight("w", (4, 3), reduce_dtype=F16), {"divide_factor": 8.0}, ["sum"], [("div", 4.0), ("div", 2.0)]),
        (HYBRID, {"force_sum": True}, ["sum", "sum"], [("div", 6.0)]),
        (HYBRID, {"divide_factor": 2.0}, ["avg", "sum"], []),
        (HYBRID, {"divide_factor": 6.0}, ["sum", "sum"], [("mul", 1 / 6)]),
        (Weight("w", (4, 3), world_size=1, replicas=2), {"divide_factor": 2.0}, ["sum"], [("div", 2.0)]),
        (Weight("w", (4, 3), world_size=1), {"divide_factor": 2.0}, [], [("div", 2.0)]),
    ],
    ids=str,
)
def test_reduction_divides_as_its_unit_says(
    weight: Weight, settings: dict[str, Any], ops: list[str], operators: list[tuple[str, float]]
) -> None:
    lowered = inserted(two_reductions(weight), **settings)
    assert [found.op for launch in launches(lowered.graph) if (found := collective(launch))] == ops
    added = [node for node in lowered.graph.nodes if node.target in (aten.div.Tensor, aten.mul.Tensor)]
    names = {aten.div.Tensor: "div", aten.mul.Tensor: "mul"}
    assert [(names[node.target], node.args[1]) for node in added if "role" in node.meta] == operators


def test_reduction_over_a_group_of_its_own() -> None:
    lowered = inserted(two_reductions(HYBRID), scatter_group="other")
    assert [launch.args[-1] for launch in launches(lowered.graph)] == ["other", "copies"]


def test_reduction_by_a_users_own_operator() -> None:
    lowered = inserted(two_reductions(HYBRID), custom_reduce_scatter="model/root", divide_factor=3.0)
    own, default = launches(lowered.graph)
    assert (own.target, own.args[1:]) == (CUSTOM_REDUCE_SCATTER, ("sum", 2, "model/root"))
    assert default.target is ALL_REDUCE
    assert kinds(lowered) == ["reduce_scatter", "all_reduce"]


def test_reduction_of_an_offloaded_shard_copies_the_gradient_last() -> None:
    build = GraphBuilder("backward")
    weight = Weight("w", (4, 3), param_dtype=BF16, reduce_dtype=BF16, device="cuda")
    build.shard(weight)
    tangent = build.input("tangents_1", [4, 3], BF16)
    with build.mode:
        tangent.meta["val"] = torch.empty(4, 3, dtype=BF16, device="cuda")
    lowered = inserted(build.finish(build.reduce(tangent, weight)))
    (result,) = result_nodes(lowered.graph)
    assert (result.target, result.kwargs) == (aten._to_copy.default, {"device": torch.device("cpu")})
    assert (val(result).device.type, val(result).dtype) == ("cpu", F32)
    assert val(launches(lowered.graph)[0]).device.type == "cuda"


class Doubling:
    """A unit whose all-reduce hook doubles."""

    def __init__(self) -> None:
        self.numels: list[int] = []

    def hook_all_reduce(self, reduced: Tensor) -> None:
        self.numels.append(reduced.numel())
        reduced *= 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_reduction_calls_the_hook_before_it_divides_and_casts(replicas: int) -> None:
    weights = [Weight("a", (4, 3), 0, replicas=replicas), Weight("b", (5,), 1, replicas=replicas)]
    marked = two_reductions(*weights)
    lowered = inserted(marked, all_reduce_hook="test/hook", force_sum=True)
    (hook,) = lowered.calls(ALL_REDUCE_HOOK)
    assert [node.target for node in hook.all_input_nodes] == [WAIT]
    assert [user.target for user in hook.users] == [aten.div.Tensor]
    unit = Doubling()
    user_comms.register("test/hook", unit)  # type: ignore[arg-type]
    shards = [torch.zeros(weight.shard_numel) for weight in weights]
    args = [[*shards, torch.ones(4, 3), torch.ones(5)] for _ in range(2 * replicas)]
    results = run_ranks(lowered.gm, args, mesh_groups(replicas, 2))
    assert unit.numels == [9] * (2 * replicas)
    torch.testing.assert_close(results[0], [torch.full((6,), 4.0), torch.full((3,), 4.0)])


def test_reduction_that_stays_partial_calls_no_hook() -> None:
    assert not inserted(two_reductions(HYBRID), all_reduce_hook="key", all_reduce=False).calls(ALL_REDUCE_HOOK)


def test_operator_of_a_deleted_model_says_so() -> None:
    user_comms.register("gone", Doubling())  # type: ignore[arg-type]
    with pytest.raises(ModelDeleted, match=r"^gone: the compiled model was deleted"):
        ALL_REDUCE_HOOK(torch.ones(2), "gone")


@pytest.mark.parametrize(
    ("changes", "settings", "want"),
    [
        ({}, {}, ["reduce_scatter"]),
        ({"world_size": 1}, {}, []),
        ({"replicas": 2}, {}, ["reduce_scatter", "all_reduce"]),
        ({"replicas": 2, "world_size": 1}, {}, ["all_reduce"]),
        ({"replicas": 2}, {"all_reduce": False}, ["reduce_scatter"]),
        ({"replicas": 2, "world_size": 1}, {"all_reduce": False}, []),
    ],
)
def test_reduction_becomes_the_collectives_that_verify_expects(
    changes: dict[str, Any], settings: dict[str, Any], want: list[str]
) -> None:
    marked = two_reductions(Weight("u.w", (4, 3), **changes))
    marked = marked.flagged(units=(("u", UnitSettings(**settings)),))
    reduction: Node = marked.calls(REDUCE_GRAD)[0]
    assert verify.reduction_kinds(reduction, marked.ctx) == want
    before = verify.traffic(marked.graph, marked.ctx)
    lowered = inserted(marked)
    verify.check_traffic(lowered.graph, lowered.ctx, before)
    verify.check_reductions(lowered.graph, lowered.ctx, frozenset({"u.w"} if want else ()))
    assert kinds(lowered) == want
