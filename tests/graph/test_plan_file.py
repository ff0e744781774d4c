"""Plan files: what is written is what is read, in canonical bytes; bad files are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from plans import (
    EXAMPLES,
    RANKS,
    backward,
    backward_plan,
    decided,
    forward,
    plan_of,
    plans,
    problems,
    schedules,
    wrapped,
)

from graphshard.plan_file import (
    Plan,
    load_plan,
    outline_hash,
    outline_of,
    parse_plan,
    plan_digest,
    plan_text,
    problem_of,
    stored_program,
    write_plan,
)
from graphshard.planner import Problem, check_schedule, fsdp2_schedule


def ranks(name: str) -> int:
    return RANKS[name]


# --- the file


@EXAMPLES
@given(plans())
def test_text_reads_back_as_the_same_plan(plan: Plan) -> None:
    text = plan_text(plan)
    assert parse_plan(text) == plan
    assert plan_text(parse_plan(text)) == text
    assert plan_digest(parse_plan(text)) == plan_digest(plan)


@EXAMPLES
@given(plans())
def test_text_is_canonical(plan: Plan) -> None:
    text = plan_text(plan)
    content = json.loads(text)
    shuffled = json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert plan_text(parse_plan(json.dumps(shuffled))) == text
    assert json.loads(json.dumps(content, sort_keys=True)) == content
    assert text.endswith("\n")
    assert text.isascii()


@EXAMPLES
@given(st.data(), problems())
def test_outline_holds_everything_but_times(data: st.DataObject, problem: Problem) -> None:
    outline = outline_of(problem, ranks)
    assert outline_of(problem_of(outline), {"0": ranks("shards"), "1": ranks("copies")}.__getitem__) == outline
    timeless = replace(
        problem,
        op_us=tuple(us + 1.0 for us in problem.op_us),
        gathers=tuple(replace(g, copy_in_us=7.0, alone_in_us=3.0) for g in problem.gathers),
        contention=problem.contention + 1.0,
    )
    assert outline_hash(outline_of(timeless, ranks)) == outline_hash(outline)
    schedule = data.draw(schedules(problem))
    check_schedule(problem_of(outline), schedule)


def test_hash_changes_with_each_part() -> None:
    outline = outline_of(backward(), ranks)
    member, op, own = outline.members[0], outline.ops[0], outline.own[0]
    rest, ops = outline.members[1:], outline.ops[1:]
    changed = [
        replace(outline, direction="forward"),
        replace(outline, group_ranks=(8, 2)),
        replace(outline, ops=(replace(op, name="bmm"), *ops)),
        replace(outline, ops=(replace(op, num_bytes=1), *ops)),
        replace(outline, own=(replace(own, launch=0),)),
        replace(outline, members=rest),
        *(
            replace(outline, members=(replace(member, **{name: value}), *rest))
            for name, value in {
                "kind": "reduce",
                "fqn": "other",
                "unit": "other",
                "key": 5,
                "group": 1,
                "then": 0,
                "wire_bytes": 1,
                "full_bytes": 1,
                "shard_bytes": 1,
                "copied_bytes": 1,
                "ready": 1,
                "first_use": 1,
                "last_use": 3,
            }.items()
        ),
    ]
    assert len({outline_hash(found) for found in (outline, *changed)}) == 1 + len(changed)


def test_text_is_one_row_a_line() -> None:
    text = plan_text(backward_plan())
    rows = text[: text.index('    "own"')].splitlines()
    assert_expected_inline(
        "\n".join(row[:100] for row in rows),
        """\
{
 "budget_bytes": null,
 "format": "graphshard-plan",
 "graphshard": "0.1.0",
 "hardware": {"fingerprint": "0123456789abcdef", "name": "h100"},
 "mode": "auto",
 "programs": [
  {
   "buckets": [
    {
     "kind": "gather",
     "members": ["blocks.1.weight", "blocks.1.bias"],
     "name": "gather:blocks.1"
    },
    {
     "kind": "gather",
     "members": ["blocks.0.weight"],
     "name": "gather:blocks.0"
    },
    {
     "kind": "reduce",
     "members": ["blocks.1.weight", "blocks.1.bias"],
     "name": "reduce:blocks.1"
    },
    {
     "kind": "reduce",
     "members": ["blocks.0.weight"],
     "name": "reduce:blocks.0"
    }
   ],
   "budget_bytes": 19456,
   "chosen": "search",
   "flags": "resident=1",
   "kept": null,
   "outline": {
    "direction": "backward",
    "group_ranks": [4, 2],
    "members": [
     {"copied_bytes": 0, "first_use": 0, "fqn": "blocks.1.weight", "full_bytes": 4096, "group": 0, "
     {"copied_bytes": 0, "first_use": 0, "fqn": "blocks.1.bias", "full_bytes": 64, "group": 0, "key"
     {"copied_bytes": 0, "first_use": 2, "fqn": "blocks.0.weight", "full_bytes": 4096, "group": 0, "
     {"copied_bytes": 0, "first_use": null, "fqn": "blocks.1.weight", "full_bytes": 4096, "group": 0
     {"copied_bytes": 0, "first_use": null, "fqn": "blocks.1.bias", "full_bytes": 64, "group": 0, "k
     {"copied_bytes": 0, "first_use": null, "fqn": "blocks.0.weight", "full_bytes": 4096, "group": 0
    ],
    "ops": [
     {"name": "mm", "num_bytes": 5000},
     {"name": "relu", "num_bytes": 6000},
     {"name": "mm_1", "num_bytes": 6000},
     {"name": "sum", "num_bytes": 5000}
    ],""",
    )


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("what was there")
    write_plan(backward_plan(), path)
    assert load_plan(path) == load_plan(str(path)) == backward_plan()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(FileNotFoundError, match="missing; make it first"):
        write_plan(backward_plan(), tmp_path / "missing" / "plan.json")


# --- bad files


def error_of(text: str | bytes, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        load_plan(path)
    return str(caught.value).replace(str(tmp_path), "DIR")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    lines = [error_of(text, tmp_path) for text in ("", "[1]", "{", b"\xff", '{"a": 1, "a": 2}', '"text"')]
    with pytest.raises(ValueError, match="No such file") as caught:
        load_plan(tmp_path / "missing.json")
    lines.append(str(caught.value).replace(str(tmp_path), "DIR"))
    assert_expected_inline(
        wrapped(lines),
        """\
plan file DIR/plan.json: line 1: got no JSON (Expecting value); correct it, or plan anew with plan='auto' and
    save
plan file DIR/plan.json: the file: got [1], want fields by name; correct it, or plan anew with plan='auto' and
    save
plan file DIR/plan.json: line 1: got no JSON (Expecting property name enclosed in double quotes); correct it,
    or plan anew with plan='auto' and save
plan file DIR/plan.json: got no UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start
    byte); want a file that graphshard.save_plan wrote
plan file DIR/plan.json: a: got it twice in one object, want it once; correct it, or plan anew with
    plan='auto' and save
plan file DIR/plan.json: the file: got 'text', want fields by name; correct it, or plan anew with plan='auto'
    and save
plan file DIR/missing.json: No such file or directory; want a file that graphshard.save_plan wrote""",
    )
    with pytest.raises(TypeError, match="load_plan: path: got int"):
        load_plan(3)  # type: ignore[arg-type]


def edited(change: Callable[[Any], object]) -> str:
    content = json.loads(plan_text(backward_plan()))
    change(content)
    return json.dumps(content)


def program(content: Any) -> Any:
    return content["programs"][0]


def outline(content: Any) -> Any:
    return program(content)["outline"]


EDITS: dict[str, Callable[[Any], object]] = {
    "format": lambda c: c.update(format="graphshard-hardware"),
    "version": lambda c: c.update(version=2),
    "no version": lambda c: c.pop("version"),
    "unknown": lambda c: c.update(notes="mine"),
    "mode": lambda c: c.update(mode="best"),
    "budget": lambda c: c.update(budget_bytes=-1),
    "programs": lambda c: c.update(programs={}),
    "hardware": lambda c: c.update(hardware="h100"),
    "missing": lambda c: program(c).pop("steps"),
    "text": lambda c: program(c).update(flags=1),
    "number": lambda c: program(c).update(region="0"),
    "flag": lambda c: program(c).update(region=True),
    "infinite": lambda c: program(c)["predicted"].update(step_us=float("inf")),
    "not a number": lambda c: program(c)["predicted"].update(step_us=float("nan")),
    "kind": lambda c: program(c)["buckets"][0].update(kind="scatter"),
    "deep": lambda c: program(c)["steps"][1].update(before=None),
    "member twice": lambda c: outline(c)["members"].append(outline(c)["members"][-1]),
    "order of members": lambda c: outline(c)["members"].reverse(),
    "op twice": lambda c: outline(c)["ops"].append(outline(c)["ops"][0]),
    "position of a member": lambda c: outline(c)["members"][0].update(ready=5),
    "uses of a reduction": lambda c: outline(c)["members"][-1].update(first_use=1),
    "group of a member": lambda c: outline(c)["members"][0].update(group=2),
    "position of a collective": lambda c: outline(c)["own"][0].update(wait=9),
    "bucket twice": lambda c: program(c)["buckets"].append(program(c)["buckets"][0]),
    "unknown member": lambda c: program(c)["buckets"][0]["members"].append("other"),
    "member in no bucket": lambda c: program(c)["buckets"][0]["members"].pop(),
    "member in a bucket twice": lambda c: program(c)["buckets"][0]["members"].append(
        program(c)["buckets"][0]["members"][0]
    ),
    "unknown bucket": lambda c: program(c)["steps"][0].update(bucket="gather:other"),
    "unknown op": lambda c: program(c)["steps"][0].update(before="bmm"),
    "position": lambda c: program(c)["steps"][0].update(position=1),
    "late wait": lambda c: program(c)["steps"].append(program(c)["steps"].pop(1) | {"before": "", "position": 4}),
    "no launch": lambda c: program(c)["steps"].pop(0),
    "hash": lambda c: program(c).update(outline_hash="0"),
    "sizes": lambda c: outline(c)["members"][0].update(wire_bytes=1),
    "kept by a backward": lambda c: program(c).update(kept=["blocks.1"]),
    "program twice": lambda c: c["programs"].append(copy.deepcopy(program(c))),
    "no program": lambda c: c["programs"].clear(),
    "over its budget": lambda c: program(c).update(budget_bytes=1),
    "below its bound": lambda c: program(c)["predicted"].update(lower_bound_us=1e6),
    "exposed for longer than it takes": lambda c: program(c)["predicted"].update(exposed_us=1e6),
}


def test_kept_units_are_those_of_the_region(tmp_path: Path) -> None:
    made = plan_of(*((0, flags, forward(), fsdp2_schedule(forward())) for flags in ("a", "b")), kept=("blocks.0",))
    for number, got, message in (
        (1, [], r"programs\[1\].kept: got \(\), want \('blocks.0',\), as the first forward of the region"),
        (0, ["blocks.7"], r"programs\[0\].kept: got 'blocks.7', want units of the outline's members"),
    ):
        content = json.loads(plan_text(made))
        content["programs"][number]["kept"] = got
        with pytest.raises(ValueError, match=message):
            parse_plan(json.dumps(content))


def test_bad_content_is_refused_by_place(tmp_path: Path) -> None:
    before, after = "plan file DIR/plan.json: ", "; correct it, or plan anew with plan='auto' and save"
    lines = []
    for name, change in EDITS.items():
        line = error_of(edited(change), tmp_path)
        assert line.startswith(before)
        assert line.endswith(after)
        lines.append(f"{name}: {line.removeprefix(before).removesuffix(after)}")
    assert_expected_inline(
        wrapped(lines),
        """\
format: format: got 'graphshard-hardware', want 'graphshard-plan'
version: version: got 2, want 1
no version: version: got nothing, want it beside budget_bytes, format, graphshard, hardware, mode, programs,
    torch
unknown: notes: got an unknown name, want only budget_bytes, format, graphshard, hardware, mode, programs,
    torch, version
mode: mode: got 'best', want one of 'auto', 'fsdp2'
budget: budget_bytes: got -1, want a whole number from 0 up
programs: programs: got {}, want a list
hardware: hardware: got 'h100', want fields by name
missing: programs[0].steps: got nothing, want it beside buckets, budget_bytes, chosen, flags, kept, outline,
    outline_hash, predicted, region
text: programs[0].flags: got 1, want a text
number: programs[0].region: got '0', want a whole number from 0 up
flag: programs[0].region: got True, want a whole number from 0 up
infinite: programs[0].predicted.step_us: got inf, want a number from 0 up
not a number: programs[0].predicted.step_us: got nan, want a number from 0 up
kind: programs[0].buckets[0].kind: got 'scatter', want one of 'gather', 'reduce'
deep: programs[0].steps[1].before: got None, want a text
member twice: programs[0].outline.members: got 'reduce of blocks.0.weight' 2 times, want it once
order of members: programs[0].outline.members: want gathers, then reductions
op twice: programs[0].outline.ops: got 'mm' 2 times, want it once
position of a member: programs[0].outline.members[0].ready: got 5, want one of 5 positions
uses of a reduction: programs[0].outline.members[5]: got first_use, last_use (1, None), want positions of a
    gather, null of a reduction
group of a member: programs[0].outline.members[0].group: got 2, want one of 2 groups
position of a collective: programs[0].outline.own[0].wait: got 9, want one of 5 positions
bucket twice: programs[0].buckets: got 'gather:blocks.1' 2 times, want it once
unknown member: programs[0].buckets[0].members: got 'other', want members of kind 'gather' of the outline
member in no bucket: programs[0].buckets: got 'blocks.1.bias' in 0 of kind 'gather', want it in one
member in a bucket twice: programs[0].buckets: got 'blocks.1.weight' in 2 of kind 'gather', want it in one
unknown bucket: programs[0].steps[0].bucket: got 'gather:other', want the name of one of the buckets
unknown op: programs[0].steps[0].before: got 'bmm', want the name of an op of the outline, or '' for the end
position: programs[0].steps[0].position: got 1, want 0, that of 'mm'
late wait: programs[0]: schedule: bucket 0: awaited at 4, behind the first use of a member
no launch: programs[0]: schedule: bucket 0: want launch, wait, in this order
hash: programs[0].outline_hash: got '0', want '897e43519f291d09', the hash of its outline
sizes: programs[0].outline_hash: got '897e43519f291d09', want 'c3493b5656396b59', the hash of its outline
kept by a backward: programs[0].kept: got ('blocks.1',), want null, as it is no forward
program twice: programs: want each once, by region, direction, flags and hash
no program: programs: got none, want at least one
over its budget: programs[0].predicted.peak_bytes: got 19456, want 0 to 1, its budget_bytes
below its bound: programs[0].predicted.lower_bound_us: got 1000000.0, want 0 to 337.56, its step_us
exposed for longer than it takes: programs[0].predicted.exposed_us: got 1000000.0, want 0 to 337.56, its
    step_us""",
    )


def test_program_that_allocates_more_than_its_budget_by_a_contract_is_written_so_that_it_loads() -> None:
    decision = replace(decided(backward(), fsdp2_schedule(backward())), budget_bytes=1)
    stored = stored_program(0, "resident=1", decision, outline_of(backward(), RANKS.__getitem__))
    plan = replace(backward_plan(), programs=(stored,))
    assert parse_plan(plan_text(plan)) == plan
    assert stored.budget_bytes == stored.predicted.peak_bytes > 1
