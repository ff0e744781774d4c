"""Which launch or wait a line of generated code is."""

from __future__ import annotations

import linecache
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from graphshard.faults.place import (
    Frame,
    Place,
    communication_calls,
    frames_of,
    frames_of_error,
    index_in_order,
    place_of,
)
from graphshard.reporting.report import ProgramRecord

# As Inductor writes it: comments, strings and definitions name collectives that are none of its calls.
SOURCE = """
KERNEL = '''torch.ops._c10d_functional.wait_tensor.default(x)'''


class Runner:
    def call(self, torch):
        # Original ATen: torch.ops._c10d_functional.wait_tensor.default(x)
        torch.ops._c10d_functional.all_gather_into_tensor_out.default("gather", 2, '0', out=1)
        torch.ops.aten.mm.default("mm")
        torch.ops.theirs.all_reduce.default("theirs")
        torch.ops._c10d_functional.wait_tensor.default("gathered")
        torch.ops.graphshard.keep_until.default("kept")
        torch.ops._c10d_functional.wait_tensor.default(
            torch.ops._c10d_functional.reduce_scatter_tensor.default(
                "reduce", "avg", 2, '0'
            )
        )
        torch.ops._c10d_functional.all_reduce_.default("all_reduce")
        torch.ops._c10d_functional.broadcast.default("the model's own, which no launch of ours is")
"""
ORDER = (
    ("launch", "gather:a"),
    ("wait", "gather:a"),
    ("launch", "reduce:a"),
    ("wait", "reduce:a"),
    ("launch", "reduce:b"),
)
CARRIED = (
    ("0", ("a.weight", "a.bias")),
    ("0", ("a.weight", "a.bias")),
    ("0", ("a.weight",)),
    ("0", ("a.weight",)),
    ("1", ("b.weight",)),
)


class Failing:
    """Stands for torch: the operator whose first argument is `at` fails."""

    def __init__(self, at: str) -> None:
        self._at = at

    def __getattr__(self, name: str) -> Failing:
        return self

    def __call__(self, argument: object, *others: object, **named: object) -> None:
        if argument == self._at:
            raise RuntimeError("Connection closed by peer")


def record(order: Any = ORDER, carried: Any = CARRIED, parameters: Any = ()) -> ProgramRecord:
    return ProgramRecord(0, "backward", "default", {}, 0.0, 0.0, order=order, carried=carried, parameters=parameters)


def failed_at(at: str, source: str = SOURCE) -> RuntimeError:
    file = f"<generated {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["Runner"]().call(Failing(at))
    return raised.value


def test_calls_are_found_in_the_order_they_run() -> None:
    assert [call.what for call in communication_calls(SOURCE)] == [what for what, _ in ORDER]
    assert communication_calls("def broken(:") == ()


@pytest.mark.parametrize(
    ("at", "position"), [("gather", 0), ("gathered", 1), ("reduce", 2), ("all_reduce", 4), ("mm", -1), ("kept", -1)]
)
def test_line_of_a_frame_is_its_launch_or_wait(at: str, position: int) -> None:
    assert index_in_order(frames_of_error(failed_at(at)), ORDER) == position


def test_place_names_bucket_parameters_and_group() -> None:
    frames = frames_of_error(failed_at("all_reduce"))
    assert place_of(frames, record(), ()) == (4, "launch", "reduce:b", ("b.weight",), "1")
    assert place_of(frames_of_error(failed_at("mm")), record(), ()) is None


def test_place_in_a_shared_program_is_named_for_the_block_that_runs() -> None:
    shards = [SimpleNamespace(fqn=f"z.{name}", unit=SimpleNamespace(name="z")) for name in ("weight", "bias")]
    shared = record(parameters=(("a", "a.weight"), ("a", "a.bias")))
    place = place_of(frames_of_error(failed_at("gathered")), shared, shards)
    assert place is not None
    assert (place.bucket, place.fqns) == ("gather:z", ("z.weight", "z.bias"))


def test_place_without_a_source_is_that_of_the_only_bucket() -> None:
    def at(operator: str, count: int) -> Place | None:
        frame = Frame((lambda: None).__code__, 1, {}, operator)
        return place_of([frame], record(order=ORDER[:count], carried=CARRIED[:count]), ())

    assert at("_c10d_functional.wait_tensor", 2) == (-1, "", "gather:a", ("a.weight", "a.bias"), "0")
    assert at("_c10d_functional.wait_tensor", 5) == (-1, "", "", (), "")
    assert at("aten.mm", 2) is None


def test_frames_of_a_program_end_where_it_is_called() -> None:
    def program() -> list[Frame]:
        return frames_of(sys._getframe(), {entry.__code__})

    def entry() -> list[Frame]:
        return program()

    assert [frame.code for frame in entry()] == [program.__code__]
    assert program() == []


def test_halves_of_a_program_count_on() -> None:
    order = (("launch", "a"), ("launch", "b"), ("wait", "a"), ("wait", "b"))
    halves = {
        "launch": ("all_gather_into_tensor", ("x", "y"), (0, 1)),
        "wait": ("wait_tensor", ("x", "y"), (2, 3)),
    }
    for operator, names, positions in halves.values():
        lines = "".join(f"        torch.ops._c10d_functional.{operator}.default({name!r})\n" for name in names)
        source = f"class Runner:\n    def call(self, torch):\n{lines}"
        for name, position in zip(names, positions, strict=True):
            assert index_in_order(frames_of_error(failed_at(name, source)), order) == position


def test_source_of_another_program_is_not_taken_for_this_one() -> None:
    frames = frames_of_error(failed_at("gather"))
    assert index_in_order(frames, (("wait", "gather:a"), ("launch", "gather:a"))) is None
    assert index_in_order(frames, ()) is None
    assert place_of(frames, record(order=ORDER[:2], carried=CARRIED[:2]), ()) is None
