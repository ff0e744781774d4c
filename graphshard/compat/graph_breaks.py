"""The graph breaks that Dynamo meets, with the user's lines: what it writes about them into a log of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._dynamo.symbolic_convert import graph_break_log
from torch._dynamo.utils import reset_graph_break_dup_checker

# Not the user's code.
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_PLACE = re.compile(r"Graph break in user code at (.*):(\d+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+), in ', re.MULTILINE)
_INSIDE_A_CALL = "Encountered graph break when"
_FOR_DEVELOPERS = ("It may be possible to write Dynamo tracing rules", "File an issue", "Please report an issue")
_IN_LOOP = "Failed to handle graph break gracefully"


@dataclass(frozen=True)
class GraphBreak:
    """One break.

    Attributes:
        file, line: of the code that broke it, outside torch; neither: the called module is torch's own.
        reason: a line of Dynamo's.
        explanation: another, ``""`` if it has none.
        hint: what Dynamo recommends, ``""`` if nothing.
        leaves_frame: whether the whole function runs in eager, as around a break in a loop.
    """

    file: str
    line: int
    reason: str
    explanation: str
    hint: str
    leaves_frame: bool


@contextmanager
def recorded_graph_breaks() -> Iterator[list[GraphBreak]]:
    """Inside, what Dynamo says of graph breaks in new traces is listed, and printed nowhere."""
    found: list[GraphBreak] = []
    recorder = _Recorder(found)
    level, propagates, handlers = graph_break_log.level, graph_break_log.propagate, graph_break_log.handlers
    reset_graph_break_dup_checker()  # it says each break once in a process
    graph_break_log.setLevel(logging.DEBUG)
    graph_break_log.propagate, graph_break_log.handlers = False, [recorder]
    try:
        yield found
    finally:
        graph_break_log.propagate, graph_break_log.handlers = propagates, handlers
        graph_break_log.setLevel(level)


class _Recorder(logging.Handler):
    def __init__(self, found: list[GraphBreak]) -> None:
        super().__init__(logging.DEBUG)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        reset_graph_break_dup_checker()  # a break may be met twice, the second time in a loop
        if (said := parsed(record.getMessage())) is None:
            return
        for at, known in enumerate(self._found):
            if (known.file, known.line) == (said.file, said.line):  # once more, now with the function around it
                self._found[at] = replace(known, leaves_frame=known.leaves_frame or said.leaves_frame)
                return
        self._found.append(said)


def parsed(text: str) -> GraphBreak | None:
    """What Dynamo's text about a break says; None: it is about something else."""
    if (place := _PLACE.search(text)) is None:
        return None
    file, line = place[1], int(place[2])
    _, _, stack = text.partition("User code traceback:")
    if file.startswith(_LIBRARIES):
        frames = [(name, int(number)) for name, number in _FRAME.findall(stack) if not name.startswith(_LIBRARIES)]
        file, line = frames[-1] if frames else ("", 0)
    _, _, reason = text.partition("Graph Break Reason: ")
    in_loop = reason.startswith(_IN_LOOP)
    if in_loop:  # what broke comes behind a blank line, then that it did so in a loop
        reason = reason.partition("\n\n")[2].partition("\n***")[0]
    lines = [part.strip() for part in reason.split("\n") if part.strip()]
    if lines and lines[0].startswith(_INSIDE_A_CALL):  # behind it comes what broke in there
        del lines[0]
    said = {key: value for key, colon, value in (part.partition(": ") for part in lines[:12]) if colon}
    return GraphBreak(
        file, line, lines[0] if lines else "", said.get("Explanation", ""), _told(said.get("Hint", "")), in_loop
    )


def _told(hint: str) -> str:
    """A hint, but for those to torch's own developers."""
    return "" if hint.startswith(_FOR_DEVELOPERS) else hint
