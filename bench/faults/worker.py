"""One rank of a job in which something goes wrong: `python -m bench.faults.worker FOLDER RANK`, for `bench.faults`.

A user's script: what it raises ends it, and its collectives have the usual time-out, half an hour.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard
from bench.faults import model as faults_model
from bench.faults.catalog import FAULTS
from bench.faults.group import FaultyGroup, faulty_group
from bench.faults.injections import Injection
from bench.faults.model import FaultyModel

GROUP_TIMEOUT_S = 1800.0
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Spec:
    """What is run, the same on every rank; a file in the job's folder.

    Attributes:
        fault: name of it.
        world_size: number of ranks.
        port: of the store, which the parent holds, as torchrun does.
        backend: of `graphshard.compile`; ``"fsdp2"``: eager FSDP2 runs the same.
        deadline_s: given to `graphshard.compile` where it takes one.
        healthy: nothing goes wrong.
    """

    fault: str
    world_size: int
    port: int
    backend: str
    deadline_s: float
    healthy: bool = False

    def write(self, folder: Path) -> None:
        (folder / "spec.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Spec:
        return Spec(**json.loads((folder / "spec.json").read_text()))


def odd_rank(world_size: int) -> int:
    """The rank on which it goes wrong: neither the first nor, among four, the last."""
    return world_size // 2


def batch(rows: int, rank: int, step: int) -> Tensor:
    """Of one rank and step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, FaultyModel.WIDTH, generator=generator)


def new_model() -> FaultyModel:
    torch.manual_seed(0)
    return FaultyModel()


class RankJob:
    """The job of one rank; see `injections.Job`."""

    def __init__(self, folder: Path, rank: int, spec: Spec) -> None:
        self.folder, self.rank, self.world_size = folder, rank, spec.world_size
        self.step = 0
        self.group: FaultyGroup | None = None
        self.model = new_model()
        self._spec = spec
        fault = FAULTS[spec.fault].injection
        self.steps = fault.steps
        self._injection = Injection() if spec.healthy else fault
        self._marked = False

    @property
    def is_odd(self) -> bool:
        return self.rank == odd_rank(self.world_size)

    def mark(self) -> None:
        if not self._marked:
            self._marked = True
            (self.folder / f"injected{self.rank}").write_text(repr(time.time()))

    def batch(self) -> Tensor:
        return batch(self._injection.rows(self), self.rank, self.step)

    def run(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Losses of this rank, and its part of the parameters in the end."""
        injection = self._injection
        mesh = self._mesh()
        options = injection.options(self)
        self.model.sharded(mesh)
        if self._spec.backend != "fsdp2":
            if "deadline_s" in inspect.signature(graphshard.compile).parameters:
                options["deadline_s"] = self._spec.deadline_s
            graphshard.compile(self.model, **{"backend": self._spec.backend, "plan": "fsdp2", **options})
        faults_model.on_point.append(lambda where: injection.at(self, where))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        losses = []
        for step in range(1, self.steps + 1):
            if (loss := self.backward_of(step)) is not None:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
        parts = {name: _local(parameter).clone() for name, parameter in self.model.named_parameters()}
        return losses, parts

    def backward_of(self, step: int) -> Tensor | None:
        """Forward and backward of a step; its loss, None: it was left out."""
        self.step = step
        self._injection.before_step(self)
        if self._injection.skips(self):
            return None
        loss: Tensor = self.model(self.batch()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach().clone()

    def _mesh(self) -> DeviceMesh:
        if not self._injection.wraps:
            return init_device_mesh("cpu", (self.world_size,))
        self.group = faulty_group()
        return DeviceMesh.from_group(self.group, "cpu")


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def main(arguments: list[str]) -> None:
    folder, rank = Path(arguments[0]), int(arguments[1])
    faulthandler.register(signal.SIGUSR1)  # a hang says where
    spec = Spec.read(folder)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", spec.port, spec.world_size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=spec.world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    job: Any = RankJob(folder, rank, spec)
    result = job.run()
    torch.save(result, folder / f"result{rank}.pt")
    # A sharded model is a cycle that holds process groups.
    del job, result
    faults_model.on_point.clear()
    gc.collect()
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
