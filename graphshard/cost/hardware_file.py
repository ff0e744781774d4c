"""Hardware as a file: what a calibration writes and the cost model reads back.

    {"format": "graphshard-hardware", "version": 1, "hardware": {...}, "machine": {...}, "samples": [...]}

`hardware` has the fields of `Hardware`; `machine` and `samples` say how they were measured, and nothing reads them. The
text is canonical: equal content, equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from graphshard.cost.rates import Hardware, Protocol
from graphshard.files import parse_json, read_limited

FORMAT, VERSION = "graphshard-hardware", 1
# Of a file: it has every raw measurement.
MAX_BYTES = 16 * 2**20
_OF_FILE = frozenset({"format", "version", "hardware", "machine", "samples"})


def hardware_fields(hardware: Hardware) -> dict[str, Any]:
    """The fields of `hardware`, as JSON has them."""
    plain = {entry.name: getattr(hardware, entry.name) for entry in fields(hardware)}
    for name in ("matmul_tflops", "kind_share", "sources"):
        plain[name] = dict(plain[name])
    return plain | {
        "protocols": [asdict(protocol) for protocol in hardware.protocols],
        "algorithms": list(hardware.algorithms),
    }


def hardware_text(
    hardware: Hardware, machine: Mapping[str, object] | None = None, samples: Sequence[Mapping[str, object]] = ()
) -> str:
    """The content of a file.

    Args:
        hardware: to write.
        machine: that it was measured on.
        samples: every raw measurement.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "hardware": hardware_fields(hardware),
        "machine": dict(machine or {}),
        "samples": [dict(sample) for sample in samples],
    }
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def read_hardware(path: Path) -> Hardware:
    """The hardware of a file.

    Raises:
        ValueError: if the file cannot be read, is no JSON, lacks a field, has an unknown one, or one whose value no
            machine has; says which, and what is wanted.
    """
    try:
        content = parse_json(read_limited(path, MAX_BYTES), finite=False)
    except OSError as error:
        raise ValueError(
            f"hardware file {path}: {error.strerror or error}; want a file of graphshard.calibrate"
        ) from error
    except ValueError as error:
        raise ValueError(f"hardware file {path}: {error}; want a file of graphshard.calibrate") from error
    try:
        return _hardware(content)
    except ValueError as error:
        raise ValueError(f"hardware file {path}: {error}; correct it or calibrate again") from error


def _hardware(content: object) -> Hardware:
    _check_names("the file", content, _OF_FILE, _OF_FILE - {"machine", "samples"})
    assert isinstance(content, dict)
    for name, want in (("format", FORMAT), ("version", VERSION)):
        if content[name] != want:
            raise ValueError(f"{name}: got {content[name]!r}, want {want!r}")
    values = dict(_of_class(Hardware, "hardware", content["hardware"]))
    for name in ("protocols", "algorithms"):
        if not isinstance(values[name], list):
            raise ValueError(f"hardware.{name}: got {values[name]!r}, want a list")
    protocols = []
    for index, value in enumerate(values["protocols"]):
        where = f"hardware.protocols[{index}]"
        found = _of_class(Protocol, where, value)
        try:
            protocols.append(Protocol(**found))
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from error
    if not all(isinstance(name, str) for name in values["algorithms"]):
        raise ValueError(f"hardware.algorithms: got {values['algorithms']!r}, want texts")
    try:
        return Hardware(**values | {"protocols": tuple(protocols), "algorithms": tuple(values["algorithms"])})
    except ValueError as error:
        raise ValueError(f"hardware.{error}") from error


def _of_class(kind: type[Any], where: str, values: object) -> dict[str, Any]:
    known = {entry.name for entry in fields(kind)}
    needed = {e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING}
    _check_names(where, values, known, needed)
    assert isinstance(values, dict)
    return values


def _check_names(
    where: str, values: object, known: set[str] | frozenset[str], needed: set[str] | frozenset[str]
) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: got {values!r}, want fields by name")
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{where}: got unknown {', '.join(unknown)}, want only {', '.join(sorted(known))}")
    if missing := sorted(needed - set(values)):
        raise ValueError(f"{where}: got no {', '.join(missing)}, want {', '.join(sorted(needed))}")
