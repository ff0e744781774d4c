"""What differs between two outlines, or two plans, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest

from graphshard.graph.plan import END, PlannedBucket
from graphshard.plan_file.contents import Plan, StoredProgram, StoredStep
from graphshard.plan_file.outline import MemberOutline, OpOutline, Outline, OwnOutline

_SHOWN = 3
_SIZES = ("wire_bytes", "full_bytes", "shard_bytes", "copied_bytes")
_PLACES = ("key", "group", "then", "ready", "first_use", "last_use")


def outline_changes(old: Outline, new: Outline, sides: tuple[str, str]) -> list[str]:
    """What differs, the parameters first; nothing exactly if the outlines are equal.

    Args:
        old: outline of a program.
        new: of the same.
        sides: what to call them: ``("in the file", "in the model")``.
    """
    found = [*_member_changes(_members(old), _members(new), sides)]
    if old.group_ranks != new.group_ranks:
        found.append(f"ranks of process groups: {_versus(old.group_ranks, new.group_ranks, sides)}")
    for number, (a, b) in enumerate(zip_longest(old.ops, new.ops)):
        if a != b:
            found.append(f"first op that differs: number {number} is {_versus(_op(a), _op(b), sides)}")
            break
    if old.own != new.own:
        changed = next((a, b) for a, b in zip_longest(old.own, new.own) if a != b)
        found.append(f"the model's own collectives: {_versus(*changed, sides)}")
    if old.direction != new.direction:
        found.append(f"direction: {_versus(old.direction, new.direction, sides)}")
    if found or old == new:
        return found
    return [*_place_changes(_members(old), _members(new), sides)] or [
        f"order of parameters: {_versus(listed(list(_members(old))), listed(list(_members(new))), sides)}"
    ]


def _members(outline: Outline) -> dict[str, MemberOutline]:
    return {f"{member.kind} of {member.fqn}": member for member in outline.members}


def _member_changes(
    old: dict[str, MemberOutline], new: dict[str, MemberOutline], sides: tuple[str, str]
) -> Iterator[str]:
    for mine, others, side in ((old, new, sides[0]), (new, old, sides[1])):
        known = {member.fqn for member in others.values()}
        if lacking := list(dict.fromkeys(member.fqn for member in mine.values() if member.fqn not in known)):
            yield f"parameters only {side}: {listed(lacking)}"
        if partly := [name for name, member in mine.items() if name not in others and member.fqn in known]:
            yield f"only {side}: {listed(partly)}"
    for title, names in (("sizes", _SIZES), ("units", ("unit",))):
        if changed := [*_field_changes(old, new, names, sides)]:
            yield f"{title}: {listed(changed)}"


def _place_changes(
    old: dict[str, MemberOutline], new: dict[str, MemberOutline], sides: tuple[str, str]
) -> Iterator[str]:
    if changed := [*_field_changes(old, new, _PLACES, sides)]:
        yield f"places: {listed(changed)}"


def _field_changes(
    old: dict[str, MemberOutline], new: dict[str, MemberOutline], names: Sequence[str], sides: tuple[str, str]
) -> Iterator[str]:
    """The first field of each member that differs."""
    for title, member in old.items():
        if title in new:
            changed = (name for name in names if getattr(member, name) != getattr(new[title], name))
            if name := next(changed, None):
                versus = _versus(getattr(member, name), getattr(new[title], name), sides)
                yield f"{title} has {name} {versus}"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _versus(old: object, new: object, sides: tuple[str, str]) -> str:
    return f"{_plain(old)} {sides[0]} and {_plain(new)} {sides[1]}"


def _plain(value: object) -> str:
    if isinstance(value, OwnOutline):
        return f"{value.name} (group {value.group}, launch {value.launch}, wait {value.wait})"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value)


def _op(op: OpOutline | None) -> str:
    return "the end" if op is None else f"{op.name} of {op.num_bytes} bytes"


def plan_changes(old: Plan, new: Plan, sides: tuple[str, str]) -> list[str]:
    """What differs between two plans, one line each, those of a program indented below its name; nothing exactly if
    they are equal.

    Args:
        old: a plan.
        new: another.
        sides: what to call them: ``("in a.json", "in b.json")``.
    """
    found = []
    for entry in fields(Plan):
        before, after = getattr(old, entry.name), getattr(new, entry.name)
        if entry.name != "programs" and before != after:
            if entry.name == "hardware":
                before, after = (f"{costs.name} ({costs.fingerprint})" for costs in (before, after))
            found.append(f"{entry.name}: {_versus(before, after, sides)}")
    for a, b in _paired(old, new):
        if a is None or b is None:
            lone = a or b
            assert lone is not None
            found.append(f"{lone.name}: only {sides[0] if b is None else sides[1]}")
        elif lines := [*_program_changes(a, b, sides)]:
            found += [f"{a.name}:", *(f"  {line}" for line in lines)]
    return found


def _paired(old: Plan, new: Plan) -> Iterator[tuple[StoredProgram | None, StoredProgram | None]]:
    """Programs of one name, those of one hash first."""
    names = [(p.region, p.outline.direction, p.flags) for plan in (old, new) for p in plan.programs]
    for name in sorted(set(names)):
        before, after = list(old.find(*name)), list(new.find(*name))
        for a in list(before):
            if b := next((b for b in after if b.outline_hash == a.outline_hash), None):
                before.remove(a)
                after.remove(b)
                yield a, b
        yield from zip_longest(before, after)


def _program_changes(old: StoredProgram, new: StoredProgram, sides: tuple[str, str]) -> Iterator[str]:
    yield from (f"inputs: {line}" for line in outline_changes(old.outline, new.outline, sides))
    before, after = ({bucket.name: bucket for bucket in program.buckets} for program in (old, new))
    for mine, others, side in ((before, after, sides[0]), (after, before, sides[1])):
        for name, bucket in mine.items():
            if name not in others:
                yield f"bucket {name}: only {side}: {listed(bucket.members)}"
    for name, bucket in before.items():
        if name in after and after[name] != bucket:
            yield f"bucket {name}: {_versus(_size(bucket), _size(after[name]), sides)}"
            for number, (a, b) in enumerate(zip_longest(bucket.members, after[name].members)):
                if a != b:
                    yield f"bucket {name}: first member that differs: number {number} is {_versus(a, b, sides)}"
                    break
    if list(before) != list(after) and set(before) == set(after):
        yield f"order of buckets: {_versus(listed([*before]), listed([*after]), sides)}"
    places, now = ({(step.bucket, step.step): step for step in program.steps} for program in (old, new))
    moved = [key for key in places if key in now and places[key] != now[key]]
    for key in moved:
        yield f"{key[1]} of {key[0]}: {_versus(_place(places[key]), _place(now[key]), sides)}"
    common = [[(s.bucket, s.step) for s in p.steps if s.bucket in before and s.bucket in after] for p in (old, new)]
    if not moved and common[0] != common[1]:
        old_first, new_first = next((a, b) for a, b in zip_longest(*common) if a != b)
        named = _versus(f"{old_first[1]} of {old_first[0]}", f"{new_first[1]} of {new_first[0]}", sides)
        yield f"order of steps: first {named}"
    if old.kept != new.kept:
        yield f"kept: {_versus(_units(old.kept), _units(new.kept), sides)}"
    for name in ("chosen", "budget_bytes"):
        if getattr(old, name) != getattr(new, name):
            yield f"{name}: {_versus(getattr(old, name), getattr(new, name), sides)}"
    for entry in fields(old.predicted):
        got = [getattr(program.predicted, entry.name) for program in (old, new)]
        if got[0] != got[1]:
            yield f"predicted {entry.name}: {_versus(got[0], got[1], sides)}"


def _units(kept: tuple[str, ...] | None) -> str:
    return "FSDP2's" if kept is None else ", ".join(unit or "root" for unit in kept)


def _size(bucket: PlannedBucket) -> str:
    return f"{bucket.kind} of {len(bucket.members)}"


def _place(step: StoredStep) -> str:
    return "at the end" if step.before == END else f"before {step.before} (position {step.position})"
