"""What `graphshard.compile` plans with."""

from __future__ import annotations

from graphshard.planning.options import make_planning


def test_a_share_of_less_than_a_byte_is_a_budget() -> None:
    assert make_planning("auto", 1e-12, None, "cpu", False, True).budget_bytes == 1
