"""One sentence: which rank waits where, for which parameters, and which ranks are missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from graphshard.faults.status import Status

_SHOWN_FQNS = 2
_SHOWN_RANKS = 4


def sentence(
    first: Status, others: Mapping[int, Status | None] | None, raised: Mapping[int, str] = MappingProxyType({})
) -> str:
    """What happened, in one sentence.

    Args:
        first: the rank that waited too long, or whose collective failed.
        others: what the other ranks answered; None for one that did not. None: the store did not answer.
        raised: what the last error of a rank that did not answer had said.
    """
    if first.doing == "failed" and not first.program:
        head = first.text
    elif first.doing == "failed":
        head = f"rank {first.rank} could not go on {_place(first)}"
    else:
        stands = "has waited" if first.what != "launch" else "has stood for"
        head = f"rank {first.rank} {stands} {first.seconds:.0f} s {_place(first)}"
    if len(first.ranks) < 2:
        return head
    if others is None:
        return f"{head}; what the other ranks do is not known: the store does not answer"
    missing = [rank for rank in first.ranks if rank != first.rank and not _with(first, others.get(rank))]
    if not missing:
        return f"{head}; all ranks of its group are in it: look for the network, or an earlier difference between ranks"
    phrases: dict[tuple[str, str], list[int]] = {}
    for rank in missing:
        phrases.setdefault((_phrase(first, others.get(rank)), raised.get(rank, "")), []).append(rank)
    said = []
    for (_, error), ranks in phrases.items():
        phrase = f"{_named(ranks)} {_phrase(first, others.get(ranks[0]), len(ranks) > 1)}"
        said.append(phrase + (f", its last error: {error}" if error else ""))
    difference = next(filter(None, (_difference(first, others.get(rank)) for rank in missing)), "")
    return "; ".join([head, *said, *([difference] if difference else [])])


def bucket_text(status: Status) -> str:
    """A bucket and the first of its parameters."""
    if not status.bucket:
        return f"launch or wait {status.index} of its program" if status.index >= 0 else "a collective"
    if not status.parameters:
        return f"{status.bucket!r}, a collective of the model's own"
    names = list(status.fqns[:_SHOWN_FQNS]) + ["..."] * (status.parameters > _SHOWN_FQNS)
    return f"bucket {status.bucket!r} ({', '.join(names)})"


def _place(status: Status) -> str:
    where = "at the launch of" if status.what == "launch" else "for"
    return f"in {status.program} {where} {bucket_text(status)}"


def _with(first: Status, other: Status | None) -> bool:
    return other is not None and other.doing == "collective" and _at(other) == _at(first)


def _at(status: Status) -> tuple[int, str, str, int, str]:
    return status.calls, status.program, status.what, status.index, status.bucket


def _phrase(first: Status, other: Status | None, several: bool = False) -> str:
    are, they = ("are", "they") if several else ("is", "it")
    if other is None:
        return f"{'do' if several else 'does'} not answer: {they} {are} dead or stopped"
    calls = f"(call {other.calls}, rank {first.rank} at {first.calls})"
    if other.doing == "compiles":
        doing = f"compiling {other.text}, {other.seconds:.0f} s so far"
    elif other.doing == "failed":
        doing = "behind a collective that failed there"
    elif other.doing == "collective":
        doing = f"in {other.program}, at {bucket_text(other)}"
    elif other.doing == "program":
        doing = f"computing in {other.program}"
    else:
        doing = f"in {other.where or 'code without a line'}"
    return f"{are} not in it: {they} {are} {doing} {calls}"


def _named(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    more = len(found) - _SHOWN_RANKS
    shown = ", ".join(map(str, found[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    return ("rank " if len(found) == 1 else "ranks ") + shown


def _difference(first: Status, other: Status | None) -> str:
    """The first run of a program that was another one on another rank, as far as both remember."""
    if other is None:
        return ""
    theirs = dict(other.recent)
    for number, program in first.recent:
        if (ran := theirs.get(number, program)) != program:
            return f"they differ since call {number}: {program} on rank {first.rank}, {ran} on rank {other.rank}"
    return ""
