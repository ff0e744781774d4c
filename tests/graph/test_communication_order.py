"""What the timings of a program belong to: its launches and waits in the order of its graph."""

from __future__ import annotations

from graphshard.reporting.measuring import Timing, communication_order, waits_together
from tests.graph.graphs import lowered_until, toy_forward, toy_weights


def test_every_wait_of_a_coalesced_bucket_is_its_own() -> None:
    lowered = lowered_until(toy_forward(toy_weights(1)).coalescing())
    block, root = "gather:blocks.0", "gather:root"
    assert communication_order(lowered.graph) == (
        ("launch", block), ("wait", block), ("wait", block), ("launch", root), ("wait", root),
    )  # fmt: skip


def test_waits_of_one_bucket_count_together() -> None:
    order = [("launch", "a"), ("launch", "b"), ("wait", "a"), ("wait", "a"), ("wait", "b")]
    spans = [(0.0, 1.0), (2.0, 3.0), (10.0, 14.0), (15.0, 16.0), (20.0, 20.5)]
    assert waits_together(order, spans) == {"a": Timing(0.0, 16.0, 5.0), "b": Timing(2.0, 20.5, 0.5)}
