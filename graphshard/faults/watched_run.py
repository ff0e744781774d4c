"""Runs a program, or lowers one, so that the watchdog knows; errors of its collectives say which one failed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TypeVar

import torch
import torch.distributed as dist

from graphshard.compat.dynamo import tell_of_compiles, uncaptured
from graphshard.compat.store import default_store
from graphshard.errors import CommunicationFailed
from graphshard.faults.activity import ENTRIES, activity
from graphshard.faults.inquiry import WAITS, say_compiling
from graphshard.faults.place import frames_of_error, place_of
from graphshard.faults.sentence import sentence
from graphshard.faults.watchdog import is_watched, own_status, running
from graphshard.reporting.measuring import timed
from graphshard.reporting.progress import progress
from graphshard.reporting.report import NamedShard, ProgramRecord

log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")


def run_program(
    model: str, record: ProgramRecord, run: Callable[[A], R], argument: A, shards: Sequence[NamedShard]
) -> R:
    """``run(argument)``, a program or one of its halves.

    Args:
        model: its name.
        record: of the program.
        run: the program.
        argument: of it.
        shards: of the parameters that it runs for, in the order of `ProgramRecord.parameters`.

    Raises:
        CommunicationFailed: one of its collectives failed.
    """
    activity.begin(get_ident(), model, record, shards)
    try:
        with timed(record, shards):
            return run(argument)
    except RuntimeError as error:
        failure = _located(error)
        if failure is None:
            raise
        raise failure from error
    finally:
        activity.run = None


ENTRIES.add(run_program.__code__)


def note_compiles() -> None:
    """Has it noted when Dynamo compiles. Before each call that it may compile: `torch.compiler.reset` ends it."""
    tell_of_compiles(_begin_tracing, _end_tracing)


@uncaptured
def _begin_tracing(_: object) -> None:
    activity.tracing = True
    progress.begin("torch.compile traces")


@uncaptured
def _end_tracing(_: object) -> None:
    activity.tracing = False
    progress.end()


def _located(error: RuntimeError) -> CommunicationFailed | None:
    """What to raise for an error of a program; None: no collective raised it."""
    run = activity.run
    if run is None or isinstance(error, (CommunicationFailed, torch.OutOfMemoryError)):
        return None
    place = place_of(frames_of_error(error), run.record, run.shards)
    if place is None:
        return None
    watchdog = running() if is_watched(run.model) else None
    if watchdog is None:
        said = sentence(own_status(dist.get_rank(), 0.0, place, "", failed=True), None)
    else:
        said = watchdog.failed(place)
    return CommunicationFailed(f"graphshard: {said}; the error: {str(error).strip()}")


@contextmanager
def compiling(model: str, what: str) -> Iterator[None]:
    """Inside, this rank says in the store that it compiles: who waits for it has more patience.

    Args:
        model: its name.
        what: in words.
    """
    outer = activity.compiling
    activity.set_compiling(what)
    _say(model, what)
    try:
        progress.begin(f"graphshard compiles {what} of {model}")
        yield
    finally:
        progress.end()
        activity.compiling = outer
        _say(model, "" if outer is None else outer[0])


@contextmanager
def waiting(model: str) -> Iterator[None]:
    """Inside, this rank waits for others: who waits for it has no more patience for its compilation.

    Args:
        model: its name.
    """
    outer = "" if activity.compiling is None else activity.compiling[0]
    _say(model, f"{WAITS}, {outer}" if outer else WAITS)
    try:
        yield
    finally:
        _say(model, outer)


def _say(model: str, what: str) -> None:
    if is_watched(model):
        try:
            say_compiling(default_store(), dist.get_rank(), what)
        except RuntimeError as error:  # its process has ended: nobody is there to read it
            log.warning("graphshard: could not tell the other ranks about compiling: %s", error)
