"""The life of one worker process: wait for a task, run it in a fresh process group, answer, and again."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from graphshard.compat.groups import forget_meshes
from graphshard.compat.interpreter import with_room
from graphshard.testing.devices import take_device
from graphshard.testing.functions import FunctionName

MAX_LOCAL_CHARS = 300
# Longer than any test: a hang is told by the pool, which knows the ranks, and not by one rank's collective.
GROUP_TIMEOUT_S = 1800.0
STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Task:
    """One function to run.

    Attributes:
        number: counts from 1 in each pool; names the process group's keys in the store, so that no task reads
            another's.
        function: the function.
        arguments: its pickled positional arguments.
        sys_path: the pool's own `sys.path`: tests add to theirs while they are collected.
        seed: seeds Python's and torch's random numbers, the same on every rank.
    """

    number: int
    function: FunctionName
    arguments: bytes
    sys_path: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Reply:
    """What became of a task: `result` pickled, or `error` and `traceback`. Number 0 says that the worker is ready."""

    number: int
    result: bytes | None = None
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class Station:
    """What a worker is started with.

    Attributes:
        rank: its rank.
        world_size: number of ranks.
        store_port: of the pool's `TCPStore`.
        output_file: takes its stdout and stderr.
        stack_file: takes its threads' stacks when it crashes or gets SIGUSR1.
        environment: its environment variables, all of them.
        device: kind of device that it computes on.
        backend: of its process groups.
    """

    rank: int
    world_size: int
    store_port: int
    output_file: str
    stack_file: str
    environment: dict[str, str]
    device: str
    backend: str


def serve(station: Station, connection: Connection) -> None:
    """Runs tasks until the pool closes the connection. The target of a worker process.

    Behind each task the pool sends None, once all ranks have ended it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool decides what Ctrl-C means
    os.environ.clear()  # the fork server's, which may be older than this pool
    os.environ.update(station.environment)
    os.environ |= {"LOCAL_RANK": str(station.rank), "LOCAL_WORLD_SIZE": str(station.world_size)}  # as torchrun does
    _redirect_output(station)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    store = TCPStore(
        "127.0.0.1",
        station.store_port,
        station.world_size,
        is_master=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
    )
    gc.collect()
    gc.freeze()  # collections look only at what tasks leave behind
    connection.send_bytes(pickle.dumps(Reply(0)))
    while True:
        try:
            task: Task | None = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if task is None:  # every rank has ended the last one
            _clean_up()
            continue
        reply = _reply_to(task, station, store)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(reply))


def _redirect_output(station: Station) -> None:
    output = os.open(station.output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # faulthandler keeps the descriptor, not the file object, which must therefore outlive this function.
    stack = os.open(station.stack_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(file=stack, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _reply_to(task: Task, station: Station, store: Store) -> Reply:
    try:
        _prepare(task, station, store)
        function = task.function.load()
        with warnings.catch_warnings():
            _set_warning_filters(task.function.module)
            result: Any = with_room(function, *pickle.loads(task.arguments))
        return Reply(task.number, result=pickle.dumps(result))
    except BaseException as error:  # SystemExit, pytest's own outcomes: everything is the task's
        last_line = traceback.format_exception_only(error)[-1].strip()
        return Reply(task.number, error=last_line, traceback=_described(error))


def _clean_up() -> None:
    """Ends what a task has left: compiled code, meshes, and groups, whose threads wake 100 times a second."""
    torch.compiler.reset()
    forget_meshes()
    if dist.is_initialized():
        gc.collect()  # models in reference cycles hold groups
        dist.destroy_process_group()
        gc.freeze()  # what torch keeps of each compilation: to look through it took half of a long session


def _prepare(task: Task, station: Station, store: Store) -> None:
    os.ftruncate(1, 0)  # each task's output starts anew
    sys.path[:] = list(task.sys_path)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    take_device(station.device, station.rank)
    random.seed(task.seed)
    torch.manual_seed(task.seed)
    dist.init_process_group(
        station.backend,
        store=PrefixStore(f"task{task.number}", store),
        rank=station.rank,
        world_size=station.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _set_warning_filters(test_module: str) -> None:
    """A warning that our own lines cause is an error; torch's words to itself go to the captured output."""
    warnings.resetwarnings()
    warnings.simplefilter("default")
    warnings.filterwarnings("ignore", module=r"torch(\.|$)")
    own = "|".join(name.replace(".", r"\.") for name in ("graphshard", test_module))
    warnings.filterwarnings("error", module=rf"({own})(\.|$)")


def _described(error: BaseException) -> str:
    """Traceback, and under a bare `assert` the variables it may have looked at: nobody rewrites asserts here."""
    text = "".join(traceback.format_exception(error))
    frame = error.__traceback__
    if not isinstance(error, AssertionError) or str(error) or frame is None:
        return text
    while frame.tb_next is not None:
        frame = frame.tb_next
    shown = [f"    {name} = {_short(value)}" for name, value in frame.tb_frame.f_locals.items()]
    return "\n".join([text.rstrip(), "where", *shown])


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= MAX_LOCAL_CHARS else f"{text[:MAX_LOCAL_CHARS]}..."
