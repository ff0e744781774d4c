"""Which launch or wait a frame of a program stands at.

A program runs as generated Python: the n-th launch or wait in its source is the n-th of its graph
(`ProgramRecord.order`).
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Container, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

from graphshard.graph.ir import LAUNCHES, WAIT
from graphshard.reporting.report import NamedShard, ProgramRecord

_LAUNCHES = {target.overloadpacket.__name__ for target in LAUNCHES}
_WAIT = WAIT.overloadpacket.__name__
_CALLS_OPERATOR = {type(WAIT).__call__.__code__}
_NAMESPACES = ("_c10d_functional", "graphshard")


class SourceCall(NamedTuple):
    """One launch or wait in a source: ``"launch"`` or ``"wait"``, and its lines, from 1."""

    what: str
    first_line: int
    last_line: int


class Place(NamedTuple):
    """One launch or wait of a program.

    Attributes:
        position: in the program's order, from 0; -1: unknown.
        what: ``"launch"`` or ``"wait"``; empty: unknown.
        bucket: its name; empty: unknown.
        fqns: of the parameters in it; none for a collective of the model's own.
        group: process group; empty: unknown.
    """

    position: int
    what: str
    bucket: str
    fqns: tuple[str, ...]
    group: str


class Frame(NamedTuple):
    """A frame of a running thread or of a traceback.

    Attributes:
        code: that runs.
        line: it stands at.
        names: its globals.
        operator: that it calls, if it is torch's frame around one.
    """

    code: CodeType
    line: int
    names: dict[str, Any]
    operator: str = ""


@lru_cache(maxsize=32)
def communication_calls(source: str) -> tuple[SourceCall, ...]:
    """The launches and waits of a source in the order in which they run; none where it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (what := _communication(node.func)):
            last = (node.end_lineno or node.lineno, node.end_col_offset or 0)
            found.append((last, SourceCall(what, node.lineno, last[0])))
    # By their ends: an argument runs before the call that takes it.
    return tuple(call for _, call in sorted(found))


def _communication(function: ast.expr) -> str:
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.insert(0, function.attr)
        function = function.value
    for namespace, operator in pairwise(names):
        if namespace in _NAMESPACES:
            if operator == _WAIT:
                return "wait"
            # Inductor writes some into buffers of their own, or in place.
            if {operator, operator.removesuffix("_out"), operator.removesuffix("_")} & _LAUNCHES:
                return "launch"
    return ""


def index_in_order(frames: Iterable[Frame], order: Sequence[tuple[str, str]]) -> int | None:
    """The index in a program's order of the launch or wait that one of the frames stands at.

    Args:
        frames: innermost first.
        order: of the program, or of a program that runs in two halves.

    Returns:
        None where no frame is in source of the program; -1 where one is, but at no launch or wait.
    """
    kinds = [what for what, _ in order]
    for code, line, names, _ in frames:
        source = "".join(linecache.getlines(code.co_filename, names))
        if not any(f"{namespace}." in source for namespace in _NAMESPACES):
            continue
        calls = communication_calls(source)
        found = [call.what for call in calls]
        if not found:
            continue
        # The second half of a program begins with a wait, the first one ends before any.
        offset = 0 if found == kinds[: len(found)] else len(kinds) - len(found)
        if found != kinds[offset : offset + len(found)]:
            continue
        standing = (i for i, call in enumerate(calls) if call.first_line <= line <= call.last_line)
        at = next(standing, None)
        return -1 if at is None else offset + at
    return None


def place_of(frames: Sequence[Frame], record: ProgramRecord, shards: Sequence[NamedShard]) -> Place | None:
    """The launch or wait of a program that frames stand at, innermost first; None: at none, as far as one can tell."""
    index = index_in_order(frames, record.order)
    if index == -1:
        return None
    what = ""
    if index is not None:
        what, at = record.order[index][0], index
    elif not any(frame.operator.startswith("_c10d_functional.") for frame in frames):
        return None
    elif len({bucket for _, bucket in record.order}) == 1:
        at = 0
    else:
        return Place(-1, "", "", (), "")
    bucket, fqns = record.carried_for(at, shards)
    return Place(-1 if index is None else index, what, bucket, fqns, record.carried[at][0])


def frames_of(frame: FrameType | None, until: Container[CodeType]) -> list[Frame]:
    """Frames of a running thread inside a call of one of `until`, innermost first; none if it is inside none."""
    found: list[Frame] = []
    while frame is not None:
        if frame.f_code in until:
            return found
        found.append(_frame(frame, frame.f_lineno))
        frame = frame.f_back
    return []


def frames_of_error(error: BaseException) -> list[Frame]:
    """Frames of an error's traceback, innermost first."""
    return [_frame(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]


def _frame(frame: FrameType, line: int) -> Frame:
    operator = frame.f_locals.get("self") if frame.f_code in _CALLS_OPERATOR else None
    return Frame(frame.f_code, line, frame.f_globals, "" if operator is None else str(operator))
