"""A plan as text: canonical JSON, so that equal plans are equal bytes, with one row on a line, so that they can be read
and diffed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphshard.files import parse_json, read_limited
from graphshard.plan_file.contents import Plan
from graphshard.plan_file.decoding import decode
from graphshard.plan_file.soundness import check_format, check_sound

_WIDTH = 120
# Of a file: the plans of thousands of programs.
MAX_BYTES = 64 * 2**20


def plan_text(plan: Plan) -> str:
    """The content of a file: keys sorted, one line for each row of numbers and texts."""
    return "\n".join(_lines(asdict(plan), "", "")) + "\n"


def _lines(value: Any, indent: str, before: str) -> Iterator[str]:
    """`value` behind `before`: in one line, unless it holds lists or is a list too long for one."""
    line = f"{indent}{before}{json.dumps(value, sort_keys=True, allow_nan=False)}"
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    holds_rows = any(isinstance(item, (dict, list, tuple)) for item in inner)
    if not inner or not (holds_rows or (not isinstance(value, dict) and len(line) > _WIDTH)):
        yield line
        return
    if isinstance(value, dict):
        opening, closing = "{}"
        entries = [(f"{json.dumps(name)}: ", value[name]) for name in sorted(value)]
    else:
        opening, closing = "[]"
        entries = [("", item) for item in value]
    yield f"{indent}{before}{opening}"
    for number, (name, item) in enumerate(entries, 1):
        *lines, last = _lines(item, indent + " ", name)
        yield from lines
        yield last + ("," if number < len(entries) else "")
    yield indent + closing


def plan_digest(plan: Plan) -> str:
    """A short hash of all of it."""
    return hashlib.sha256(plan_text(plan).encode()).hexdigest()[:16]


def parse_plan(text: str) -> Plan:
    """The plan of a text.

    Raises:
        ValueError: it is no JSON, of another version, a field is missing, unknown or of another type, or it
            contradicts itself; says where.
    """
    content = parse_json(text, finite=False)
    check_format(content)
    plan: Plan = decode(Plan, content)
    check_sound(plan)
    return plan


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads what `graphshard.save_plan` wrote.

    Args:
        path: of a file, the same on every rank.

    Raises:
        TypeError: `path` is none.
        ValueError: the file cannot be read or is no sound plan; says where in it, what is there and what is wanted.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_plan: path: got {type(path).__name__}, want the path of a plan file")
    where = f"plan file {os.fspath(path)}"
    try:
        return parse_plan(read_limited(Path(path), MAX_BYTES).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror or error}; want a file that graphshard.save_plan wrote") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: got no UTF-8 ({error}); want a file that graphshard.save_plan wrote") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}; correct it, or plan anew with plan='auto' and save") from error


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan file: readers see all of it or what was there before.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"plan file {target}: got a folder that is not there, {target.parent}; make it first")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(plan_text(plan), encoding="utf-8", newline="\n")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
