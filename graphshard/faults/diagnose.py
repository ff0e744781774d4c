"""``graphshard diagnose``: what happened, read from the dumps of the ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from graphshard.faults.dumps import Dump, read_dumps
from graphshard.faults.sentence import bucket_text, sentence
from graphshard.faults.status import Status
from graphshard.reporting.table_text import write_table


def diagnose(folder: Path, out: TextIO) -> None:
    """Writes one sentence about the latest fault, and what each rank was doing.

    Raises:
        ValueError: there is no dump.
    """
    dumps, refused = read_dumps(folder)
    if not dumps:
        because = f"; {len(refused)} files are none, such as {refused[0]}" if refused else ""
        raise ValueError(f"diagnose: got no dump in '{folder}', want those of a fault (GRAPHSHARD_FAULTS){because}")
    latest = max(dumps, key=lambda dump: dump.written).fault
    ours = [dump for dump in dumps if dump.fault == latest]
    first, others = first_and_others(ours)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(min(dump.written for dump in ours)))
    out.write(f"{when}: {sentence(first, others)}\n\n")
    columns = (">rank", "host", ">pid", "does", ">call", "program", "collective", "at")
    known: dict[int, Status | None] = {**(others or {}), first.rank: first}
    write_table(out, columns, [_row(rank, known[rank]) for rank in sorted(known)])
    if not any(dump.asked for dump in ours):
        out.write(
            "the dump of the rank that asked the others is not here: what it knew of ranks without a dump is missing\n"
        )
    for line in refused:
        out.write(f"not read: {line}\n")
    if earlier := len({dump.fault for dump in dumps}) - 1:
        out.write(f"{earlier} other faults in this folder are older\n")


def first_and_others(dumps: list[Dump]) -> tuple[Status, Mapping[int, Status | None] | None]:
    """Of the dumps of one fault: the rank that it is told from, and what is known of the others."""
    # Without the dump of the rank that asked: the one that waited longest.
    first = max(dumps, key=lambda dump: (dump.asked, dump.status.doing == "collective", dump.status.seconds))
    written = {dump.status.rank: dump.status for dump in dumps if dump is not first}
    if first.asked and first.answers is None and not written:
        return first.status, None
    answered = {rank: said for rank, said in (first.answers or {}).items() if rank != first.status.rank}
    if first.asked:
        return first.status, {**answered, **written}
    # Ranks without a dump may have written it elsewhere: nothing is said of them.
    known = tuple(rank for rank in first.status.ranks if rank in written or rank == first.status.rank)
    return replace(first.status, ranks=known), written


def _row(rank: int, status: Status | None) -> list[str]:
    if status is None:
        return [str(rank), "", "", "does not answer", "", "", "", ""]
    doing = status.doing if not status.seconds else f"{status.doing}, {status.seconds:.0f} s"
    bucket = f"{status.what} of {bucket_text(status)}" if status.what else ""
    number = str(status.calls)
    return [str(rank), status.host, str(status.pid), doing, number, status.program, bucket, status.where]
