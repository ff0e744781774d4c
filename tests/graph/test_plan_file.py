"""Plan files: what is written is what is read, in canonical bytes; bad files and other programs are refused."""

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
from plans import RANKS, backward, backward_plan, decided, gather, plan_of, plans, problems, reduction, schedules

from graphshard.plan_file import (
    Plan,
    PlanMismatch,
    ProgramProblem,
    fits,
    load_plan,
    outline_changes,
    outline_hash,
    outline_of,
    parse_plan,
    plan_changes,
    plan_digest,
    plan_text,
    problem_of,
    replay,
    write_plan,
)
from graphshard.planner import Problem, check_schedule, fsdp2_schedule, per_parameter_schedule

FLAGS = "resident=1"
SIDES = ("in a", "in b")


def ranks(name: str) -> int:
    return RANKS[name]


def asked(problem: Problem, flags: str = FLAGS, region: int = 0) -> ProgramProblem:
    return ProgramProblem(region, problem.direction, flags, lambda cuts: problem, ranks)


# --- the file


@given(plans())
def test_text_reads_back_as_the_same_plan(plan: Plan) -> None:
    text = plan_text(plan)
    assert parse_plan(text) == plan
    assert plan_text(parse_plan(text)) == text
    assert plan_digest(parse_plan(text)) == plan_digest(plan)


@given(plans())
def test_text_is_canonical(plan: Plan) -> None:
    text = plan_text(plan)
    content = json.loads(text)
    shuffled = json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert plan_text(parse_plan(json.dumps(shuffled))) == text
    assert json.loads(json.dumps(content, sort_keys=True)) == content
    assert text.endswith("\n")
    assert text.isascii()


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
    assert_expected_inline(text[: text.index('    "own"')], "")


def test_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("what was there")
    write_plan(backward_plan(), path)
    assert load_plan(path) == load_plan(str(path)) == backward_plan()
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(FileNotFoundError):
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
    assert_expected_inline("\n".join(lines), "")
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
    "unknown bucket": lambda c: program(c)["steps"][0].update(bucket="gather:other"),
    "unknown op": lambda c: program(c)["steps"][0].update(before="bmm"),
    "position": lambda c: program(c)["steps"][0].update(position=1),
    "late wait": lambda c: program(c)["steps"].append(program(c)["steps"].pop(1) | {"before": "", "position": 4}),
    "no launch": lambda c: program(c)["steps"].pop(0),
    "hash": lambda c: program(c).update(outline_hash="0"),
    "sizes": lambda c: outline(c)["members"][0].update(wire_bytes=1),
    "program twice": lambda c: c["programs"].append(copy.deepcopy(program(c))),
}


def test_bad_content_is_refused_by_place(tmp_path: Path) -> None:
    before, after = "plan file DIR/plan.json: ", "; correct it, or plan anew with plan='auto' and save"
    lines = []
    for name, change in EDITS.items():
        line = error_of(edited(change), tmp_path)
        assert line.startswith(before)
        assert line.endswith(after)
        lines.append(f"{name}: {line.removeprefix(before).removesuffix(after)}")
    assert_expected_inline("\n".join(lines), "")


# --- replay


@given(plans())
def test_replay_decides_what_was_stored(plan: Plan) -> None:
    plan = replace(plan, mode="auto")
    for stored in plan.programs:
        found = problem_of(stored.outline)
        counted = dict(zip(found.streams, stored.outline.group_ranks, strict=True)).__getitem__
        program = ProgramProblem(stored.region, found.direction, stored.flags, lambda cuts, p=found: p, counted)
        decision = replay(plan, program, "a plan")
        assert decision is not None
        assert decision.plan == stored.plan
        assert decision.choice.schedule == stored.schedule
        assert decision.choice.name == stored.chosen


def test_replay_asks_for_the_ops_of_the_file() -> None:
    seen = []
    program = replace(asked(backward()), extract=lambda cuts: seen.append(cuts) or backward())
    replay(backward_plan(), program, "a plan")
    assert seen == [frozenset({"mm", "relu", "mm_1", "sum"})]


def test_replay_finds_programs_by_name() -> None:
    plan = backward_plan()
    assert replay(plan, asked(backward()), "a plan") is not None
    assert replay(plan, asked(backward(), flags="default"), "a plan") is None
    assert replay(plan, asked(backward(), region=1), "a plan") is None
    assert replay(plan, asked(backward(direction="forward")), "a plan") is None


def test_replay_tells_programs_of_one_name_apart_by_hash() -> None:
    other = backward(gathers=(gather("blocks.7.weight", 0),))
    plan = plan_of((0, FLAGS, backward(), fsdp2_schedule(backward())), (0, FLAGS, other, fsdp2_schedule(other)))
    assert len(plan.programs) == 2
    for problem in (backward(), other):
        decision = replay(plan, asked(problem), "a plan")
        assert decision is not None
        assert decision.plan == decided(problem, fsdp2_schedule(problem)).plan
    with pytest.raises(PlanMismatch, match=r"parameters only in the model: blocks\.8\.weight"):
        replay(plan, asked(backward(gathers=(gather("blocks.8.weight", 0),))), "a plan")


