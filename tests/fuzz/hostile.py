"""Hostile files: valid ones with parts replaced, lost, moved or repeated, and bytes that are no JSON at all."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NAMES = (
    "",
    "../../etc/passwd",
    "/dev/zero",
    "a\x00b",
    "\x1b[2J",
    "</script><img src=x onerror=alert(1)>",
    "\u2028",
    "x" * 5000,
)
NUMBERS = (0, 1, -1, 2, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**50, 0.5, -0.0, 1e308, float("inf"), float("nan"))
VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, *NAMES, *NUMBERS)
# Texts that no value is written as.
TEXTS = (
    b"", b"\xff\xfe", b"\xef\xbb\xbf{}", b"null", b"{", b'{"a": 1, "a": 2}', b"[" * 100_000, b"[" * 90 + b"]" * 90,
    b'{"a":' * 5000,
    b"9" * 5000, b"1e999", b"-", b'"\\ud800"', b'"\xed\xa0\x80"', b"\x00" * 100, b"[1,]", b"NaN",
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to all parts of a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in places(item, (*at, key)))]


def _part(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """A valid value with one to three changes."""
    found = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        ways = places(found)
        place = ways[draw(st.integers(0, len(ways) - 1))]
        if not place:
            found = copy.deepcopy(draw(st.sampled_from(VALUES))) if draw(st.integers(0, 9)) == 0 else found
            continue
        owner, key = _part(found, place[:-1]), place[-1]
        match draw(st.sampled_from(("replace", "lose", "move", "repeat", "rename"))):
            case "replace":
                owner[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
            case "lose":
                del owner[key]
            case "move":
                owner[key] = copy.deepcopy(_part(found, ways[draw(st.integers(0, len(ways) - 1))]))
            case "repeat" if isinstance(owner, list):
                owner.insert(key, copy.deepcopy(owner[key]))
            case _ if isinstance(owner, dict):
                owner[draw(st.sampled_from((*NAMES, *owner)))] = owner.pop(key)
            case _:
                owner.reverse()
    return found


@st.composite
def files(draw: st.DrawFn, valid: Any) -> bytes:
    """The content of a file, made of a valid value."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=300) | st.sampled_from(TEXTS))
    text = json.dumps(draw(changed(valid))).encode()
    if kind > 3 or not text:
        return text
    begin = draw(st.integers(0, len(text)))
    end = begin + draw(st.integers(0, 40))
    return text[:begin] + draw(st.binary(max_size=8) | st.sampled_from(TEXTS)) + text[end:]
