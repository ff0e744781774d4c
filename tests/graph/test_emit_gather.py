"""Gathered buckets of any shard dim, of several dtypes, from another device, or by a user's own all-gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph import verify
from graphshard.graph.ir import ALL_GATHER, WAIT, Member, aten, collective, launches, val
from graphshard.graph.user_comms import CUSTOM_ALL_GATHER
from graphshard.lowering import driver
from tests.graph.graphs import BF16, F16, F32, GraphBuilder, Marked, Weight, lowered_until, two_gathers
from tests.graph.lockstep import mesh_groups, run_ranks


def inserted(marked: Marked) -> Marked:
    lowered = lowered_until(marked, "insert_collectives")
    verify.check_values(lowered.graph, {})
    verify.check_dtypes(lowered.graph)
    return lowered


@pytest.mark.parametrize(("size", "dim"), [((4, 6), 1), ((3, 2, 4), 1), ((3, 2, 4), 2)])
def test_gather_of_another_dim_puts_the_shards_side_by_side(size: tuple[int, ...], dim: int) -> None:
    lowered = inserted(two_gathers(Weight("w", size, dim=dim)))
    (permute,) = lowered.calls(aten.permute.default)
    assert permute.args[1] == [*range(1, dim + 1), 0, *range(dim + 1, len(size) + 1)]
    assert not lowered.calls(aten.slice.Tensor)
    full = lowered.calls(aten.clone.default)[-1].args[0]
    assert (val(full).shape, val(full).is_contiguous()) == (size, True)


def test_gather_of_several_dtypes_is_one_launch_of_bytes() -> None:
    weights = [
        Weight("u.norm", (5,), 0),
        Weight("u.weight", (4, 3), 1, param_dtype=BF16),
        Weight("u.half", (2,), 2, dtype=F16),
    ]
    lowered = inserted(two_gathers(*weights))
    (launch,) = launches(lowered.graph)
    found = collective(launch)
    assert found is not None
    assert (found.dtype, val(launch).dtype, val(launch).numel()) == (torch.uint8, torch.uint8, 2 * (12 + 12 + 2))
    # Offsets are of bytes, numels of elements.
    assert found.members == (
        Member("u.norm", 0, 3, F32),
        Member("u.weight", 12, 6, BF16),
        Member("u.half", 24, 1, F16),
    )
    assert found.shard_numel == 26


def test_gather_of_several_dtypes_may_hold_parameters_without_elements() -> None:
    lowered = inserted(two_gathers(Weight("u.none", (0, 4), 0), Weight("u.weight", (4, 3), 1, param_dtype=BF16)))
    (launch,) = launches(lowered.graph)
    assert (val(launch).dtype, val(launch).numel()) == (torch.uint8, 2 * 12)
    casts = lowered.calls(torch.ops.prims.convert_element_type.default)
    assert [val(node).dtype for node in casts if not val(node).numel()] == [torch.uint8, F32]


def test_gather_of_one_dtype_is_not_of_bytes() -> None:
    weights = [Weight("u.a", (4,), 0, dtype=BF16), Weight("u.b", (4,), 1, param_dtype=BF16)]
    lowered = inserted(two_gathers(*weights))
    assert [val(launch).dtype for launch in launches(lowered.graph)] == [BF16]
    assert not lowered.calls(aten.view.dtype)


def test_gather_of_bytes_moves_what_markers_say() -> None:
    marked = two_gathers(Weight("u.norm", (5,), 0), Weight("u.weight", (4, 3), 1, param_dtype=BF16))
    before = verify.traffic(marked.graph, marked.ctx)
    lowered = inserted(marked)
    verify.check_traffic(lowered.graph, lowered.ctx, before)


def test_gather_of_an_offloaded_shard_copies_it_before_the_cast() -> None:
    lowered = inserted(two_gathers(Weight("w", (4, 3), param_dtype=BF16, device="cuda")))
    (copy,) = lowered.calls(aten._to_copy.default)
    assert copy.args == (lowered.node("w_shard"),)
    assert copy.kwargs == {"device": torch.device("cuda"), "non_blocking": True}
    (cast,) = lowered.calls(torch.ops.prims.convert_element_type.default)
    assert cast.args == (copy, BF16)
    (launch,) = launches(lowered.graph)
    assert (val(launch).device.type, val(launch).dtype) == ("cuda", BF16)


def test_gather_of_an_offloaded_shard_where_there_is_one_rank() -> None:
    build = GraphBuilder()
    lowered = inserted(build.finish(build.unshard(Weight("w", (4, 3), world_size=1, device="cuda"))))
    assert not lowered.calls(aten.clone.default)  # the copy is fresh
    assert len(lowered.calls(aten._to_copy.default)) == 1


def custom(unit: str) -> dict[str, Any]:
    return {"units": ((unit, UnitSettings(custom_all_gather="model/unit")),)}


def test_gather_by_a_users_own_operator() -> None:
    weights = [Weight("u.a", (4, 3)), Weight("u.b", (5,), 1), Weight("other", (2,))]
    lowered = inserted(two_gathers(*weights).flagged(**custom("u")))
    own, default = launches(lowered.graph)
    assert (own.target, own.args[1:]) == (CUSTOM_ALL_GATHER, (2, "model/unit"))
    assert default.target is ALL_GATHER
    assert [launch.target for wait in lowered.calls(WAIT) for launch in wait.all_input_nodes] == [
        CUSTOM_ALL_GATHER, ALL_GATHER
    ]  # fmt: skip
    found = collective(own)
    assert found is not None
    assert (found.kind, found.unit, [member.fqn for member in found.members]) == ("all_gather", "u", ["u.a", "u.b"])


def test_gather_by_a_users_own_operator_yields_the_parameters() -> None:
    weights = [Weight("u.a", (4, 3)), Weight("u.b", (5,), 1, param_dtype=BF16)]
    full: list[Tensor] = [torch.randn(4, 3), torch.randn(5)]
    marked = two_gathers(*weights).flagged(**custom("u"))
    shards = list(zip(*(weight.shards(value) for weight, value in zip(weights, full, strict=True)), strict=True))
    groups = {**mesh_groups(1, 2), "model/unit": [[0, 1]]}
    for results in run_ranks(driver.lower(marked.gm, marked.ctx, "custom").gm, shards, groups):
        torch.testing.assert_close(results, [full[0], full[1].to(BF16)], rtol=0, atol=0)
