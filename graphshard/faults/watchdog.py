"""Watches whether this rank stands at one launch or wait for too long, and answers when another rank asks.

Two threads, from the first compiled model with peers until the last one is gone. One looks at the Python frames of the
thread that runs a program, without the store, so that a store that does not answer cannot stop it. The other one
listens to the questions of other ranks (see `inquiry`).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from graphshard import env
from graphshard.agree.rank_store import Store
from graphshard.compat.groups import resolve_process_group
from graphshard.faults import inquiry
from graphshard.faults.activity import ENTRIES, Run, activity
from graphshard.faults.dumps import Dump, fault_name, write_dump
from graphshard.faults.inquiry import ANSWER_S, POLL_S, STORE_S, Question, within
from graphshard.faults.place import Place, frames_of, place_of
from graphshard.faults.sentence import sentence
from graphshard.faults.status import Status, status_of, user_line

log = logging.getLogger(__name__)

# Of a process that the watchdog ends: "internal software error" in sysexits.h.
EXIT_STATUS = 70
_SAMPLE_S = 0.5
_SAMPLES_PER_DEADLINE = 8
_FLUSH_S = 1.0
# Of what an error of another rank said.
_MAX_SAID = 600
# A rank that compiles says so at each poll.
_SILENCE_S = POLL_S + 1.0


class Watched(NamedTuple):
    """How long the programs of one model may stand still.

    Attributes:
        deadline_s: at one launch or wait.
        patience_s: likewise, where a rank that takes part in it compiles, and says so at each poll.
    """

    deadline_s: float
    patience_s: float


class _Standing(NamedTuple):
    where: tuple[object, ...]
    since: float  # of `time.monotonic`, in seconds


class Watchdog:
    """The watchdog of one process, in one default process group.

    Args:
        store: a connection of its own; None: there is none, and other ranks cannot be asked.
        models: by name; shared with who adds and removes them.
    """

    def __init__(self, store: Store | None, models: dict[str, Watched]) -> None:
        self._store = store
        self._models = models
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        self._group = weakref.ref(dist.group.WORLD)
        self._ended = threading.Event()
        self._standing: _Standing | None = None
        self._excused = -math.inf  # of `time.monotonic`, in seconds: when a peer was last seen compiling
        self._heard: dict[int, tuple[bytes, float]] = {}  # what ranks that compile have said, since when
        self._seen = 0  # questions
        self._past_alarm = ""
        work = [self._watch] if store is None else [self._watch, self._listen]
        self._threads = [threading.Thread(target=run, daemon=True, name="graphshard watchdog") for run in work]

    def start(self) -> None:
        """Starts the threads."""
        if (store := self._store) is not None:
            within(STORE_S, lambda: self._begin(store))
        for thread in self._threads:
            thread.start()

    def _begin(self, store: Store) -> None:
        """Tells what is in the store already from what comes: it may be of a run before this one."""
        self._seen, self._past_alarm = inquiry.latest_question(store), inquiry.latest_alarm(store)
        inquiry.say_compiling(store, self._rank, "")
        inquiry.say_alive(store, self._rank, "")
        inquiry.say_raised(store, self._rank, "")

    @property
    def serves(self) -> bool:
        """Whether it runs, in the default process group that there is now."""
        return not self._ended.is_set() and dist.is_initialized() and self._group() is dist.group.WORLD

    def stop(self, deadline_s: float = STORE_S) -> None:
        """Ends the threads; waits for them up to `deadline_s` seconds."""
        self._ended.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline_s)

    # -- what this rank does

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s()):
            with _lock:  # no model may be added meanwhile: it would count on this watchdog
                if not self._models or not self.serves:
                    self._ended.set()
                    return
            self._sample()

    def _interval_s(self) -> float:
        shortest = min((watched.deadline_s for watched in list(self._models.values())), default=_SAMPLE_S)
        return min(_SAMPLE_S, max(shortest / _SAMPLES_PER_DEADLINE, 0.02))

    def _sample(self) -> None:
        run = activity.run
        watched = None if run is None else self._models.get(run.model)
        if run is None or watched is None:
            self._standing = None
            return
        now = time.monotonic()
        frame = sys._current_frames().get(run.thread)  # noqa: SLF001 the one way there is
        where: list[object] = [run.number]
        while frame is not None and frame.f_code not in ENTRIES:
            where += [frame.f_code, frame.f_lasti]
            frame = frame.f_back
        if self._standing is None or self._standing.where != tuple(where):
            self._standing = _Standing(tuple(where), now)
        elif now - self._standing.since > watched.deadline_s:
            self._overdue(run, watched, self._standing)

    def _overdue(self, run: Run, watched: Watched, standing: _Standing) -> None:
        seconds = time.monotonic() - standing.since
        status = self._status(seconds)
        if status.doing != "collective" or activity.run is not run:
            return
        store = self._store
        reachable = True
        if store is not None:
            peers = [rank for rank in status.ranks if rank != self._rank]
            compiling = within(STORE_S, lambda: inquiry.read_compiling(store, peers))
            if compiling and seconds < watched.patience_s and self.alive(compiling):
                self._excused = time.monotonic()
                return
            reachable = compiling is not None
            if not compiling and time.monotonic() - self._excused < watched.deadline_s:
                return  # it has just finished, and runs the program now
        self._raise_alarm(status, store if reachable else None)

    def alive(self, compiling: Mapping[int, bytes]) -> bool:
        """Whether one of the ranks that say that they compile has said something else lately: it is not stopped, and
        was not ended before this run.
        """
        now = time.monotonic()
        for rank, text in compiling.items():
            if self._heard.get(rank, (b"", now))[0] != text:
                self._heard[rank] = (text, now)
        return any(now - self._heard[rank][1] < _SILENCE_S for rank in compiling)

    def _raise_alarm(self, status: Status, store: Store | None) -> None:
        past = self._past_alarm
        first = None if store is None else within(STORE_S, lambda: inquiry.raise_alarm(store, self._rank, past))
        if first is False:
            # Another rank was first: the listener answers it, and ends the process.
            time.sleep(POLL_S + ANSWER_S)
        said, question, dumped = self.asked(status, store if first else None, final=True)
        _write(f"graphshard watchdog: {said} ({dumped})")
        if store is not None and question is not None:
            within(STORE_S, lambda: inquiry.close(store, question))
            time.sleep(0.3)  # who hosts the store ends last
        _end()

    def asked(self, status: Status, store: Store | None, final: bool) -> tuple[str, Question | None, str]:
        """Asks the other ranks and writes the dump of this one: the sentence, the question, and where the dump is."""
        fault, question, others = fault_name(self._rank), None, None
        raised: dict[int, str] = {}
        if store is not None:
            question = within(STORE_S, lambda: inquiry.ask(store, self._rank, fault, final))
        if store is not None and (asked := question) is not None:
            peers = [rank for rank in self._ranks if rank != self._rank]
            others = within(ANSWER_S + STORE_S, lambda: inquiry.answers(store, asked, peers, ANSWER_S))
            silent = [rank for rank, answer in (others or {}).items() if answer is None]
            raised = within(STORE_S, lambda: inquiry.read_raised(store, silent)) or {}
        dumped = write_dump(env.fault_dir(), Dump(fault, time.time(), status, others, asked=True))
        said = sentence(status, others, raised)
        if store is not None and not final:  # an error, of which this process may end
            within(STORE_S, lambda: inquiry.say_raised(store, self._rank, said[:_MAX_SAID]))
        return said, question, dumped

    def failed(self, place: Place) -> str:
        """The sentence of a collective that failed on this rank; the others are asked."""
        run = activity.run
        assert run is not None
        status = own_status(self._rank, 0.0, place, "", failed=True)
        activity.end()
        activity.failure = (run.number, "a collective failed")
        said, _, dumped = self.asked(status, self._store, final=False)
        return f"{said} ({dumped})"

    def waited(self, said: str, missing: Sequence[int]) -> str:
        """The same of a rank that has waited for `missing` ranks in vain, at no collective: `said`."""
        ranks = tuple(sorted({self._rank, *missing}))
        status = replace(self._status(0.0), doing="failed", program="", text=said, ranks=ranks)
        told, _, dumped = self.asked(status, self._store, final=False)
        return f"{told} ({dumped})"

    def _status(self, seconds: float) -> Status:
        return own_status(self._rank, seconds, None, _traced(), failed=False)

    # -- what others ask

    def _listen(self) -> None:
        store = self._store
        assert store is not None
        try:
            beats, beating = 0, False
            while not self._ended.wait(POLL_S) and self.serves:
                if _traced() or activity.compiling is not None:
                    beats, beating = beats + 1, True
                    inquiry.say_alive(store, self._rank, str(beats))
                elif beating:
                    beating = False
                    inquiry.say_alive(store, self._rank, "")
                if (question := inquiry.read_question(store, self._seen + 1)) is not None:
                    self._seen = question.number
                    if question.rank != self._rank:
                        self._reply(store, question)
        except RuntimeError as error:  # the store has ended: so have the ranks that would ask
            log.info("graphshard: the watchdog listens no more: %s", error)

    def _reply(self, store: Store, question: Question) -> None:
        standing = self._standing
        status = self._status(0.0 if standing is None else time.monotonic() - standing.since)
        inquiry.answer(store, question, status)
        dumped = write_dump(env.fault_dir(), Dump(question.fault, time.time(), status))
        if question.final:
            _write(f"graphshard watchdog: rank {self._rank} ends, as rank {question.rank} waited too long; {dumped}")
            within(ANSWER_S + 2 * STORE_S, lambda: inquiry.wait_closed(store, question, ANSWER_S + STORE_S))
            _end()


def own_status(rank: int, seconds: float, place: Place | None, traces: str, failed: bool) -> Status:
    """What this process is doing.

    Args:
        rank: of this process.
        seconds: that it has done it for.
        place: where a collective failed; None: where the thread that runs a program stands.
        traces: what Dynamo traces; empty: nothing.
        failed: whether it failed there.
    """
    run = activity.run
    ranks: tuple[int, ...] = ()
    if run is not None:
        if place is None:
            frame = sys._current_frames().get(run.thread)  # noqa: SLF001 the one way there is
            place = place_of(frames_of(frame, ENTRIES), run.record, run.shards)
        if place is not None:
            group = resolve_process_group(place.group) if place.group else None
            ranks = tuple(dist.get_process_group_ranks(group))
    return status_of(rank, activity, place, ranks, seconds, traces, failed)


def _traced() -> str:
    # Noted by the thread that does it: to walk its frames from here, while Dynamo has its own, crashes Python 3.11.
    return "what Dynamo traces" if activity.tracing and activity.run is None else ""


def _write(line: str) -> None:
    def write() -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    within(_FLUSH_S, write)


def _end() -> None:
    within(_FLUSH_S, sys.stdout.flush)
    os._exit(EXIT_STATUS)


_models: dict[str, Watched] = {}
_watchdogs: list[Watchdog] = []  # the one that runs, if one does
_lock = threading.Lock()


def watch_model(name: str, owner: object, watched: Watched, connect: Callable[[], Store | None]) -> None:
    """Watches the programs of a model as long as `owner` lives.

    Args:
        name: of the model.
        owner: its engine.
        watched: its deadlines.
        connect: makes a connection for the watchdog, if none runs yet.
    """
    with _lock:
        _models[name] = watched
        weakref.finalize(owner, _models.pop, name, None).atexit = False
        if running() is None:
            _watchdogs[:] = [Watchdog(connect(), _models)]
            _watchdogs[0].start()


def running() -> Watchdog | None:
    """The watchdog that runs in this default process group."""
    return next((found for found in _watchdogs if found.serves), None)


def waited(said: str, missing: Sequence[int]) -> str:
    """What a rank says that has waited in vain (`said`), with its line and what the `missing` ranks are doing."""
    said = f"{said} ({user_line()})"
    return said if (watchdog := running()) is None else watchdog.waited(said, missing)


def is_watched(model: str) -> bool:
    """Whether a model's programs are watched."""
    return model in _models


@atexit.register
def _stop() -> None:
    # A thread that comes back from C++ while the interpreter ends would abort the process.
    for found in _watchdogs:
        found.stop()


def _forget() -> None:
    """In a forked process: the threads stayed behind."""
    global _lock
    _lock = threading.Lock()
    _models.clear()
    _watchdogs.clear()


os.register_at_fork(after_in_child=_forget)
