"""What one rank says of itself when it is asked: small, and JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args

import torch

from graphshard.faults.activity import ENTRIES, Activity, program_name
from graphshard.faults.place import Place

Doing = Literal["collective", "program", "compiles", "failed", "outside"]

MAX_FQNS = 8
_MAX_TEXT = 4096
_MAX_ITEMS = 100_000
_OTHERS_CODE = tuple(
    f"{Path(folder)}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        Path(torch.__file__).parent,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    )
)


@dataclass(frozen=True)
class Status:
    """What one rank is doing.

    Attributes:
        rank: in the world.
        host: its name.
        pid: of the process.
        calls: how many programs have begun to run.
        doing: ``"collective"``: stands at a launch or wait; ``"program"``: runs one, but stands at none;
            ``"compiles"``; ``"failed"``: a collective failed; ``"outside"``: of graphshard.
        where: the user's own line, such as ``train.py:31``.
        program: in words, of the program that runs.
        what: ``"launch"`` or ``"wait"``; empty: unknown.
        index: of the launch or wait in its program, from 0; -1: unknown.
        bucket: of the launch or wait; empty: unknown.
        fqns: parameters in it, the first `MAX_FQNS`.
        parameters: how many parameters are in it.
        ranks: of its process group.
        seconds: that it has done this for; 0 where nobody measured.
        text: what is compiled, or the sentence of a failure.
        recent: (number, program with its flags) of the last runs.
    """

    rank: int
    host: str
    pid: int
    calls: int
    doing: Doing
    where: str = ""
    program: str = ""
    what: str = ""
    index: int = -1
    bucket: str = ""
    fqns: tuple[str, ...] = ()
    parameters: int = 0
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    text: str = ""
    recent: tuple[tuple[int, str], ...] = ()


def status_of(
    rank: int,
    activity: Activity,
    place: Place | None,
    ranks: tuple[int, ...] = (),
    seconds: float = 0.0,
    text: str = "",
    failed: bool = False,
) -> Status:
    """What this process is doing, read from its activity.

    Args:
        rank: of this process.
        activity: of this process.
        place: the launch or wait that it stands at; None: at none.
        ranks: of the process group of that.
        seconds: it has stood there.
        text: what it traces, while it has nothing else to say of a compilation.
        failed: whether the collective at `place` has failed.
    """
    run, compiling = activity.run, activity.compiling
    doing: Doing = "outside"
    where, program, known = user_line(), "", text
    if run is not None:
        doing = "failed" if failed else "program" if place is None else "collective"
        program = program_name(run.model, run.record)
    elif compiling is not None:
        doing, known, seconds = "compiles", compiling[0], time.monotonic() - compiling[1]
    elif text:
        doing = "compiles"
    elif activity.failure[0] == activity.calls and activity.failure[1]:
        doing, known = "failed", activity.failure[1]
    recent = sorted((found for found in list(activity.recent) if found is not None), key=lambda found: found[0])
    place = place or Place(-1, "", "", (), "")
    return Status(
        rank,
        socket.gethostname(),
        os.getpid(),
        activity.calls,
        doing,
        where,
        program,
        place.what,
        place.position,
        place.bucket,
        place.fqns[:MAX_FQNS],
        len(place.fqns),
        ranks,
        seconds,
        known[:_MAX_TEXT],
        tuple((number, f"{program_name(model, record)} [{record.flags}]") for number, model, record in recent),
    )


def user_line() -> str:
    """The innermost line of the main thread that is the user's own, such as ``train.py:31``; else the innermost."""
    frame = inner = main_frame()
    while inner is not None:
        if inner.f_code in ENTRIES:  # what is inside is a program, wherever its code lies
            frame = inner.f_back
        inner = inner.f_back
    own, innermost = frame, frame
    while own is not None and not _is_users(own.f_code.co_filename):
        own = own.f_back
    shown = own or innermost
    return "" if shown is None else f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno}"


def main_frame() -> FrameType | None:
    """Where the main thread stands."""
    return sys._current_frames().get(threading.main_thread().ident or -1)  # noqa: SLF001 the one way there is


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_OTHERS_CODE))


def stacks() -> dict[str, str]:
    """The Python stack of each thread, by its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()  # noqa: SLF001 the one way there is
    return {
        f"{names.get(ident, 'unknown')} ({ident})": "".join(traceback.format_stack(frame)) for ident, frame in frames
    }


def to_json(status: Status) -> str:
    """The status as text."""
    return json.dumps(asdict(status))


def from_json(value: object) -> Status:
    """The status in parsed JSON, which anyone may have written.

    Raises:
        ValueError: it is not that of a rank.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"status: got {type(value).__name__}, want an object")
    given = {}
    for entry in fields(Status):
        if entry.name not in value:
            raise ValueError(f"status: got no {entry.name!r}, want one")
        given[entry.name] = _READERS[str(entry.type)](entry.name, value[entry.name])
    return Status(**given)


def _refused(name: str, got: object, want: str) -> ValueError:
    return ValueError(f"status: {name}: got {got!r:.80}, want {want}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise _refused(name, value, f"text of at most {_MAX_TEXT} characters")
    # A terminal obeys control characters.
    return "".join(letter if letter.isprintable() else "?" for letter in value)


def _number(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise _refused(name, value, "an integer")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise _refused(name, value, "seconds")
    return float(value)


def _doing(name: str, value: object) -> Any:
    if value not in get_args(Doing):
        raise _refused(name, value, f"one of {', '.join(get_args(Doing))}")
    return value


def _items(name: str, value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_ITEMS:
        raise _refused(name, value, f"a list of at most {_MAX_ITEMS} items")
    return list(value)


def _recent(name: str, value: object) -> tuple[int, str]:
    pair = _items(name, value)
    if len(pair) != 2:
        raise _refused(name, value, "a number and a program")
    return _number(name, pair[0]), _text(name, pair[1])


_READERS: dict[str, Any] = {
    "int": _number,
    "str": _text,
    "float": _seconds,
    "Doing": _doing,
    "tuple[str, ...]": lambda name, value: tuple(_text(name, item) for item in _items(name, value)),
    "tuple[int, ...]": lambda name, value: tuple(_number(name, item) for item in _items(name, value)),
    "tuple[tuple[int, str], ...]": lambda name, value: tuple(_recent(name, item) for item in _items(name, value)),
}