def refusal(problem: Problem, plan: Plan | None = None, budget_bytes: int | None = None) -> str:
    with pytest.raises(PlanMismatch) as caught:
        replay(plan or backward_plan(), asked(problem), "plan file a.json", budget_bytes)
    return str(caught.value)


def test_other_programs_are_refused_by_what_has_changed() -> None:
    weight, bias, last = backward().gathers
    bias_grad = backward().reductions[1]
    changed = {
        "missing": backward(gathers=(weight, last), reductions=(backward().reductions[0], backward().reductions[2])),
        "new": backward(gathers=(*backward().gathers, *(gather(f"blocks.0.{i}", 3) for i in range(5)))),
        "renamed": backward(gathers=(weight, replace(bias, fqn="blocks.1.offset"), last)),
        "gathered already": backward(gathers=(weight, bias)),
        "frozen": backward(reductions=tuple(r for r in backward().reductions if r is not bias_grad)),
        "wider": backward(gathers=(replace(weight, wire_bytes=8192, full_bytes=8192), bias, last)),
        "other unit": backward(gathers=(weight, replace(bias, unit="blocks"), last)),
        "other ops": backward(ops=("mm", "gelu", "mm_1", "sum")),
        "other sizes": backward(op_bytes=(5000, 6000, 9000, 5000)),
        "shorter": backward(ops=("mm", "relu", "mm_1"), op_us=(1.0,) * 3, op_bytes=(5000, 6000, 6000), reductions=()),
        "other uses": backward(gathers=(weight, bias, replace(last, first_use=3, last_use=3))),
        "other order": backward(gathers=(bias, weight, last)),
        "own collective": backward(own=()),
        "groups": backward(streams=("copies", "copies")),
    }
    lines = [f"{name}: {refusal(problem)}" for name, problem in changed.items()]
    start = "plan file a.json: region 0 backward [resident=1]: the program is not the one that was planned: "
    end = (
        ". It was planned with torch 2.13.0 and graphshard 0.1.0. "
        "Plan anew with plan='auto' and write it with graphshard.save_plan"
    )
    assert all(start in line and line.endswith(end) for line in lines)
    assert_expected_inline("\n".join(line.replace(start, "").removesuffix(end) for line in lines), "")


@given(problems(), problems())
def test_changes_are_said_exactly_where_outlines_differ(one: Problem, other: Problem) -> None:
    a, b = outline_of(one, ranks), outline_of(other, ranks)
    assert outline_changes(a, a, SIDES) == []
    assert bool(outline_changes(a, b, SIDES)) == (a != b)


def test_plans_that_do_not_do_what_the_file_says_are_refused() -> None:
    fsdp2 = replace(backward_plan(), mode="fsdp2")
    assert replay(fsdp2, asked(backward()), "a plan") is not None
    searched = plan_of((0, FLAGS, backward(), per_parameter_schedule(backward())), mode="fsdp2")
    (stored,) = backward_plan().programs
    tight = replace(backward_plan(), programs=(replace(stored, budget_bytes=stored.predicted.peak_bytes - 1),))
    lines = [refusal(backward(), searched), refusal(backward(), tight), refusal(backward(), budget_bytes=100)]
    assert_expected_inline("\n".join(line.partition(". It was")[0] for line in lines), "")


def test_fits_says_what_keeps_a_file_from_being_replayed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(backward_plan(), path)
    nothing = asked(backward(gathers=(), reductions=()), flags="default")
    assert fits(path, [asked(backward()), nothing]) == []
    lines = fits(path, [asked(backward(), region=3), asked(backward(reductions=()))])
    assert len(lines) == 2
    assert lines[0].endswith("region 3 backward [resident=1]: not in the file; it would be planned anew")
    assert "only in the file: reduce of blocks.1.weight" in lines[1]


# --- diff


@given(plans(), plans())
def test_diff_says_something_exactly_where_plans_differ(one: Plan, other: Plan) -> None:
    assert plan_changes(one, one, SIDES) == []
    assert bool(plan_changes(one, other, SIDES)) == (one != other)


def test_diff_says_what_differs() -> None:
    (stored,) = backward_plan().programs
    later = backward(reductions=(*backward().reductions[:2], reduction("blocks.0.weight", 3)))
    other = plan_of(
        (0, FLAGS, later, per_parameter_schedule(later)),
        (1, "default", backward(), fsdp2_schedule(backward())),
        mode="fsdp2",
        torch="2.15.0",
    )
    assert_expected_inline("\n".join(plan_changes(backward_plan(), other, SIDES)), "")
    kept = replace(backward_plan(), programs=(replace(stored, kept=("blocks.1",), chosen="fsdp2"),))
    assert_expected_inline("\n".join(plan_changes(backward_plan(), kept, SIDES)), "")
