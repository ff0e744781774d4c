"""What it takes ranks to agree on the collectives of a program, and what they ask the store for once all are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import graphshard
from bench.harness.models import decoder
from bench.harness.processes import Ranks
from bench.harness.variants import prepare
from bench.overhead.samples import STEADY_STEPS, AgreementTime
from graphshard.agree.consensus import posted_consensus
from graphshard.agree.contract import Contract
from graphshard.agree.rank_store import RankStore
from graphshard.compat.store import default_store
from graphshard.graph.plan import PlannedBucket, PlannedStep

TIMEOUT_S = 600.0
REPEATS = 30
_OPERATIONS = ("set", "get", "add", "set_first", "has", "wait")


class Agreeing:
    """Measures in a process of its own on each rank, all of which come to a program at the same time.

    Args:
        num_buckets: of a contract; each has 9 parameters, as a decoder's block.
    """

    def __init__(self, num_buckets: int) -> None:
        self._text = _contract(num_buckets).text()
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        leads = rank == 0
        if leads:
            server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            default_store().set("bench/port", str(server.port))
        port = int(default_store().get("bench/port"))
        store = server if leads else TCPStore("127.0.0.1", port, is_master=False)
        self._consensus = posted_consensus(store, "bench", "Bench", rank, ranks)
        self._consensus.settle("open", "the first decision", lambda: "")

    def measure(self) -> AgreementTime:
        """Agrees, then trains."""
        first = [self._timed(partial(self._settle, f"program {number}")) for number in range(REPEATS)]
        elections = [
            self._timed(partial(self._consensus.elect, f"entry {number}", "the forward", "structure"))
            for number in range(REPEATS)
        ]
        return AgreementTime(tuple(first), tuple(elections), len(self._text), _operations_in_steady_state())

    def _settle(self, key: str) -> Contract:
        return Contract.parse(self._consensus.settle(key, "the forward", lambda: self._text))

    @staticmethod
    def _timed(ask: Callable[[], object]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        ask()
        return time.perf_counter() - begin


def _operations_in_steady_state() -> int:
    model, inputs = decoder(2)
    forward = prepare("graphshard", model, "aot_eager")
    for _ in range(3):
        forward(*inputs).backward()
    seen: list[str] = []

    def counted(name: str) -> object:
        real = getattr(RankStore, name)

        def operation(self: RankStore, *args: object) -> object:
            seen.append(name)
            return real(self, *args)

        return operation

    with mock.patch.multiple(RankStore, **{name: counted(name) for name in _OPERATIONS}):
        for _ in range(STEADY_STEPS):
            forward(*inputs).backward()
    assert graphshard.report(model).programs
    return len(seen)


def _contract(num_buckets: int) -> Contract:
    buckets, steps = [], []
    for number in range(num_buckets):
        name = f"gather:layers.{number}"
        members = tuple(f"layers.{number}.attention.projection_{part}.weight" for part in range(9))
        buckets.append(PlannedBucket(name, "gather", members))
        steps += [PlannedStep(f"mm_{number}", "launch", name), PlannedStep(f"mm_{number + 1}", "wait", name)]
    return Contract(tuple(buckets), tuple(steps), ())


def measure_agreement(num_ranks: int, num_buckets: int) -> Sequence[AgreementTime]:
    """Measures on some ranks. Their store is a server of rank 0's process."""
    with Ranks("agreement", num_ranks, Agreeing, num_buckets, timeout_s=TIMEOUT_S) as ranks:
        found: list[AgreementTime] = ranks.call("measure")
    return found
