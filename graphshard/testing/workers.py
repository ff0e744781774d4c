"""Pools of worker processes, one per rank, that stay alive for the whole test session.

Starting Python, torch and a process group takes seconds, a test of a small model a fraction of one. A `WorkerPool` is
started when it is first used; every task gets a process group, a store namespace, seeds and Dynamo caches of its own.

    results = pool(2).run(function, argument)   # a list, by rank

On CPU, workers are forks of one process that has imported torch and started no thread: a new pool is ready in a
fraction of a second. Each wait has a deadline. A rank that raises, dies or hangs fails the task by name, with its
traceback or the stacks of its threads, and retires the pool: the next task starts a fresh one.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graphshard.testing.devices import check_device, device_environment
from graphshard.testing.environment import exported, worker_environment
from graphshard.testing.failures import Kind, RankFailed, RankFailure
from graphshard.testing.functions import FunctionName
from graphshard.testing.stacks import dump_stack, innermost_frame, last_output
from graphshard.testing.worker_main import Reply, Station, Task, serve

T = TypeVar("T")

START_TIMEOUT_S = 180.0
# How long the other ranks may go on after one has failed: enough to raise by themselves, as the peers of a dead rank
# do.
GRACE_S = 3.0
EXIT_TIMEOUT_S = 5.0
# The recorder holds the code of all that launched a collective, and Dynamo with it what it compiled: a pool's memory,
# and the collector's time, would grow with every task.
NO_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}


@dataclass
class _Worker:
    station: Station
    process: BaseProcess
    connection: Connection


class WorkerPool:
    """`world_size` processes, ranks of one process group per task.

    Args:
        world_size: number of ranks.
        seed: seeds Python's and torch's random numbers before each task, the same on every rank.
        device: ``"cpu"`` or ``"cuda"``: what ranks compute on. Each takes one GPU, and shares it where there are fewer.
        backend: of the process groups: ``"gloo"``, or, for GPUs of their own, ``"nccl"``.

    Raises:
        ValueError: an argument is not one of those above.
        RuntimeError: there is no such device.
    """

    def __init__(self, world_size: int, *, seed: int = 0, device: str = "cpu", backend: str = "gloo") -> None:
        if world_size < 1:
            raise ValueError(f"world_size: got {world_size}, want at least 1")
        check_device(device, backend)
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.backend = backend
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: TCPStore | None = None
        self._tasks = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty before the first task and after a failed one."""
        return tuple(worker.process.pid or -1 for worker in self._workers)

    def run(self, function: Callable[..., T], *args: object, timeout_s: float = 120.0) -> list[T]:
        """Runs `function(*args)` on every rank.

        Args:
            function: a module-level function; it finds its rank by `torch.distributed.get_rank()`.
            args: picklable arguments, the same for each rank.
            timeout_s: how long the slowest rank may take, the start of the pool not counted.

        Returns:
            The results, which must pickle, by rank.

        Raises:
            TypeError: if `function` is not a module-level function.
            RankFailed: if it raised, died or did not end on some rank.
        """
        __tracebackhide__ = True  # pytest shows the test and the ranks' words, not the pool
        name = FunctionName.of(function)
        arguments = pickle.dumps(args)
        if not self._workers:
            self._start()
        self._tasks += 1
        task = Task(self._tasks, name, arguments, tuple(sys.path), self.seed)
        self._send(task)
        replies = self._replies(task.number, f"{Path(name.file).name}::{name.qualname}", timeout_s)
        return [pickle.loads(reply.result or b"") for reply in replies]

    def shutdown(self) -> None:
        """Ends the processes. The pool may be used again."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        # The pool hosts the store: the system picks a free port, and no worker has to be there first.
        self._store = TCPStore("127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="graphshard-workers-")
        self._tasks = 0
        # One process imports torch, each worker is its fork: before any thread was started, and ready at once. But not
        # on GPUs: Inductor asks for them when it is imported, and a fork of a process that did may use none.
        context = get_context("forkserver") if self.device == "cpu" else get_context("spawn")
        context.set_forkserver_preload([serve.__module__])
        environment = {**NO_FLIGHT_RECORDER, **device_environment(self.device), **worker_environment()}
        # The fork server finds its imports by PYTHONPATH; the workers' own environment does not keep it.
        with exported({**environment, "PYTHONPATH": os.pathsep.join(sys.path)}):
            for rank in range(self.world_size):
                output, stack = (str(Path(self._folder.name, f"rank{rank}.{kind}")) for kind in ("out", "stack"))
                station = Station(
                    rank, self.world_size, self._store.port, output, stack, environment, self.device, self.backend
                )
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(station, theirs), daemon=True, name=f"rank{rank}")
                process.start()
                theirs.close()
                self._workers.append(_Worker(station, process, ours))
        self._replies(0, "start of the workers", START_TIMEOUT_S)

    def _send(self, message: Task | None) -> None:
        text = pickle.dumps(message)
        for worker in self._workers:
            with suppress(OSError):  # a dead worker: seen by its sentinel when replies are waited for
                worker.connection.send_bytes(text)

    def _replies(self, number: int, told: str, timeout_s: float) -> list[Reply]:
        """Waits for each rank's reply to a task.

        Raises:
            RankFailed: after the pool was killed, if some rank has no result.
        """
        __tracebackhide__ = True
        try:
            replies, silent, all_in_time = self._collect(timeout_s)
            failed = {rank for rank, reply in replies.items() if reply.error}
            if not failed and not silent:
                assert all(reply.number == number for reply in replies.values())
                self._send(None)  # they clean up
                return [replies[rank] for rank in range(self.world_size)]
            failures = {rank: self._raised(replies[rank], rank) for rank in failed}
            failures |= {rank: self._no_answer(rank, "hung" if all_in_time else "waiting") for rank in silent}
        except BaseException:  # Ctrl-C, a test's own alarm: the workers are in the middle of a task
            self._kill()
            raise
        self._kill()
        raise RankFailed(told, self.world_size, failures)

    def _collect(self, timeout_s: float) -> tuple[dict[int, Reply], set[int], bool]:
        """Replies by rank, ranks without one, and whether no rank failed before the deadline."""
        replies: dict[int, Reply] = {}
        silent = set(range(self.world_size))
        running = set(silent)
        deadline = time.monotonic() + timeout_s
        none_failed = True
        while running:
            # The sentinel too: a grandchild that holds a copy of the pipe's end would hide the end of the process.
            watched: dict[Any, int] = {self._workers[rank].connection: rank for rank in running}
            watched |= {self._workers[rank].process.sentinel: rank for rank in running}
            ready = wait(list(watched), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted({watched[source] for source in ready}):
                running.discard(rank)
                reply = _received(self._workers[rank].connection)
                if reply is not None:
                    replies[rank] = reply
                    silent.discard(rank)
                if none_failed and (reply is None or reply.error):
                    none_failed = False
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies, silent, none_failed

    def _raised(self, reply: Reply, rank: int) -> RankFailure:
        output = last_output(self._workers[rank].station.output_file)
        return RankFailure(rank, "raised", error=reply.error, traceback=reply.traceback, output=output)

    def _no_answer(self, rank: int, kind: Kind) -> RankFailure:
        worker = self._workers[rank]
        output = last_output(worker.station.output_file)
        if worker.process.exitcode is None:
            # A closed connection means that the process is ending.
            worker.process.join(EXIT_TIMEOUT_S if worker.connection.closed else 0.0)
        if worker.process.exitcode is None:
            stack = dump_stack(worker.process.pid or -1, worker.station.stack_file)
            return RankFailure(rank, kind, error=innermost_frame(stack), stack=stack, output=output)
        stack = last_output(worker.station.stack_file)  # faulthandler's, if a signal killed it
        return RankFailure(rank, "died", error=f"exit code {worker.process.exitcode}", stack=stack, output=output)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(EXIT_TIMEOUT_S)
        self._workers = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _received(connection: Connection) -> Reply | None:
    """The reply that is there, or None, and the connection closed, if the process ended instead."""
    try:
        if not connection.poll():
            raise EOFError
        reply: Reply = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        connection.close()
        return None
    return reply


_pools: dict[tuple[int, str, str], WorkerPool] = {}


def pool(world_size: int, *, device: str = "cpu", backend: str = "gloo") -> WorkerPool:
    """The session's pool of that size, on that device, with that backend."""
    key = (world_size, device, backend)
    if key not in _pools:
        _pools[key] = WorkerPool(world_size, device=device, backend=backend)
    return _pools[key]


@atexit.register
def shutdown_pools() -> None:
    """Ends every pool of the session."""
    for started in _pools.values():
        started.shutdown()
