"""Hardware is checked, has sources, and survives a file; what is wrong with a file is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from graphshard.cost import HARDWARE, CostModel, find_hardware
from graphshard.cost.hardware_file import hardware_text

H100 = HARDWARE["h100"]


def written(path: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> str:
    """A hardware file of an H100 after `change`."""
    content = json.loads(hardware_text(H100))
    change(content)
    path.write_text(json.dumps(content))
    return str(path)


def test_every_number_of_the_table_has_a_source() -> None:
    assert set(HARDWARE) == {"a100", "h100", "h100-500w", "h200", "b200", "cpu-gloo"}
    for name, row in HARDWARE.items():
        assert row.name == name
        assert set(row.sources) == {entry.name for entry in fields(row)} - {"name", "sources"}
        assert hash(row) == hash(replace(row))


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_hardware_file_round_trip_keeps_everything(name: str, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    path.write_text(hardware_text(HARDWARE[name], {"cores": 2}, [{"what": "copy", "us": [1.0]}]))
    assert find_hardware(str(path)) == HARDWARE[name]
    assert hardware_text(find_hardware(str(path))) == hardware_text(HARDWARE[name])


def test_unknown_hardware_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"got 'h300', want one of a100, b200, cpu-gloo, h100, h100-500w, h200"):
        find_hardware("h300")


def _set(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    """Sets the value at a path such as ``hardware.protocols.0.base_us``."""

    def change(content: dict[str, Any]) -> None:
        at: Any = content
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            at = at[part]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("hardware.memory_gb_s", -1), r"hardware\.memory_gb_s: got -1, want a finite number of at least 1e-06"),
        (_set("hardware.memory_gb_s", 0), r"hardware\.memory_gb_s: got 0"),
        (_set("hardware.memory_gb_s", True), r"hardware\.memory_gb_s: got True"),
        (_set("hardware.kernel_us", 0), r"hardware\.kernel_us: got 0, want a finite number above 0"),
        (_set("hardware.link_gb_s", float("nan")), r"hardware\.link_gb_s: got nan"),
        (_set("hardware.nic_gb_s", float("inf")), r"hardware\.nic_gb_s: got inf"),
        (_set("hardware.network_gb_s", "fast"), r"hardware\.network_gb_s: got 'fast'"),
        (_set("hardware.contention", -0.1), r"hardware\.contention: got -0.1"),
        (_set("hardware.ranks_per_node", 1.5), r"hardware\.ranks_per_node: got 1.5, want an integer above 0"),
        (_set("hardware.memory_bytes", 0), r"hardware\.memory_bytes: got 0, want an integer above 0"),
        (_set("hardware.matmul_tflops", {}), r"hardware\.matmul_tflops: got no dtype"),
        (_set("hardware.matmul_tflops", [1]), r"hardware\.matmul_tflops: got \[1\]"),
        (_set("hardware.matmul_tflops.float32", None), r"hardware\.matmul_tflops\.float32: got None"),
        (_set("hardware.kind_share.all_gather", 1.1), r"hardware\.kind_share\.all_gather: got 1.1"),
        (_set("hardware.kind_share.gather", 1.0), r"hardware\.kind_share: got unknown gather"),
        (_set("hardware.protocols", []), r"hardware\.protocols: got none"),
        (_set("hardware.protocols", 1), r"hardware\.protocols: got 1, want a list"),
        (_set("hardware.protocols.0.base_us", 0), r"hardware\.protocols\[0\]\.base_us: got 0"),
        (_set("hardware.protocols.1", {"name": "LL"}), r"hardware\.protocols\[1\]: got no base_us"),
        (_set("hardware.algorithms", ["tree"]), r"hardware\.algorithms: got \['tree'\]"),
        (_set("hardware.algorithms", [[1]]), r"hardware\.algorithms: got \[\[1\]\]"),
        (_set("hardware.speed", 1), r"hardware: got unknown speed"),
        (_set("hardware.sources", {}), r"hardware\.sources: missing \["),
        (_set("hardware.sources.kernel_us", ""), r"hardware\.sources\.kernel_us: got ''"),
        (_set("hardware.name", 3), r"hardware\.name: got 3"),
        (_set("hardware", []), r"hardware: got \[\], want fields by name"),
        (_set("version", 2), r"version: got 2, want 1"),
        (_set("format", "plan"), r"format: got 'plan'"),
        (_set("extra", 1), r"the file: got unknown extra"),
        (lambda content: content["hardware"].pop("contention"), r"hardware: got no contention, want "),
        (lambda content: content.pop("hardware"), r"the file: got no hardware"),
    ],
)  # fmt: skip
def test_hardware_file_errors_say_file_and_field(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "here.json", change)
    with pytest.raises(ValueError, match=rf"hardware file .*here\.json: {message}"):
        find_hardware(path)


def test_hardware_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        find_hardware(str(tmp_path / "none.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json: line 1: got no JSON"):
        find_hardware(str(broken))
    broken.write_text("[]")
    with pytest.raises(ValueError, match=r"broken\.json: the file: got \[\]"):
        find_hardware(str(broken))


def test_fingerprint_is_that_of_the_numbers() -> None:
    one = CostModel(H100).fingerprint
    assert one == CostModel(replace(H100, name="mine", sources=dict(H100.sources) | {"kernel_us": "mine"})).fingerprint
    others = [
        CostModel(H100, fused=False),
        CostModel(replace(H100, kernel_us=4.0)),
        CostModel(replace(H100, protocols=(*H100.protocols[:-1], replace(H100.protocols[-1], step_us=3.5)))),
        CostModel(replace(H100, kind_share={})),
        *(CostModel(row) for row in HARDWARE.values() if row is not H100),
    ]
    assert len({one, *(model.fingerprint for model in others)}) == len(others) + 1
