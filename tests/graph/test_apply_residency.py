"""Gathered parameters that are there already, that stay, and that are sharded over fewer ranks in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from graphshard.errors import VerifyError
from graphshard.graph import verify
from graphshard.graph.ir import aten, collective, launches, output_args, val
from graphshard.graph.markers import UNSHARD
from graphshard.lowering import driver
from graphshard.passes import apply_residency
from graphshard.passes.apply_residency import ResidencyEdit
from tests.graph.graphs import (
    BF16,
    F32,
    GraphBuilder,
    Marked,
    Weight,
    lowered_until,
    toy_backward,
    toy_forward,
    toy_weights,
    two_gathers,
)
from tests.graph.lockstep import Groups, mesh_groups, run_ranks

A, B = Weight("a", (5, 3), param_dtype=BF16), Weight("b", (5,), 1)
# Four shards, two after forward.
C = Weight("c", (5, 3), world_size=4, post_forward=(2, "1"), param_dtype=BF16)
D = Weight("d", (7,), 1, world_size=4, post_forward=(2, "1"))


def applied(marked: Marked) -> tuple[Marked, ResidencyEdit]:
    """`marked` behind the pass, and its edit; a second run decides nothing."""
    edit = apply_residency.decide(marked.graph, marked.ctx)
    apply_residency.apply(marked.graph, edit)
    marked.graph.lint()
    verify.check_values(marked.graph, {})
    assert not apply_residency.decide(marked.graph, marked.ctx)
    return marked, edit


def placeholders(marked: Marked) -> list[str]:
    return [node.name for node in marked.graph.nodes if node.op == "placeholder"]


def test_residency_default_decides_nothing() -> None:
    assert not applied(two_gathers(A, B))[1]


def test_resident_parameter_is_an_argument() -> None:
    marked, edit = applied(two_gathers(A, B).flagged(resident=("b_shard", "a_shard")))
    assert edit == ResidencyEdit((("unshard_default_1", "b_shard"), ("unshard_default", "a_shard")), (), (), ())
    assert not marked.calls(UNSHARD)
    assert placeholders(marked) == ["a_shard", "b_shard", "resident_b_shard", "resident_a_shard"]
    first, second = (node.args[0] for node in marked.calls(aten.clone.default))
    assert (first, second) == (marked.node("resident_a_shard"), marked.node("resident_b_shard"))
    value = val(first)
    assert (value.shape, value.dtype, value.is_contiguous()) == ((5, 3), BF16, True)


def test_resident_parameter_that_the_graph_does_not_gather_is_ignored() -> None:
    weights = toy_weights()
    marked = toy_backward(weights).flagged(resident=("blocks_0_weight_shard",))
    assert not applied(marked)[1]


def test_kept_parameter_is_one_more_result() -> None:
    marked, edit = applied(two_gathers(A, B).flagged(kept=("b_shard", "a_shard")))
    assert edit == ResidencyEdit((), (), ("unshard_default_1", "unshard_default"), ())
    *own, second, first = output_args(marked.graph)
    assert [node.target for node in own] == [aten.clone.default] * 2
    assert [first, second] == marked.calls(UNSHARD)


def test_kept_parameter_that_is_a_result_of_the_model_is_one_more() -> None:
    build = GraphBuilder()
    full = build.unshard(A)
    marked, _ = applied(build.finish(full, build.call(aten.neg.default, full)).flagged(kept=("a_shard",)))
    assert output_args(marked.graph)[::2] == [marked.node(full.name)] * 2
    assert len(output_args(marked.graph)) == 3


def test_resharded_parameter_is_a_part_by_the_rank_that_is_an_argument() -> None:
    marked, edit = applied(two_gathers(C, D).flagged(resharded=("c_shard", "d_shard")))
    assert edit.resharded == (("unshard_default", 2, "1"), ("unshard_default_1", 2, "1"))
    assert placeholders(marked) == ["c_shard", "d_shard", "rank_in_1"]
    assert (val(marked.node("rank_in_1")).shape, val(marked.node("rank_in_1")).dtype) == ((1,), torch.int64)
    *_, first, second = output_args(marked.graph)
    assert [(val(node).shape, val(node).dtype) for node in (first, second)] == [((9,), BF16), ((4,), F32)]
    assert len(marked.calls(UNSHARD)) == 2


def test_resharded_parameters_of_two_groups_have_a_rank_each() -> None:
    other = Weight("d", (7,), 1, world_size=4, post_forward=(2, "2"))
    marked, _ = applied(two_gathers(C, other).flagged(resharded=("c_shard", "d_shard")))
    assert placeholders(marked)[-2:] == ["rank_in_1", "rank_in_2"]


def test_rejoined_parameter_is_gathered_over_the_smaller_group() -> None:
    marked, edit = applied(two_gathers(C, D).flagged(rejoined=("c_shard",)))
    assert edit.rejoined == (("unshard_default", "c_shard", 2, "1"),)
    assert placeholders(marked) == ["c_shard", "d_shard", "post_c_shard"]
    assert (val(marked.node("post_c_shard")).shape, val(marked.node("post_c_shard")).dtype) == ((9,), BF16)
    lowered = lowered_until(marked)
    found = [found for launch in launches(lowered.graph) if (found := collective(launch))]
    assert [(launch.group, launch.world_size, launch.bucket) for launch in found] == [
        ("1", 2, "gather:root"),
        ("0", 4, "gather:root#2"),
    ]
    assert [member.fqn for launch in found for member in launch.members] == ["c", "d"]


def test_rejoined_parameter_may_be_kept() -> None:
    marked, _ = applied(two_gathers(C, D).flagged(rejoined=("c_shard",), kept=("c_shard", "d_shard")))
    *_, first, second = output_args(marked.graph)
    assert first.args[0] is marked.node("post_c_shard")
    assert second.args[0] is marked.node("d_shard")
    assert [first, second] == marked.calls(UNSHARD)


def test_residency_mixes_in_the_order_of_the_flags() -> None:
    weights = [Weight(f"u.p{i}", (6,), i, world_size=4, post_forward=(2, "1")) for i in range(5)]
    names = [weight.shard_name for weight in weights]
    marked, _ = applied(
        two_gathers(*weights).flagged(
            resident=(names[4],), rejoined=(names[1], names[0]), kept=(names[3],), resharded=(names[2],)
        )
    )
    assert placeholders(marked)[5:] == ["resident_u_p4_shard", "post_u_p1_shard", "post_u_p0_shard", "rank_in_1"]
    kept, resharded = output_args(marked.graph)[5:]
    assert kept.args[0] is marked.node(names[3])
    assert val(resharded).shape == (3,)


def test_residency_of_an_offloaded_parameter_is_on_the_device_that_computes() -> None:
    weight = Weight("w", (4, 3), world_size=4, post_forward=(2, "1"), device="cuda")
    names: Any = (weight.shard_name,)
    resident, _ = applied(two_gathers(weight).flagged(resident=names))
    resharded, _ = applied(two_gathers(weight).flagged(resharded=names))
    rejoined, _ = applied(two_gathers(weight).flagged(rejoined=names))
    for marked, name in ((resident, "resident_w_shard"), (resharded, "rank_in_1"), (rejoined, "post_w_shard")):
        assert val(marked.node(name)).device.type == "cuda"


def test_residency_changes_the_signature_as_the_driver_knows() -> None:
    marked = two_gathers(A, B).flagged(kept=("a_shard",))
    driver.lower(marked.gm, marked.ctx, "kept")
    before = verify.signature(marked.graph)
    apply_residency.apply(marked.graph, apply_residency.decide(marked.graph, marked.ctx))
    with pytest.raises(VerifyError, match=r"^\[G4\] "):
        verify.check_signature(marked.graph, before)


# -- what programs compute, on all ranks


def random(weight: Weight, seed: int) -> Tensor:
    return torch.randn(weight.size, generator=torch.Generator().manual_seed(seed)).to(weight.dtype)


def smaller_groups(world_size: int, count: int) -> Groups:
    """Group ``"1"``: `count` neighbours each."""
    return {**mesh_groups(1, world_size), "1": torch.arange(world_size).view(-1, count).tolist()}


@pytest.mark.parametrize("weight_dim", [0, 1])
@pytest.mark.parametrize(("world_size", "count"), [(4, 2), (6, 2), (6, 3)])
def test_resharded_parameters_rejoin_bit_for_bit(world_size: int, count: int, weight_dim: int) -> None:
    changes: dict[str, Any] = {"world_size": world_size, "post_forward": (count, "1")}
    weights = [
        Weight("u.even", (12, 12), 0, param_dtype=BF16, dim=weight_dim, **changes),
        Weight("u.odd", (7, 2), 1, **changes),
        Weight("u.short", (1,), 2, **changes),
    ]
    names = tuple(weight.shard_name for weight in weights)
    full = [random(weight, i) for i, weight in enumerate(weights)]
    shards = list(zip(*(weight.shards(value) for weight, value in zip(weights, full, strict=True)), strict=True))
    groups, ranks = smaller_groups(world_size, count), [torch.tensor([i % count]) for i in range(world_size)]

    down = two_gathers(*weights).flagged(resharded=names)
    results = run_ranks(
        driver.lower(down.gm, down.ctx, "down").gm,
        [[*mine, rank] for mine, rank in zip(shards, ranks, strict=True)],
        groups,
    )
    parts = [mine[len(weights) :] for mine in results]
    for mine, rank in zip(parts, ranks, strict=True):
        for part, weight, value in zip(mine, weights, full, strict=True):
            want = weight.shards(value.to(weight.spec.dtype), count)[int(rank)]
            torch.testing.assert_close(part, want, rtol=0, atol=0)

    up = two_gathers(*weights).flagged(rejoined=names, kept=names[:1])
    lowered = driver.lower(up.gm, up.ctx, "up").gm
    assert len(launches(lowered.graph)) == 1
    for mine in run_ranks(lowered, [[*own, *part] for own, part in zip(shards, parts, strict=True)], groups):
        for result, weight, value in zip(mine, [*weights, weights[0]], [*full, full[0]], strict=True):
            torch.testing.assert_close(result, value.to(weight.spec.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_kept_parameters_serve_backward_bit_for_bit(world_size: int) -> None:
    weights = toy_weights(world_size=world_size)
    names = tuple(weight.shard_name for weight in weights)
    shards = list(zip(*(w.shards(random(w, i)) for i, w in enumerate(weights)), strict=True))
    inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(50 + rank)) for rank in range(world_size)]
    tangents = [torch.randn(4, 5, generator=torch.Generator().manual_seed(70 + rank)) for rank in range(world_size)]
    args = [[x, *mine] for x, mine in zip(inputs, shards, strict=True)]

    keeping = toy_forward(weights).flagged(kept=names)
    outputs = run_ranks(driver.lower(keeping.gm, keeping.ctx, "keeping").gm, args)
    gathered = {name: [mine[i - len(names)] for mine in outputs] for i, name in enumerate(names)}
    grads = []
    for resident in ((), ("head_shard", "blocks_1_weight_shard")):
        backward = toy_backward(weights).flagged(resident=resident)
        lowered = driver.lower(backward.gm, backward.ctx, "backward").gm
        assert sum(launch.meta["collective"].kind == "all_gather" for launch in launches(lowered.graph)) == (
            0 if resident else 2
        )
        grads.append(
            run_ranks(
                lowered,
                [
                    [*mine, *outputs[rank][1:4], tangents[rank], *(gathered[name][rank] for name in resident)]
                    for rank, mine in enumerate(shards)
                ],
            )
        )
    torch.testing.assert_close(*grads, rtol=0, atol=0)
