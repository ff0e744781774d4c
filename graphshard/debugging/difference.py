"""What a pass has changed of a graph, line by line; each line of all graphs is kept once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

# Unchanged lines that are shown around a change.
AROUND = 3


class Change(NamedTuple):
    """A line, or unchanged lines that are folded.

    Attributes:
        kind: ``"same"``, ``"removed"``, ``"added"``; ``"left"`` and ``"came"`` where the same line has another place;
            ``"folded"``.
        text: of the line; of folded ones empty.
        first, last: of folded ones, their range in the new graph, the last one excluded.
    """

    kind: str
    text: str = ""
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class Difference:
    """All changes, in order, and how many lines were removed, added and moved."""

    changes: tuple[Change, ...]
    removed: int
    added: int
    moved: int


def difference(old: Sequence[str], new: Sequence[str]) -> Difference:
    """What has become of lines.

    Args:
        old: lines of the graph before.
        new: the same behind.
    """
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    gone = Counter(line for tag, i, j, _, _ in blocks if tag != "equal" for line in old[i:j])
    come = Counter(line for tag, _, _, i, j in blocks if tag != "equal" for line in new[i:j])
    moved = gone & come
    changes: list[Change] = []
    left, came = moved.copy(), moved.copy()

    def told(lines: Sequence[str], still: Counter[str], kinds: tuple[str, str]) -> None:
        for line in lines:
            is_moved = still[line] > 0
            still[line] -= is_moved
            changes.append(Change(kinds[is_moved], line))

    for number, (tag, old_first, old_last, first, last) in enumerate(blocks):
        if tag != "equal":
            told(old[old_first:old_last], left, ("removed", "left"))
            told(new[first:last], came, ("added", "came"))
            continue
        fold_first = first + AROUND * (number > 0)
        fold_last = last - AROUND * (number < len(blocks) - 1)
        if fold_last - fold_first < 2:  # no shorter than what is folded
            fold_first = fold_last = last
        changes += [Change("same", line) for line in new[first:fold_first]]
        if fold_last > fold_first:
            changes.append(Change("folded", "", fold_first, fold_last))
        changes += [Change("same", line) for line in new[fold_last:last]]
    moves = moved.total()
    return Difference(tuple(changes), gone.total() - moves, come.total() - moves, moves)


class Lines:
    """The lines of many graphs that resemble each other, each once: folded ones are found there."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._graphs: list[list[int]] = []

    def add(self, lines: Sequence[str]) -> int:
        """Adds a graph; returns its number."""
        runs: list[int] = []  # first line, how many, first line, how many, ...
        for line in lines:
            number = self._numbers.setdefault(line, len(self._numbers))
            if runs and runs[-2] + runs[-1] == number:
                runs[-1] += 1
            else:
                runs += [number, 1]
        self._graphs.append(runs)
        return len(self._graphs) - 1

    def json(self) -> str:
        """For a script inside a page: nothing in it ends the element that it stands in."""
        text = json.dumps({"lines": list(self._numbers), "graphs": self._graphs})
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
