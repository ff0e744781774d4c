"""Residency of gathered units, accumulation of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import stack

from graphshard.planner import (
    BudgetTooSmall,
    Problem,
    accumulation_choice,
    best_schedule,
    choose_residency,
    fsdp2_schedule,
    simulate,
    with_residency,
)
from graphshard.planner.search import COMPARISON_TRIALS

PAIR = stack(3, op_us=30.0), stack(3, backward=True, op_us=30.0)


def peak(problem: Problem) -> int:
    return simulate(problem, fsdp2_schedule(problem)).peak_bytes


def test_residency_holds_bytes_up_to_the_last_use_in_backward() -> None:
    forward, backward = with_residency(*PAIR, frozenset({"l1"}))
    assert {g.fqn for g in forward.gathers if g.last_use == len(forward.ops)} == {"l1.norm", "l1.up", "l1.down"}
    assert {g.fqn for g in PAIR[1].gathers} - {g.fqn for g in backward.gathers} == {"l1.norm", "l1.up", "l1.down"}
    more = [a - b for a, b in zip(backward.op_bytes, PAIR[1].op_bytes, strict=True)]
    last_use = {g.fqn: g.last_use for g in PAIR[1].gathers}
    assert more[0] == 2210
    assert more[last_use["l1.down"]] == 2210
    assert more[last_use["l1.norm"]] == 10
    assert more[last_use["l1.norm"] + 1] == 0


def test_residency_of_no_unit_changes_nothing() -> None:
    assert with_residency(*PAIR, frozenset()) == PAIR


def test_choose_residency_makes_the_step_faster_within_the_budget() -> None:
    budget = max(map(peak, PAIR)) + 1000
    kept = choose_residency(*PAIR, budget)
    pairs = with_residency(*PAIR, kept), PAIR
    kept_us, all_us = (sum(best_schedule(p, budget).simulation.step_us for p in pair) for pair in pairs)
    assert kept
    assert kept_us < all_us * 0.999


def test_choose_residency_takes_nothing_that_does_not_fit() -> None:
    forward, backward = PAIR
    full = tuple(20000 - num_bytes for num_bytes in forward.op_bytes)
    forward = replace(forward, op_bytes=(*full[:-1], 20000))
    assert choose_residency(forward, backward, 20000 + peak(replace(forward, op_bytes=(0,) * len(full))) // 4) <= {""}


@pytest.mark.parametrize("op_us", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("more_bytes", [1000, 3000, 20000])
def test_no_fewer_of_the_units_that_may_stay_are_faster(op_us: float, more_bytes: int) -> None:
    forward, backward = stack(5, op_us=op_us), stack(5, backward=True, op_us=op_us)
    budget = max(peak(forward), peak(backward)) + more_bytes
    kept = choose_residency(forward, backward, budget)

    def step_us(units: frozenset[str]) -> float:
        pair = with_residency(forward, backward, units)
        return sum(best_schedule(problem, budget, trials=COMPARISON_TRIALS).simulation.step_us for problem in pair)

    for count in (0, 1, 2):
        fewer = frozenset(f"l{4 - i}" for i in range(count))
        assert step_us(kept) <= step_us(fewer) * 1.001


def test_choose_residency_takes_the_last_units_of_forward_first() -> None:
    forward, backward = (replace(p, op_bytes=(0,) * len(p.ops)) for p in PAIR)
    budget = max(peak(forward), peak(backward)) + 2000
    kept = choose_residency(forward, backward, budget)
    assert "l0" not in kept or {"l1", "l2"} <= kept


def test_accumulation_reduces_once_with_room_and_each_time_without() -> None:
    backward = stack(3, backward=True, op_us=30.0)
    roomy = accumulation_choice(backward, 4, 10**6)
    assert not roomy.reduce_each
    assert roomy.once_us < roomy.each_us
    tight = accumulation_choice(backward, 4, peak(backward))
    assert tight.reduce_each
    assert "do not fit" in tight.why


def test_accumulation_refuses_what_cannot_be() -> None:
    backward = stack(1, backward=True)
    with pytest.raises(ValueError, match="micro_batches: got 0"):
        accumulation_choice(backward, 0, 10**6)
    with pytest.raises(BudgetTooSmall):
        accumulation_choice(backward, 2, 10)
