"""Makes dataclasses of plain JSON values, by their type hints; says where a value is another than is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

_MOST = 2**63
_PLAIN = {
    str: "a text",
    int: "a whole number from 0 up",
    float: "a number from 0 up",
}


def decode(kind: Any, value: object, where: str = "") -> Any:
    """`value` as a `kind`: a dataclass, a tuple, a literal, a text, or a number from 0 up; any of them or None.

    Args:
        kind: a type hint.
        value: as `json.loads` makes it.
        where: of it, ``programs[0].steps``.

    Raises:
        ValueError: `value` is no `kind`; says where, what it is and what is wanted.
    """
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if get_origin(kind) is UnionType:
        (inner,) = (option for option in get_args(kind) if option is not NoneType)
        return None if value is None else decode(inner, value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        return tuple(decode(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _wrong(where, value, f"one of {', '.join(map(repr, get_args(kind)))}")
        return value
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    if not is_kind or (isinstance(value, (int, float)) and not 0 <= value < _MOST):
        raise _wrong(where, value, _PLAIN[kind])
    return kind(value)


def _dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(where, value, "fields by name")
    names = [entry.name for entry in fields(kind)]
    inside = f"{where}." if where else ""
    if unknown := sorted(set(value) - set(names)):
        raise ValueError(f"{inside}{unknown[0]}: got an unknown name, want only {', '.join(sorted(names))}")
    if missing := [name for name in names if name not in value]:
        beside = f"want it beside {', '.join(sorted(value))}" if value else f"want {', '.join(names)}"
        raise ValueError(f"{inside}{missing[0]}: got nothing, {beside}")
    hints = get_type_hints(kind)
    return kind(**{name: decode(hints[name], value[name], inside + name) for name in names})


def _wrong(where: str, value: object, want: str) -> ValueError:
    return ValueError(f"{where or 'the file'}: got {value!r:.60}, want {want}")
