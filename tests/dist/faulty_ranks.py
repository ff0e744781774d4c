"""Ranks of which the second one hangs, dies or differs: each a process of its own, since the watchdog ends it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.faults import inquiry
from graphshard.faults.inquiry import POLL_S
from graphshard.runtime import region_lowering
from graphshard.testing import worker_main

DEADLINE_S = 2.0
GROUP_TIMEOUT_S = 40.0
LONG_S = 120.0
# The clock of the last rank is so far ahead.
AHEAD_S = 600.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@dataclass
class Ended:
    """How one rank ended: its exit status (None: it had to be killed), what it wrote, seconds after the fault began."""

    status: int | None
    written: str
    seconds: float


def run_ranks(scenario: str, folder: Path, world_size: int = 2, **options: Any) -> list[Ended]:
    """Runs a scenario; no rank outlives it."""
    # The store's process lives on, unless that is the fault.
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    port = store.port
    leave_behind(PrefixStore("default_pg", store), world_size)
    if scenario == "stop_store":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    context = get_context("forkserver")
    context.set_forkserver_preload([worker_main.__name__])
    ranks = [
        context.Process(target=run, args=(scenario, rank, world_size, port, folder, options), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    ends: dict[int, float] = {}
    deadline = time.monotonic() + LONG_S
    stays = {world_size - 1} if scenario.startswith("stop") else set()
    while len(ends.keys() | stays) < world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, process in enumerate(ranks):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.time()
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    for process in ranks:
        process.join(10)
    start = folder / "start"
    began = float(start.read_text()) if start.exists() else time.time()
    return [
        Ended(
            process.exitcode if rank in ends else None,
            (folder / f"rank{rank}").read_text(),
            ends.get(rank, time.time()) - began,
        )
        for rank, process in enumerate(ranks)
    ]


def leave_behind(store: PrefixStore, world_size: int) -> None:
    """What ranks that were ended have left in the store, as torchrun's has it when it starts them again."""
    inquiry.raise_alarm(store, 0, "")
    inquiry.ask(store, 0, "fault", final=True)
    for rank in range(world_size):
        inquiry.say_raised(store, rank, "of an earlier run")
        inquiry.say_compiling(store, rank, "what an earlier run compiled")


def run(scenario: str, rank: int, world_size: int, port: int, folder: Path, options: dict[str, Any]) -> None:
    """The life of one rank."""
    output = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ["GRAPHSHARD_FAULTS"] = str(folder / "faults")
    os.environ.pop("TORCH_NCCL_TRACE_BUFFER_SIZE", None)  # of the worker pools: torch warns of it
    torch.set_num_threads(1)
    if rank == world_size - 1:
        time.time, as_it_is = lambda: as_it_is() + AHEAD_S, time.time  # type: ignore[misc]
    hosts = scenario == "stop_store" and rank == world_size - 1
    store = TCPStore("127.0.0.1", port, world_size, is_master=hosts, wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    torch.manual_seed(0)
    options = {"backend": "aot_eager", "deadline_s": DEADLINE_S, **options}
    model = graphshard.compile(Net(), init_device_mesh("cpu", (world_size,)), **options)
    train(model, 3)
    if scenario.startswith("stop"):  # not while others believe that it compiles
        time.sleep(2 * POLL_S)
    status = 0
    try:
        misbehave(scenario, model, folder / "start") if rank == world_size - 1 else wait_for_others(scenario, model)
    except Exception as error:
        sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.write(f"raised {type(error).__name__}\n")
        status = 3
    sys.stderr.flush()
    os._exit(status)


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 6)).sum().backward()


def wait_for_others(scenario: str, model: nn.Module) -> None:
    if scenario == "compile":  # a program that both lower now, and reduce in
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(False)
    train(model, 2)


def misbehave(scenario: str, model: nn.Module, start: Path) -> None:
    """What the last rank does after three steps."""
    start.write_text(str(time.time() - AHEAD_S))
    if scenario == "sleep":
        time.sleep(LONG_S)
    elif scenario == "kill":
        model(torch.ones(2, 6))  # the others are in backward then
        os.kill(os.getpid(), signal.SIGKILL)
    elif scenario.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scenario == "flags":
        model.set_requires_gradient_sync(False)
        train(model, 1)
        time.sleep(LONG_S)
    elif scenario == "compile":
        as_it_is = region_lowering.with_gather_outputs

        def slow(gm: Any) -> Any:
            time.sleep(3 * DEADLINE_S)
            return as_it_is(gm)

        with mock.patch.object(region_lowering, "with_gather_outputs", slow):
            wait_for_others(scenario, model)
    elif scenario == "raise":
        raise ValueError("the data are gone")
