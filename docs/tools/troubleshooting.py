"""Puts every message of graphshard where docs/troubleshooting.md says its cause and its fix.

python -m docs.tools.troubleshooting           writes the lists of messages anew
python -m docs.tools.troubleshooting --check   says what is not as the sources have it; exit status 1

A list stands between two comments, under the text that explains it. The first comment names where the messages come
from, below `graphshard/`: folders, files, or functions of a file. The longest name that fits a message takes it.

    <!-- messages: api.py api.py:_check_mesh cost/ -->
    <!-- end of messages -->
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from docs.tools.messages import ROOT, Message, Sources, Unread

PAGE = ROOT / "docs" / "troubleshooting.md"
END = "<!-- end of messages -->"
PART, RAISED = "part of a message", "raised"
# Errors that are caught, whose words stand in a message or a line of the report.
INSIDE = ("part", "Unchecked", "OtherGradients", "NotRepeated", "OrderImpossible", "Communicates")
_LIST = re.compile(rf"<!-- messages: (?P<places>.*?) -->\n(?P<lines>.*?){END}", re.DOTALL)
# What is raised or said in words that are not written there: where the words come from.
ELSEWHERE = {
    "agree/agreement.py:Posted.compare": "what `_told` returned",
    "calibrate.py:main": "an error of hardware_file.py",
    "compat/block_trace.py": "ends a trace of AOTAutograd's, and is caught around it",
    "compat/body_strides.py": "is caught where a body is compiled",
    "compat/dynamo.py:leave_frame": "Dynamo takes it",
    "compat/running_trace.py:trace_again": "Dynamo takes it",
    "cost/hardware_file.py:_hardware": "an error of rates.py, with its place",
    "errors.py:PassFailed": "what check.py says",
    "errors.py:VerifyError": "what verify.py says",
    "examining/command.py:_called": "what the user's function raised",
    "faults/watchdog.py:_write": "a sentence of sentence.py",
    "fsdp2/sharding_arguments.py:check": "a refusal, made in the same file",
    "graph/user_comms.py:_unit": "words of ModelDeleted",
    "graph/verify.py": "an invariant's, with its place in the graph",
    "lowering/driver.py:leaves_out": "an error of verify.py",
    "lowering/traced_blocks.py:_compiled": "what `BlockCall` says",
    "lowering/twins.py": "TwinsMoved, ModelDeleted, or what Dynamo is to trace once more",
    "plan_file/decoding.py": "`got ..., want ...` with a place in the file; text.py says which file",
    "plan_file/soundness.py": "`got ..., want ...` with a place in the file; text.py says which file",
    "planner/problem.py": "a number that is none, with its place",
    "planning/planning.py:RegionPlanning._best_schedule": "an error of choose.py",
    "runtime/uncompiled.py:gathering_one_by_one": "words of ModelDeleted",
    "runtime/entry_points.py:EntryPoints.call": "an error of graphshard's own, out of Dynamo's",
    "runtime/region_lowering.py:RegionLowering": "a note of planning.py or within_budget.py",
    "scale/trace.py": "ends a trace, and is caught around it",
    "testing/": "two values that a test compares",
    "validation/": "a node of the graph, as part of a message of check.py",
}


@dataclass(frozen=True)
class Family:
    """One list of the page.

    Attributes:
        heading: that it stands under, `""`: none.
        places: that its messages come from.
        lines: that stand there.
        span: of `lines` in the page.
    """

    heading: str
    places: tuple[str, ...]
    lines: str
    span: tuple[int, int]


def families(page: str) -> list[Family]:
    """The lists of a page."""
    found = []
    for match in _LIST.finditer(page):
        headings = re.findall(r"^#{2,} (.+)$", page[: match.start()], re.MULTILINE)
        heading = headings[-1] if headings else ""
        found.append(Family(heading, tuple(match["places"].split()), match["lines"], match.span("lines")))
    return found


def fits(place: str, said: Message | Unread) -> bool:
    """Whether `place` names where something is said."""
    file, _, scope = place.partition(":")
    in_file = said.file == file or (file.endswith("/") and said.file.startswith(file))
    return in_file and (not scope or said.scope == scope or said.scope.startswith(f"{scope}."))


def longest(places: Iterable[str], said: Message | Unread) -> str:
    """The most exact of the places that fit; `""`: none does."""
    return max((place for place in places if fits(place, said)), key=len, default="")


def shown(messages: Sequence[Message]) -> str:
    """The lines of a list: each text once, with the names of what raises it."""
    by_text: dict[str, list[str]] = {}
    for message in messages:
        names = by_text.setdefault(message.text, [])
        name = PART if message.how in INSIDE or message.how.startswith("_") else message.how
        if name not in names:
            names.append(name)
    lines = []
    for text, names in by_text.items():
        ticks = "`" * (1 + max([len(run) for run in re.findall("`+", text)], default=0))
        pad = " " if len(ticks) > 1 else ""
        told = [name for name in names if name not in (PART, RAISED)] or [PART]
        lines.append(f"* {ticks}{pad}{text}{pad}{ticks} ({', '.join(told)})\n")
    return "".join(lines)


def written(page: str, said: Sequence[Message | Unread]) -> tuple[str, list[str]]:
    """The page with its lists made anew, and what is wrong with it, a line each."""
    found = families(page)
    places = [place for family in found for place in family.places]
    wrong = [f"{place}: in two lists; want one" for place, same in groupby(sorted(places)) if len(list(same)) > 1]
    wrong += [f"the list of {', '.join(family.places)} has no heading" for family in found if not family.heading]
    taken: dict[str, list[Message]] = {place: [] for place in places}
    used = set()
    for one in said:
        if isinstance(one, Unread):
            used.add(place := longest(ELSEWHERE, one))
            if not place:
                where = f"graphshard/{one.file}: {one.scope}: {one.code}"
                wrong.append(f"{where}: its words are not seen; write them there, or say in ELSEWHERE where they are")
        elif place := longest(places, one):
            taken[place].append(one)
        else:
            wrong.append(f"graphshard/{one.file}: {one.scope}: in no list of {PAGE.name}: {one.text}")
    wrong += [f"ELSEWHERE: nothing is unread in {place}; take it out" for place in ELSEWHERE if place not in used]
    wrong += [f"{PAGE.name}: nothing is said in {place}; take it out" for place in places if not taken[place]]
    for family in reversed(found):
        begin, end = family.span
        page = page[:begin] + shown([one for place in family.places for one in taken[place]]) + page[end:]
    return page, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    made, wrong = written(page, list(Sources().said()))
    if options.check:
        if made != page:
            wrong.append(f"{PAGE.name}: not as the sources have it; run python -m docs.tools.troubleshooting")
    else:
        PAGE.write_text(made, encoding="utf-8")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
