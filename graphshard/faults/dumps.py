"""Dumps of faults: one JSON file per rank, which ``graphshard diagnose`` reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from graphshard import env
from graphshard.faults.status import Status, from_json, stacks
from graphshard.files import check_own, make_private, parse_json, read_limited, write_private

MAX_BYTES = 8 * 2**20
MAX_FILES = 8192
_FORMAT = 1
_SUFFIX = ".fault.json"


@dataclass(frozen=True)
class Dump:
    """One file.

    Attributes:
        fault: that it is of, the same for all ranks.
        written: when, in seconds since 1970.
        status: of the rank that wrote it.
        answers: of the others, by rank, if it is of the rank that asked; None for one that did not answer, or
            altogether where the store did not.
        asked: whether the rank that wrote it asked the others.
    """

    fault: str
    written: float
    status: Status
    answers: Mapping[int, Status | None] | None = None
    asked: bool = False


def fault_name(rank: int) -> str:
    """A name for the fault that this rank is the first to see."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-rank{rank}-{os.getpid()}"


def check_folder(folder: Path) -> str:
    """Makes the folder for dumps; what keeps files out of it, if anything does."""
    try:
        _make(folder)
    except OSError as error:
        return str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write into '{folder}'"


def _make(folder: Path) -> None:
    make_private(folder)
    if folder == env.shared_fault_dir():
        check_own(folder)


def write_dump(folder: Path, dump: Dump) -> str:
    """Writes a dump, whole or not at all; says where, or why it could not."""
    answers = None if dump.answers is None else {rank: said and asdict(said) for rank, said in dump.answers.items()}
    contents = {
        "graphshard_fault": _FORMAT,
        "fault": dump.fault,
        "written": dump.written,
        "status": asdict(dump.status),
        "asked": dump.asked,
        "answers": answers,
        "stacks": stacks(),
    }
    path = folder / f"{dump.fault}.{dump.status.rank}{_SUFFIX}"
    try:
        _make(folder)
        write_private(path, json.dumps(contents, indent=1))
    except OSError as error:
        return f"no dump: {error}"
    return f"dump: {path}"


def read_dumps(folder: Path) -> tuple[list[Dump], list[str]]:
    """The dumps in a folder, and one line for each file that is none.

    Raises:
        ValueError: it is no folder, or has too many files.
    """
    if not folder.is_dir():
        raise ValueError(f"diagnose: got '{folder}', want a folder of dumps (GRAPHSHARD_FAULTS)")
    files = sorted(folder.glob(f"*{_SUFFIX}"))
    if len(files) > MAX_FILES:
        raise ValueError(
            f"diagnose: got {len(files)} dumps in '{folder}', want at most {MAX_FILES}; move old ones away"
        )
    found, refused = [], []
    for file in files:
        try:
            found.append(_read(file))
        except (OSError, ValueError) as error:
            said = f"{file.name}: {str(error) or type(error).__name__}"
            refused.append("".join(letter if letter.isprintable() else "?" for letter in said))  # terminals obey
    return found, refused


def _read(file: Path) -> Dump:
    contents = parse_json(read_limited(file, MAX_BYTES, follow=False))
    if not isinstance(contents, dict) or contents.get("graphshard_fault") != _FORMAT:
        raise ValueError(f"got no 'graphshard_fault': {_FORMAT}, want a dump of a fault")
    fault, written, answers = contents.get("fault"), contents.get("written"), contents.get("answers")
    if not isinstance(fault, str) or len(fault) > 200 or not fault.isprintable():
        raise ValueError(f"fault: got {fault!r:.80}, want its name")
    if isinstance(written, bool) or not isinstance(written, (int, float)) or not 0 <= written < 1e12:
        raise ValueError(f"written: got {written!r:.80}, want seconds since 1970")
    if answers is not None and not isinstance(answers, dict):
        raise ValueError(f"answers: got {answers!r:.80}, want an object by rank")
    return Dump(
        fault,
        written,
        from_json(contents.get("status")),
        None
        if answers is None
        else {int(rank): None if said is None else from_json(said) for rank, said in answers.items()},
        contents.get("asked") is True,
    )
