"""Deliberate breaks are still there to be made: `make mutants`, which makes them, is not part of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.breaks import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.says)
def test_break_is_made_at_one_place_that_named_tests_notice(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.broken(source) != source
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutation.tests if test.startswith("tests/"))
