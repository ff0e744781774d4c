"""JSON that anyone may have written."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

# Of one number: 64 bits, or a float of Python's.
_MAX_DIGITS = 40
_MAX_DEPTH = 100
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NESTS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


def read_limited(path: Path, max_bytes: int, follow: bool = True) -> bytes:
    """The content of a file.

    Args:
        path: whose last part names the file.
        max_bytes: most that is read.
        follow: whether it may be a link.

    Raises:
        OSError: it cannot be read, or is a link where it may not be one.
        ValueError: it is no regular file (a pipe would be waited for), or larger.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("got no regular file, want one")
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"got more than {max_bytes} bytes, want at most so many")
    return content


def parse_json(text: str | bytes, finite: bool = True) -> Any:
    """The value of a JSON text: no name twice in one object, no NaN or infinity, no number of more than 40 characters,
    no more than 100 lists or objects in each other, and only characters that can be written.

    Args:
        text: in UTF-8.
        finite: False: NaN and infinity are left to who reads the value, and says where they are.

    Raises:
        ValueError: it is no such text; says where.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # an error of it is a ValueError
    depth = 0
    for found in _NESTS.finditer(text):
        if found[0] in "[{":
            depth += 1
        elif found[0] in "]}":
            depth -= 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"got more than {_MAX_DEPTH} lists or objects in each other")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float if finite else _any_float,
            parse_constant=_constant if finite else float,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}: got no JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("got no JSON (too many lists or objects in each other)") from error
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # half a character: an error that is a ValueError
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name:.60}: got it twice in one object, want it once")
        found[name] = value
    return found


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"got a number of {len(digits)} digits, want at most {_MAX_DIGITS}")
    return int(digits)


def _any_float(digits: str) -> float:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"got the number {digits:.40}..., want one of at most {_MAX_DIGITS} characters")
    return float(digits)


def _float(digits: str) -> float:
    if not math.isfinite(value := _any_float(digits)):
        raise ValueError(f"got the number {digits}, want one that is finite")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"got {name}, want a number")
