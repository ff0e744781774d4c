"""Collectives cost alpha plus bytes over the bandwidth of their topology."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.cost import HARDWARE, GroupShape, collective_alpha_beta, collective_us, group_shape
from graphshard.cost.rates import KINDS

MAX_BYTES = 2**40
hardware = st.sampled_from(sorted(HARDWARE)).map(HARDWARE.__getitem__)
kinds = st.sampled_from(KINDS)
sizes = st.integers(0, MAX_BYTES)
shapes = st.tuples(st.integers(1, 64), st.integers(1, 8)).map(lambda pair: GroupShape(pair[0] * pair[1], pair[0]))


@given(hardware, kinds, sizes, shapes)
def test_collective_costs_are_finite_and_above_their_lower_bound(machine, kind, num_bytes, shape) -> None:
    took_us = collective_us(machine, kind, num_bytes, shape)
    alpha_us, us_per_byte = collective_alpha_beta(machine, kind, shape)
    assert math.isfinite(took_us)
    assert took_us >= (alpha_us + num_bytes * us_per_byte) * (1 - 1e-9)
    assert (took_us == 0.0) == (shape.ranks == 1)


@given(hardware, kinds, sizes, sizes, shapes)
def test_collective_costs_grow_with_bytes_and_merging_never_costs_more(machine, kind, one, other, shape) -> None:
    small, large = sorted((one, other))
    first, second = (collective_us(machine, kind, size, shape) for size in (small, large))
    assert first <= second
    assert collective_us(machine, kind, small + large, shape) <= (first + second) * (1 + 1e-9)


@given(hardware, st.sampled_from(["all_gather", "reduce_scatter"]), sizes, st.integers(1, 7))
def test_collective_costs_grow_with_ranks_in_a_node(machine, kind, num_bytes, ranks) -> None:
    fewer, more = (collective_us(machine, kind, num_bytes, GroupShape(count, 1)) for count in (ranks, ranks + 1))
    assert fewer < more


@given(hardware, kinds, sizes, st.integers(2, 100))
def test_collective_costs_grow_with_nodes(machine, kind, num_bytes, nodes) -> None:
    fewer, more = (
        collective_us(machine, kind, num_bytes, GroupShape(8 * count, count)) for count in (nodes, 2 * nodes)
    )
    assert fewer < more


def test_all_gather_of_a_gigabyte_on_one_node_takes_what_was_measured() -> None:
    assert 2400 < collective_us(HARDWARE["h100"], "all_gather", 10**9, GroupShape(8, 1)) < 2900
    assert collective_us(HARDWARE["h100"], "all_gather", 2**20, GroupShape(8, 1)) == pytest.approx(17, rel=0.1)
    assert collective_us(HARDWARE["h100"], "all_gather", 2**24, GroupShape(8, 1)) == pytest.approx(70, rel=0.1)


def test_all_reduce_costs_twice_a_reduce_scatter() -> None:
    for name in ("h100", "h200", "b200", "a100"):
        once, twice = (
            collective_us(HARDWARE[name], kind, 2**32, GroupShape(8, 1)) for kind in ("reduce_scatter", "all_reduce")
        )
        assert twice == pytest.approx(2 * once, rel=0.05)


def test_bandwidth_across_nodes_is_that_of_all_their_nics() -> None:
    def gb_s(shape: GroupShape) -> float:
        return (
            1e-3 / collective_alpha_beta(HARDWARE["h200"], "all_reduce", shape)[1] * 2 * (shape.ranks - 1) / shape.ranks
        )

    assert gb_s(GroupShape(32, 4)) == pytest.approx(365, rel=0.03)  # measured on 4 x 8 H200
    assert gb_s(GroupShape(4, 4)) == pytest.approx(50, rel=0.03)  # one rank of each node: one NIC


def test_flat_ring_over_thousands_of_ranks_dies_on_latency() -> None:
    layer_bytes = 2 * 3_187_700_000  # a block of Llama 3 405B in bfloat16
    flat, hybrid = (
        collective_us(HARDWARE["h100"], "all_gather", layer_bytes, GroupShape(ranks, ranks // 8))
        for ranks in (16384, 64)
    )
    assert flat > 4 * hybrid
    assert flat < 200_000
    # One rank per node: the library has an algorithm with fewer steps.
    ring_us = 8.4 + 2047 * 14
    assert collective_us(HARDWARE["h100"], "all_gather", 0, GroupShape(2048, 2048)) < ring_us / 4


def test_group_shape_counts_nodes() -> None:
    assert group_shape(range(8), 8) == GroupShape(8, 1)
    assert group_shape(range(0, 64, 8), 8) == GroupShape(8, 8)
    assert group_shape([9, 3, 8, 2], 8) == GroupShape(4, 2)


@pytest.mark.parametrize("ranks", [[], [1, 1], [-1]])
def test_group_shape_refuses_what_is_no_group(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="group_shape: ranks: got"):
        group_shape(ranks, 8)
    with pytest.raises(ValueError, match="ranks_per_node: got 0"):
        group_shape([0], 0)


def test_collective_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"kind: got 'gather', want one of all_gather"):
        collective_us(HARDWARE["h100"], "gather", 1, GroupShape(2, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_bytes: got -1"):
        collective_us(HARDWARE["h100"], "all_gather", -1, GroupShape(2, 1))
    with pytest.raises(ValueError, match="2 ranks on 3 nodes"):
        GroupShape(2, 3)
