"""Published measurements: predictions stay what the document says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from graphshard.scale import validate
from graphshard.scale.__main__ import BEGIN, END, with_table
from graphshard.scale.models import make_workload
from graphshard.scale.published import CLUSTERS, ROWS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
PINNED = torch.__version__.startswith("2.13.")


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "make_workload", cache(make_workload))
        yield


def documented() -> list[str]:
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()


def test_document_has_every_published_row_within_ten_percent_or_says_why() -> None:
    lines = documented()[2:]
    assert len(lines) == len(ROWS)
    for line, row in zip(lines, ROWS, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:3] == [row.cluster, row.name, f"{row.tokens_per_s:,.0f}"]
        error = float(cells[4].rstrip("%"))
        assert abs(error) <= (10.0 if row.cluster != "nemo" else 25.0), line


def test_document_shows_what_the_command_prints() -> None:
    comparisons = validate.compare(["mosaicml"])
    wanted = [line for line in documented() if line.startswith("| mosaicml")]
    found = validate.table(comparisons).splitlines()[2:]
    if PINNED:
        assert found == wanted, "run: python -m graphshard.scale validate --write docs/scale.md"
    for one in comparisons:
        assert abs(one.error) < (1e-3 if one.row.calibrates else 0.1)
    predicted = [one.predicted.tokens_per_s for one in comparisons]
    assert predicted == sorted(predicted, reverse=True), "more GPUs, fewer tokens per second of each, as published"


def test_document_ranks_rows_as_they_were_measured() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in documented()[2:]]
    for cluster in CLUSTERS:
        numbers = [[float(cell.replace(",", "")) for cell in row[2:4]] for row in rows if row[0] == cluster]
        by_measured, by_predicted = (sorted(numbers, key=lambda pair, i=i: pair[i]) for i in range(2))  # type: ignore[misc]
        assert by_measured == by_predicted, cluster


def test_each_cluster_is_fitted_to_at_most_one_row_of_its_own() -> None:
    for cluster in CLUSTERS:
        rows = [row for row in ROWS if row.cluster == cluster]
        assert rows
        assert sum(row.calibrates for row in rows) == (len(rows) > 1), cluster


def test_fit_finds_the_rate_that_explains_a_row() -> None:
    row = next(row for row in ROWS if row.cluster == "mosaicml")
    workload = validate.make_workload(row.model)
    for wanted in (0.5, 1.3):
        measured = validate.predict(row, workload, wanted).tokens_per_s
        made_up = replace(row, tokens_per_s=measured)
        assert validate.fit_efficiency(made_up, workload) == pytest.approx(wanted, rel=1e-3)
    with pytest.raises(ValueError, match="no rate of matmuls explains"):
        validate.fit_efficiency(replace(row, tokens_per_s=1e9), workload)


def test_table_is_put_between_its_marks() -> None:
    assert with_table(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    with pytest.raises(ValueError, match="has no lines"):
        with_table("a\n", "new\n")


def test_compare_names_the_clusters_it_knows() -> None:
    with pytest.raises(ValueError, match="want some of torchtitan, mosaicml"):
        validate.compare(["none"])
