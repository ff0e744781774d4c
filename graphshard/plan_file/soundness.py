"""Whether a plan file contradicts itself: found when it is read, before any model is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from graphshard.graph.plan import END
from graphshard.plan_file.contents import FORMAT, VERSION, Plan, StoredProgram
from graphshard.plan_file.outline import Outline, outline_hash, problem_of
from graphshard.planner import check_schedule


def check_format(content: object) -> None:
    """Raises:
    ValueError: `content` of a file is of no plan file, or of one of another version.
    """
    if not isinstance(content, dict):
        raise ValueError(f"the file: got {content!r:.60}, want fields by name")
    for name, want in (("format", FORMAT), ("version", VERSION)):
        if name in content and content[name] != want:
            raise ValueError(f"{name}: got {content[name]!r:.60}, want {want!r}")


def check_sound(plan: Plan) -> None:
    """Raises:
    ValueError: a part of `plan` contradicts another; says which.
    """
    if not plan.programs:
        raise ValueError("programs: got none, want at least one")
    for number, program in enumerate(plan.programs):
        where = f"programs[{number}]"
        for error in (*_outline_errors(program.outline, f"{where}.outline"), *_errors(program, where)):
            raise ValueError(error)
        try:
            check_schedule(problem_of(program.outline), program.schedule)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        got, want = program.outline_hash, outline_hash(program.outline)
        if got != want:
            raise ValueError(f"{where}.outline_hash: got {got!r}, want {want!r}, the hash of its outline")
        _check_kept(plan, program, where)
    names = [(p.region, p.outline.direction, p.flags, p.outline_hash) for p in plan.programs]
    if names != sorted(set(names)):
        raise ValueError("programs: want each once, by region, direction, flags and hash")


def _check_kept(plan: Plan, program: StoredProgram, where: str) -> None:
    """Which units stay gathered is decided once for a region, from a forward to its backward."""
    first = plan.find_forward(program.region) if program.outline.direction == "forward" else None
    want = None if first is None else first.kept
    if program.kept != want:
        as_first = "null, as it is no forward" if first is None else f"{want}, as the first forward of the region"
        raise ValueError(f"{where}.kept: got {program.kept}, want {as_first}")
    units = {member.unit for member in program.outline.members}
    if unknown := sorted(set(program.kept or ()) - units):
        raise ValueError(f"{where}.kept: got {unknown[0]!r}, want units of the outline's members")


def _outline_errors(outline: Outline, where: str) -> Iterator[str]:
    ops, groups = len(outline.ops), len(outline.group_ranks)
    yield from _repeated((op.name for op in outline.ops), f"{where}.ops")
    yield from _repeated((f"{member.kind} of {member.fqn}" for member in outline.members), f"{where}.members")
    kinds = [member.kind for member in outline.members]
    if kinds != sorted(kinds):
        yield f"{where}.members: want gathers, then reductions"
    for number, member in enumerate(outline.members):
        here = f"{where}.members[{number}]"
        uses = (member.first_use, member.last_use)
        if [use is None for use in uses] != [member.kind == "reduce"] * 2:
            yield f"{here}: got first_use, last_use {uses}, want positions of a gather, null of a reduction"
        positions = {"ready": member.ready, "first_use": uses[0], "last_use": uses[1]}
        yield from _beyond(positions, ops + 1, here, "positions")
        yield from _beyond({"group": member.group, "then": member.then}, groups, here, "groups")
    for number, own in enumerate(outline.own):
        here = f"{where}.own[{number}]"
        yield from _beyond({"launch": own.launch, "wait": own.wait}, ops + 1, here, "positions")
        yield from _beyond({"group": own.group}, groups, here, "groups")


def _errors(program: StoredProgram, where: str) -> Iterator[str]:
    yield from _repeated((bucket.name for bucket in program.buckets), f"{where}.buckets")
    known = dict.fromkeys((member.kind, member.fqn) for member in program.outline.members)
    for number, bucket in enumerate(program.buckets):
        for fqn in bucket.members:
            if (bucket.kind, fqn) not in known:
                want = f"members of kind {bucket.kind!r} of the outline"
                yield f"{where}.buckets[{number}].members: got {fqn!r}, want {want}"
    bucketed = Counter((bucket.kind, fqn) for bucket in program.buckets for fqn in bucket.members)
    for kind, fqn in known:
        if bucketed[kind, fqn] != 1:
            yield f"{where}.buckets: got {fqn!r} in {bucketed[kind, fqn]} of kind {kind!r}, want it in one"
    position = {op.name: number for number, op in enumerate(program.outline.ops)} | {END: len(program.outline.ops)}
    names = {bucket.name for bucket in program.buckets}
    for number, step in enumerate(program.steps):
        here = f"{where}.steps[{number}]"
        if step.bucket not in names:
            yield f"{here}.bucket: got {step.bucket!r}, want the name of one of the buckets"
        if step.before not in position:
            yield f"{here}.before: got {step.before!r}, want the name of an op of the outline, or '' for the end"
        elif step.position != position[step.before]:
            yield f"{here}.position: got {step.position}, want {position[step.before]}, that of {step.before!r}"
    yield from _impossible(program, f"{where}.predicted")


def _impossible(program: StoredProgram, where: str) -> Iterator[str]:
    predicted = program.predicted
    for name, value, most, of in (
        ("peak_bytes", predicted.peak_bytes, program.budget_bytes, "budget_bytes"),
        ("lower_bound_us", predicted.lower_bound_us, predicted.step_us, "step_us"),
        ("exposed_us", predicted.exposed_us, predicted.step_us, "step_us"),
    ):
        if not 0 <= value <= most:
            yield f"{where}.{name}: got {value}, want 0 to {most}, its {of}"


def _repeated(names: Iterable[str], where: str) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{where}: got {name!r} {count} times, want it once"


def _beyond(values: dict[str, int | None], count: int, where: str, what: str) -> Iterator[str]:
    for name, value in values.items():
        if value is not None and value >= count:
            yield f"{where}.{name}: got {value}, want one of {count} {what}"
