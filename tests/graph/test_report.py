"""What a report says."""

from __future__ import annotations

from graphshard.reporting.report import Report, by_place


def test_counts_of_equal_blocks_are_one_number() -> None:
    counts = {"layers.0.mlp.weight": 2, "layers.1.mlp.weight": 3, "layers.0.bias": 1, "norm2.weight": 1}
    assert by_place(counts) == {"layers.*.mlp.weight": 5, "layers.0.bias": 1, "norm2.weight": 1}


def test_reads_outside_graphs_are_said_by_place() -> None:
    report = Report()
    report.eager_unshards.update({f"layers.{layer}.weight": 4 for layer in range(100)})
    assert "read outside graphs: {'layers.*.weight': 400}" in str(report)
