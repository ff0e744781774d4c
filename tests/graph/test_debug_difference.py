"""What a pass has changed, line by line: all of it, nothing else, and each line once."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from graphshard.debugging.difference import Change, Lines, difference

LINES = st.lists(st.sampled_from("abcdefgh"), max_size=40)


def unfolded(changes: tuple[Change, ...], new: list[str], kinds: set[str]) -> list[str]:
    """The lines of some kinds, with what is folded."""
    found: list[str] = []
    for change in changes:
        if change.kind == "folded":
            found += new[change.first : change.last]
        elif change.kind in kinds:
            found.append(change.text)
    return found


@given(LINES, LINES)
def test_changes_make_both_graphs(old: list[str], new: list[str]) -> None:
    found = difference(old, new)
    assert unfolded(found.changes, new, {"same", "removed", "left"}) == old
    assert unfolded(found.changes, new, {"same", "added", "came"}) == new
    kinds = [change.kind for change in found.changes]
    assert (kinds.count("removed"), kinds.count("added")) == (found.removed, found.added)
    assert kinds.count("left") == kinds.count("came") == found.moved


@given(LINES, LINES)
def test_no_line_is_both_removed_and_added(old: list[str], new: list[str]) -> None:
    changes = difference(old, new).changes
    removed, added = ({change.text for change in changes if change.kind == kind} for kind in ("removed", "added"))
    assert not removed & added


def test_what_is_unchanged_is_folded_but_for_its_ends() -> None:
    old = [f"%{i}" for i in range(100)]
    new = [*old[:50], "%new", *old[50:]]
    kinds = [change.kind for change in difference(old, new).changes]
    assert kinds == ["folded", *["same"] * 3, "added", *["same"] * 3, "folded"]
    assert [change.last - change.first for change in difference(old, new).changes if change.kind == "folded"] == [
        47,
        47,
    ]
    assert [change.kind for change in difference(old, old).changes] == ["folded"]


def test_moved_lines_are_told_from_changed_ones() -> None:
    old = ["%a", "%launch", "%b", "%c", "%d"]
    found = difference(old, ["%a", "%b", "%c", "%launch", "%d"])
    assert (found.removed, found.added, found.moved) == (0, 0, 1)
    assert {change.text for change in found.changes if change.kind in ("left", "came")} == {"%launch"}


@given(st.lists(LINES, max_size=5))
def test_lines_of_graphs_are_kept_once_and_found_again(graphs: list[list[str]]) -> None:
    lines = Lines()
    assert [lines.add(graph) for graph in graphs] == list(range(len(graphs)))
    found = json.loads(lines.json())
    assert len(found["lines"]) == len(set(found["lines"]))
    for graph, runs in zip(graphs, found["graphs"], strict=True):
        pairs = zip(runs[::2], runs[1::2], strict=True)
        assert [line for first, count in pairs for line in found["lines"][first : first + count]] == graph


def test_nothing_in_the_lines_ends_the_script_that_they_stand_in() -> None:
    lines = Lines()
    evil = "</script><!--<script>&amp;"
    lines.add([evil])
    assert not set("<>&") & set(lines.json()) and json.loads(lines.json())["lines"] == [evil]
