"""Fresh processes to measure in, one per rank of a case.

Nothing that another case compiled is warm: a process is a fork of one that has imported everything and run nothing, and
its Inductor cache is a new folder, unless it is given one; the ranks of a case share it as those of a host do. The
parent asks, the process measures, so that cases can take turns.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from graphshard.compat.fake import fake_process_group
from graphshard.testing.environment import exported, worker_environment

EXIT_TIMEOUT_S = 10.0


class Ranks:
    """The processes of one case, ranks of one gloo process group. A context manager: leaving it ends them.

    Args:
        title: of the case, for errors.
        world_size: number of processes.
        build: module-level; called as `build(*args)` in each process, with a process group, to make what measures.
        args: picklable.
        timeout_s: for each call.
        cache: folder of Inductor's cache, which stays; None: a new one, which goes with the processes.
        pretended: so many ranks, of which one is there, so `world_size` is 1: collectives do nothing; 0: all are there.
    """

    def __init__(
        self,
        title: str,
        world_size: int,
        build: Callable[..., object],
        *args: object,
        timeout_s: float,
        cache: Path | None = None,
        pretended: int = 0,
    ) -> None:
        self.title = title
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="graphshard-bench-", ignore_cleanup_errors=True)
        cache = cache or Path(self._folder.name, "inductor")
        self._processes = []
        self._connections: list[Connection] = []
        context = get_context("forkserver")
        context.set_forkserver_preload([build.__module__])
        # The fork server reads them when it starts, and finds its imports by PYTHONPATH.
        with exported({**worker_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(theirs, rank, world_size, pretended, self._folder.name, cache, timeout_s, build, args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def call(self, method: str, *args: object) -> list[Any]:
        """Calls a method of what `build` made, in every process at once; returns the results by rank.

        Raises:
            RuntimeError: if a rank raised, died or did not answer in time.
        """
        for connection in self._connections:
            with suppress(OSError):  # a dead process: seen below
                connection.send((method, args))
        replies: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout_s
        while len(replies) < len(self._connections):
            pending = [c for rank, c in enumerate(self._connections) if rank not in replies]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"bench: {self.title}: {method}: no answer within {self._timeout_s:.0f} s")
            for rank in [rank for rank, connection in enumerate(self._connections) if connection in ready]:
                try:
                    failure, replies[rank] = self._connections[rank].recv()
                except EOFError:
                    failure = "the process died"
                if failure:
                    raise RuntimeError(f"bench: {self.title}: {method}: rank {rank}: {failure}")
        return [replies[rank] for rank in range(len(self._connections))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # ends the loop of a process that waits for a call
        deadline = time.monotonic() + (EXIT_TIMEOUT_S if kind is None else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    pretended: int,
    folder: str,
    cache: Path,
    timeout_s: float,
    build: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """Runs in the process: answers calls until the parent closes the connection."""
    stack = ExitStack()
    try:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}  # as torchrun does
        torch.set_num_threads(1)
        if pretended:
            stack.enter_context(fake_process_group(pretended))
        else:
            # One rank needs no store that others can reach.
            store = HashStore() if world_size == 1 else FileStore(str(Path(folder) / "store"), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
            )
        measuring = build(*args)
        with suppress(EOFError):
            while True:
                method, arguments = connection.recv()
                connection.send((None, getattr(measuring, method)(*arguments)))
    except Exception:
        connection.send((traceback.format_exc(), None))
    finally:
        # A sharded model is a reference cycle that holds process groups: left to the interpreter's end it aborts it.
        measuring = None
        gc.collect()
        stack.close()
        if dist.is_initialized():
            dist.destroy_process_group()
