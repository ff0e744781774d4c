"""Hostile input for each reader of files and messages.

    python -m tests.fuzz.readers [--inputs N] [--seed S] [READER ...]

A reader returns a valid value or raises the error that it documents, in bounded time, and opens nothing but the file
that it was given. Exit status 1 if one does otherwise.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis

from graphshard.agree.contract import Contract
from graphshard.cost import HARDWARE
from graphshard.cost.hardware_file import hardware_fields, hardware_text, read_hardware
from graphshard.faults.diagnose import diagnose
from graphshard.faults.dumps import Dump, write_dump
from graphshard.faults.status import Status, from_json
from graphshard.files import parse_json
from graphshard.graph.plan import PlannedBucket
from graphshard.plan_file import load_plan, plan_text
from graphshard.planner import best_schedule, choose_residency, simulate
from graphshard.planning import plan_cache
from tests.fuzz.hostile import files
from tests.graph import plans, problems

LONGEST_S = 10.0
INPUTS = 1000
BUDGET = 10**6


@dataclass(frozen=True)
class Reader:
    """One of them.

    Attributes:
        valid: what it reads, as JSON.
        read: reads a content, with a folder to put it into; returns what is to be looked at no further.
    """

    valid: Any
    read: Callable[[bytes, Path], object]


def _plan(content: bytes, folder: Path) -> str:
    path = folder / "plan.json"
    path.write_bytes(content)
    return plan_text(load_plan(path))


def _hardware(content: bytes, folder: Path) -> str:
    path = folder / "hardware.json"
    path.write_bytes(content)
    return hardware_text(read_hardware(path))


PROBLEM, BACKWARD = problems.stack(3), problems.stack(3, backward=True)
SCHEDULE = best_schedule(PROBLEM, BUDGET)
KEPT = choose_residency(PROBLEM, BACKWARD, BUDGET)


def _entry(content: bytes, asked: Callable[[], Any]) -> Any:
    """What is found where each entry has that content: nothing is planned that would take long."""
    given = {"read_entry": content, "carry_entry": None, "write_entry": None}
    given |= {"best_schedule": SCHEDULE, "choose_residency": KEPT}
    doubles = {name: mock.Mock(return_value=value) for name, value in given.items()}
    with mock.patch.multiple(plan_cache, **doubles):
        return asked()


def _schedule(content: bytes, folder: Path) -> None:
    choice = _entry(content, lambda: plan_cache.remembered_schedule(PROBLEM, BUDGET))
    assert simulate(PROBLEM, choice.schedule).peak_bytes <= BUDGET


def _residency(content: bytes, folder: Path) -> None:
    kept = _entry(content, lambda: plan_cache.remembered_residency(PROBLEM, BACKWARD, BUDGET))
    assert kept <= {gather.unit for gather in PROBLEM.gathers}


STATUS = Status(0, "a", 1, 2, "collective", ranks=(0, 1), fqns=("w",), what="wait", bucket="b", recent=((1, "p"),))


def _dump(content: bytes, folder: Path) -> str:
    for old in folder.iterdir():
        old.unlink()
    write_dump(folder, Dump("good", 1.0, STATUS, {1: STATUS}, asked=True))
    (folder / "x.0.fault.json").write_bytes(content)
    out = io.StringIO()
    diagnose(folder, out)
    shown = out.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in shown), shown
    return shown


def _valid_dump() -> Any:
    with tempfile.TemporaryDirectory() as name:
        write_dump(Path(name), Dump("good", 1.0, STATUS, {1: STATUS}, asked=True))
        content = json.loads(next(Path(name).iterdir()).read_text())
    return content | {"stacks": {}}


def _choice() -> Any:
    buckets = [[bucket.kind, bucket.members] for bucket in SCHEDULE.schedule.buckets]
    entry = {"name": "a", "buckets": buckets, "steps": SCHEDULE.schedule.steps, "baselines": SCHEDULE.baselines}
    return json.loads(json.dumps(entry))


def _valid_contract() -> Any:
    contract = Contract((PlannedBucket("gather:a", "gather", ("a.w",)),), (), (), "search", ("fuse_copies",))
    return json.loads(contract.text())


def readers() -> dict[str, Reader]:
    """By name."""
    hardware = hardware_fields(HARDWARE["h100"])
    hardware_file = {"format": "graphshard-hardware", "version": 1, "hardware": hardware, "machine": {}, "samples": []}
    return {
        "plan": Reader(json.loads(plan_text(plans.backward_plan())), _plan),
        "hardware": Reader(json.loads(json.dumps(hardware_file)), _hardware),
        "schedule": Reader(_choice(), _schedule),
        "residency": Reader(sorted(KEPT), _residency),
        "dump": Reader(_valid_dump(), _dump),
        "status": Reader(json.loads(json.dumps(asdict(STATUS))), lambda content, _: from_json(parse_json(content))),
        "contract": Reader(_valid_contract(), lambda content, _: Contract.parse(content.decode("latin-1"))),
    }


_watching: list[Path] = []
_opened: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watching and isinstance(args[0], (str, bytes)):
        path = os.fsdecode(args[0])
        is_code = path.startswith((sys.prefix, sys.base_prefix)) or path.endswith((".py", ".pyc"))
        if not is_code and not path.startswith(f"{_watching[-1]}/"):
            _opened.append(path)


@contextmanager
def _watched(folder: Path) -> Iterator[None]:
    """Inside, what is opened outside a folder is remembered."""
    if not getattr(_hook, "installed", False):
        sys.addaudithook(_hook)
        _hook.installed = True  # type: ignore[attr-defined]
    _watching.append(folder)
    try:
        yield
    finally:
        _watching.pop()


def play(name: str, inputs: int, seed: int) -> Counter[str]:
    """Reads so many hostile inputs; counts what came of them.

    Raises:
        AssertionError: a reader took too long, or opened another file.
        Exception: whatever a reader raised that it does not document.
    """
    reader, came = readers()[name], Counter[str]()
    unheard = logging.Logger("unheard", logging.CRITICAL)  # an entry that is ignored is a warning
    with tempfile.TemporaryDirectory() as folder_name, mock.patch.object(plan_cache, "log", unheard):
        folder = Path(folder_name)
        reader.read(json.dumps(reader.valid).encode(), folder)

        @hypothesis.settings(
            max_examples=inputs, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.seed(seed)
        @hypothesis.given(content=files(reader.valid))
        def check(content: bytes) -> None:
            begin = time.monotonic()
            _opened.clear()
            with _watched(folder):
                try:
                    reader.read(content, folder)
                    came["read"] += 1
                except ValueError:
                    came["refused"] += 1
            assert not _opened, _opened
            assert time.monotonic() - begin < LONGEST_S

        check()
    return came


def main() -> int:
    """Plays all readers, or those named."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.readers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("readers", nargs="*", help=f"of {', '.join(readers())}; all")
    parser.add_argument("--inputs", type=int, default=INPUTS, help=f"for each; {INPUTS}")
    parser.add_argument("--seed", type=int, default=0, help="0")
    options = parser.parse_args()
    for name in options.readers or readers():
        came = play(name, options.inputs, options.seed)
        print(f"{name}: {came.total()} inputs: {came['read']} read, {came['refused']} refused", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
