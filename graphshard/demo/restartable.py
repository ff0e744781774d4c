"""A compiled model that trains on from its newest checkpoint, whatever ended the run before: `--checkpoint DIR`.

What a step computes follows from the checkpoint and the step's number alone, so that a run that was killed has the
losses of one that was not: bit for bit in as many ranks; in another number up to the rounding of sums (`OTHER_RANKS`).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import DeviceMesh

from graphshard.demo.checkpoints import Checkpoint, CheckpointFailed, Checkpoints
from graphshard.demo.model import Decoder, ModelConfig
from graphshard.demo.text import Batches
from graphshard.demo.train import DemoTrainer

# Largest relative difference of a loss from that of the same run in another number of ranks. Rows, parameters and
# states are the same; the mean over a batch is a sum of other partial sums, so a gradient begins about 1 float32 ulp
# (1.2e-7) away, and AdamW carries that on, as between backends (`compare.BOUNDS`).
OTHER_RANKS = 1e-5
# As long as a rank may wait in a collective for one that compiles, or writes a checkpoint.
GROUP_TIMEOUT_S = 300.0
# After SIGTERM, a step and its checkpoint have so long: torchrun, which gives them 30 s, sends it also where a rank has
# died, and those that wait for that one cannot finish their step.
GRACE_S = 15
# What a shell says of a process that SIGTERM has ended: torchrun starts the ranks again, a scheduler puts the job back.
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class RunOptions:
    """What is trained, the same on every rank.

    Attributes:
        folder: of the checkpoints.
        steps: in all.
        every: a checkpoint after so many steps, and after the last one.
        keep: so many checkpoints.
        resume: go on from the newest complete one.
        backend: of `graphshard.compile`.
        global_batch: rows of a microbatch, over all ranks.
        log: gets a line of JSON for each step; None: none is written.
        config: sizes of the model.
    """

    folder: Path
    steps: int
    every: int
    keep: int = 2
    resume: bool = False
    backend: str = "inductor"
    global_batch: int = 16
    log: Path | None = None
    config: ModelConfig = field(default_factory=ModelConfig)

    def settings(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must have in common with the one that wrote it."""
        return {"global_batch": self.global_batch, **asdict(self.config)}


def start_process_group(timeout_s: float = GROUP_TIMEOUT_S) -> None:
    """`init_process_group` over gloo, with a store that is new in each attempt of torchrun's.

    torchrun's own outlives the ranks: gloo would find the addresses of dead ones there. On several machines, which may
    count attempts differently, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: then each attempt has a
    store of its own.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "gloo", store=PrefixStore(f"attempt{attempt}", store), rank=rank, world_size=world_size, timeout=timeout
    )


def train(
    options: RunOptions,
    mesh: DeviceMesh,
    say: Callable[[str], None],
    make_model: Callable[[ModelConfig], Decoder] = Decoder,
    make_checkpoints: Callable[[Path, int, Callable[[str], None]], Checkpoints] = Checkpoints,
) -> int:
    """Trains to the last step, or until SIGTERM comes to a rank; the exit status, the same on every rank.

    Raises:
        ValueError: the global batch cannot be shared out.
        CheckpointFailed: see `Checkpoints.save`; or the folder holds checkpoints of another run.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.global_batch % world_size:
        raise ValueError(f"--global-batch: got {options.global_batch}, want a multiple of {world_size}, the ranks")
    batches = Batches(rank, world_size, options.global_batch // world_size, options.config.max_seq_len)
    trainer = DemoTrainer(options.backend, mesh, batches, make_model=lambda: make_model(options.config))
    torch.manual_seed(rank)
    checkpoints = make_checkpoints(options.folder, options.keep, say)
    first = _resume(options, trainer, checkpoints, say)
    with _asked_to_stop() as asked:
        for step in range(first, options.steps):
            result = trainer.step(step)
            loss, stops = _over_ranks(result.loss, bool(asked))
            done = step + 1
            say(f"  step {done:4d}   loss {loss:.9f}   gradient norm {result.grad_norm:.9f}")
            if options.log is not None and rank == 0:
                _note(options.log, {"step": done, "loss": loss, "grad_norm": result.grad_norm, "first": first})
            if done % options.every == 0 or done == options.steps or stops:
                rng = {f"rank{rank}": torch.get_rng_state()}
                checkpoints.save(done, {**trainer.state(), "rng": rng}, options.settings())
                say(f"  step {done:4d}   saved")
            if stops and done < options.steps:
                say("SIGTERM came to a rank: all ranks stop, to go on from here")
                return TERMINATED
    return 0


def _resume(options: RunOptions, trainer: DemoTrainer, checkpoints: Checkpoints, say: Callable[[str], None]) -> int:
    """The first step to make."""
    found = checkpoints.newest()
    if found is None:
        say(f"no complete checkpoint in {options.folder}: training begins")
        return 0
    if not options.resume:
        raise CheckpointFailed(
            f"--checkpoint: {found.path} is there; want --resume, to go on from it, or another folder"
        )
    if found.settings != (want := options.settings()):
        raise CheckpointFailed(f"--resume: {found.path} is of a run with {found.settings}; got {want}; want the same")
    load(found, trainer, say)
    say(f"training goes on from {found.path.name}, which {found.world_size} ranks have saved")
    return found.step


def load(found: Checkpoint, trainer: DemoTrainer, say: Callable[[str], None]) -> None:
    """Takes over parameters, the optimizer's state and, in as many ranks, the state of random numbers."""
    rank = dist.get_rank()
    state = trainer.state()
    is_alike = found.world_size == dist.get_world_size()
    if is_alike:
        state["rng"] = {f"rank{rank}": torch.get_rng_state()}
    state_dict_loader.load(state, checkpoint_id=found.path)
    trainer.set_state(state)
    if is_alike:
        torch.set_rng_state(state["rng"][f"rank{rank}"])
        return
    torch.manual_seed((found.step << 16) + rank)
    if found.settings["dropout"]:
        say(f"random numbers begin anew: {found.world_size} ranks have saved theirs, here are {dist.get_world_size()}")


def _over_ranks(loss: float, stops: bool) -> tuple[float, bool]:
    """The mean loss, and whether any rank is to stop."""
    sums = torch.tensor([loss, float(stops)], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0]) / dist.get_world_size(), bool(sums[1])


def _note(log: Path, line: Mapping[str, Any]) -> None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with log.open("a") as file:
        file.write(json.dumps({"attempt": attempt, **line}) + "\n")


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Inside, SIGTERM does not end a rank but stands in the list: the step is finished first, within `GRACE_S`."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        asked.append(number)
        signal.alarm(GRACE_S)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
        if asked:
            signal.alarm(0)
