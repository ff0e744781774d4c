"""One step on paper: its parts, its memory, and what changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import scale_models

from graphshard.cost import CostModel, find_hardware
from graphshard.planner import BudgetTooSmall
from graphshard.scale.estimate import PEAK_TFLOPS, Setting, StepEstimate, Workload, estimate_step
from graphshard.scale.resize import RankLayout

H100 = find_hardware("h100")
LAYERS = 8
SIZE = scale_models.SIZE
BLOCK_NUMEL = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024 + 2 * 512
NUMEL = LAYERS * BLOCK_NUMEL + 2 * 512 * 1024 + 512


@pytest.fixture(scope="module")
def workload() -> Workload:
    return scale_models.workload(scale_models.traced_decoder(), LAYERS)


@pytest.fixture(scope="module")
def shallow() -> Workload:
    """Quick to plan."""
    return scale_models.workload(scale_models.traced_decoder(), 4)


def estimate(workload: Workload, layout: RankLayout, **changes: object) -> StepEstimate:
    return estimate_step(workload, replace(Setting(H100, layout, "fsdp2"), **changes))  # type: ignore[arg-type]


def test_step_is_forward_backward_and_optimizer(workload: Workload) -> None:
    one, four = (estimate(workload, RankLayout(8), accumulation=count) for count in (1, 4))
    assert one.step_us == pytest.approx(one.forward_us + one.backward_us + one.optimizer_us)
    assert four.step_us == pytest.approx(4 * (one.forward_us + one.backward_us) + one.optimizer_us)
    assert four.exposed_us == pytest.approx(4 * one.exposed_us)
    assert one.tokens_per_s == pytest.approx(1024 / one.step_us * 1e6)
    assert four.tokens_per_s == pytest.approx(4096 / four.step_us * 1e6)


@pytest.mark.parametrize("layout", [RankLayout(1), RankLayout(8), RankLayout(512), RankLayout(8, copies=64)], ids=str)
def test_no_step_is_faster_than_its_lower_bound(workload: Workload, layout: RankLayout) -> None:
    found = estimate(workload, layout)
    assert 0.0 < found.lower_bound_us <= found.step_us * (1 + 1e-9)
    assert 0.0 <= found.exposed_us < found.step_us


def test_searched_plan_is_never_slower_than_fsdp2s(shallow: Workload) -> None:
    searched, fsdp2 = (estimate(shallow, RankLayout(64), plan=plan) for plan in ("auto", "fsdp2"))
    assert searched.step_us <= fsdp2.step_us


def test_memory_of_states_is_that_of_this_ranks_shards(workload: Workload) -> None:
    for shards in (1, 8, 64):
        found = estimate(workload, RankLayout(shards))
        assert found.memory_bytes["parameters"] == 4 * NUMEL // shards
        assert found.memory_bytes["optimizer"] == 8 * NUMEL // shards
        assert found.peak_bytes == sum(found.memory_bytes.values())
    once, twice = (estimate(workload, RankLayout(8, copies=8), accumulation=count) for count in (1, 2))
    assert once.memory_bytes["parameters"] == 4 * NUMEL // 8
    assert twice.memory_bytes["gradients"] == once.memory_bytes["gradients"] + 4 * NUMEL // 8


def test_mfu_counts_six_flops_per_parameter_and_half_of_causal_attention(workload: Workload) -> None:
    found = estimate(workload, RankLayout(8))
    tokens, seq = scale_models.BATCH * scale_models.SEQ, scale_models.SEQ
    multiplied = NUMEL - 512 * 1024 - (2 * LAYERS + 1) * 512  # neither embedding nor norms
    flops = tokens * (6 * multiplied + 6 * LAYERS * 512 * seq)
    assert found.mfu == pytest.approx(flops / (found.step_us * 1e-6 * PEAK_TFLOPS["h100"] * 1e12))
    assert estimate(workload, RankLayout(8), hardware=find_hardware("cpu-gloo")).mfu is None


def test_recomputation_trades_memory_for_time() -> None:
    kept, again = (
        estimate(scale_models.workload(scale_models.traced_decoder(4, how), LAYERS), RankLayout(8))
        for how in ("none", "full")
    )
    assert again.memory_bytes["activations"] < kept.memory_bytes["activations"]
    assert again.backward_us > kept.backward_us
    assert again.mfu is not None
    assert kept.mfu is not None
    assert again.mfu * again.step_us == pytest.approx(kept.mfu * kept.step_us)  # the same FLOPs


def test_a_flat_ring_over_many_ranks_dies_on_latency(workload: Workload) -> None:
    flat, hybrid = (estimate(workload, layout) for layout in (RankLayout(4096), RankLayout(8, copies=512)))
    assert flat.step_us > 2 * hybrid.step_us


def test_tokens_of_a_tensor_parallel_group_count_once() -> None:
    work = scale_models.workload(scale_models.traced_decoder(4, "selective", 2), LAYERS)
    found = estimate(work, RankLayout(4, copies=2, tensor=2))
    assert found.tokens_per_s == pytest.approx(1024 / 2 / found.step_us * 1e6)
    assert found.memory_bytes["parameters"] < 0.6 * 4 * NUMEL / 4


def test_sequence_ranks_share_tokens_and_flops(workload: Workload) -> None:
    whole, half = (estimate(workload, RankLayout(8), sequence_ranks=ranks) for ranks in (1, 2))
    assert half.mfu is not None
    assert whole.mfu is not None
    assert half.mfu * half.step_us == pytest.approx(whole.mfu * whole.step_us / 2)
    assert half.tokens_per_s * half.step_us == pytest.approx(whole.tokens_per_s * whole.step_us / 2)
    assert half.memory_bytes["parameters"] == whole.memory_bytes["parameters"]


def test_budget_holds_for_everything_a_rank_allocates(shallow: Workload) -> None:
    free = estimate(shallow, RankLayout(64), plan="auto")
    held = estimate(shallow, RankLayout(64), plan="auto", budget_bytes=free.peak_bytes)
    assert held.peak_bytes <= free.peak_bytes
    with pytest.raises(BudgetTooSmall, match=r"optimizer and accumulated gradients take \d+.*shard over more ranks"):
        estimate(shallow, RankLayout(64), plan="auto", budget_bytes=10 * 2**20)


def test_optimizer_takes_ten_accesses_of_each_element(workload: Workload) -> None:
    found = estimate(workload, RankLayout(1))
    assert found.optimizer_us == pytest.approx(CostModel(H100).copy_us(10 * 4 * NUMEL))
