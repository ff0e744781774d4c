"""The worker pools: results by rank, and no failure without the name of a rank."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphshard.testing import RankFailed, WorkerPool, pool
from graphshard.testing.devices import why_no_gpu
from graphshard.testing.steps import moved, place

HANG_S = 600.0
QUICK_S = 3.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[WorkerPool]:
    """A pool of its own: these tests end processes."""
    workers = WorkerPool(2)
    yield workers
    workers.shutdown()


@dataclass
class Pair:
    left: int
    right: int


def rank_and_sum(start: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + start)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def swapped(pair: Pair) -> Pair:
    assert isinstance(pair, Pair)
    return Pair(pair.right, pair.left)


def draw_and_leave_group() -> tuple[float, int, str, str | None]:
    """Leaves a group and a changed default behind, which no later task must see."""
    dist.new_group([0])
    torch.set_default_dtype(torch.float64)
    store = dist.distributed_c10d.PrefixStore("test", _store())
    left_before = store.check(["mark"])
    dist.barrier()
    store.set("mark", "here")
    return torch.rand(()).item(), os.getpid(), str(torch.ones(1).dtype), "mark" if left_before else None


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def fail_on(rank: int, how: str) -> None:
    sys.stdout.write(f"rank {dist.get_rank()} was here\n")
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("the shard is lost")
        if how == "exit":
            os._exit(7)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "sleep":
            time.sleep(HANG_S)
    if how != "sleep":
        dist.barrier()


def fail_everywhere() -> None:
    count = 3
    assert count == dist.get_rank()


def unpicklable() -> object:
    return lambda: None


def warn_here() -> None:
    warnings.warn("ours", UserWarning, stacklevel=1)


def test_run_returns_results_by_rank(ranks: WorkerPool) -> None:
    assert ranks.run(rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]


def test_run_passes_this_modules_classes(ranks: WorkerPool) -> None:
    assert ranks.run(swapped, Pair(1, 2)) == [Pair(2, 1)] * 2


def test_run_four_ranks(four_ranks: WorkerPool) -> None:
    assert four_ranks.run(rank_and_sum, 0) == [(rank, 6.0) for rank in range(4)]


def test_tasks_share_processes_and_nothing_else(ranks: WorkerPool) -> None:
    first, second = ranks.run(draw_and_leave_group), ranks.run(draw_and_leave_group)
    assert first == second
    assert [dtype for _, _, dtype, _ in second] == ["torch.float64"] * 2
    assert [mark for *_, mark in second] == [None, None]
    assert ranks.pids == tuple(pid for _, pid, *_ in second)


def test_raising_rank_is_named_with_its_output(ranks: WorkerPool) -> None:
    ranks.run(rank_and_sum, 0)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"fail_on: rank 1 of 2 raised: ValueError: the shard is lost") as failed:
        ranks.run(fail_on, 1, "raise")
    assert time.monotonic() - start < 20
    failures = failed.value.failures
    assert list(failures) == [1, 0]
    assert "raise ValueError" in failures[1].traceback
    assert failures[1].output == "rank 1 was here\n"
    assert failures[0].kind == "waiting"
    assert "fail_on" in failures[0].stack
    assert ranks.pids == ()


def test_exited_rank_is_named_before_its_peers(ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 of 2 died: exit code 7") as failed:
        ranks.run(fail_on, 0, "exit")
    assert next(iter(failed.value.failures)) == 0
    assert "rank 0 was here" in failed.value.failures[0].output


def test_crashed_rank_shows_its_stack(ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=rf"rank 1 of 2 died: exit code -{int(signal.SIGSEGV)}") as failed:
        ranks.run(fail_on, 1, "signal")
    assert "fail_on" in failed.value.failures[1].stack


def test_hanging_rank_is_named_with_its_stack(ranks: WorkerPool) -> None:
    ranks.run(rank_and_sum, 0)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 was still running at the deadline: in fail_on") as failed:
        ranks.run(fail_on, 1, "sleep", timeout_s=QUICK_S)
    assert QUICK_S <= time.monotonic() - start < QUICK_S + 10
    assert list(failed.value.failures) == [1]
    assert failed.value.failures[1].kind == "hung"


def test_every_failed_rank_is_named_and_variables_of_bare_asserts(ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0, 1 of 2 raised: AssertionError(?s:.*)count = 3"):
        ranks.run(fail_everywhere)


def test_results_must_pickle(ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match=r"rank 0, 1 of 2 raised: .*pickle"):
        ranks.run(unpicklable)


def test_own_warnings_are_errors(ranks: WorkerPool) -> None:
    with pytest.raises(RankFailed, match="UserWarning: ours"):
        ranks.run(warn_here)


def test_local_functions_are_refused(ranks: WorkerPool) -> None:
    with pytest.raises(TypeError, match="module-level"):
        ranks.run(lambda: None)


def test_shutdown_ends_processes_and_next_run_starts_anew() -> None:
    workers = WorkerPool(1)
    assert workers.run(rank_and_sum, 5) == [(0, 5.0)]
    (pid,) = workers.pids
    workers.shutdown()
    assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"
    assert workers.pids == ()


# --- devices


def device_of_rank() -> tuple[str, str, bool, bool]:
    backend = str(dist.get_backend_config())
    return (
        backend,
        str(torch.zeros(1).device),
        torch.are_deterministic_algorithms_enabled(),
        torch.cuda.is_initialized(),
    )


def test_ranks_on_cpu_leave_cuda_alone(ranks: WorkerPool) -> None:
    assert (ranks.device, ranks.backend) == ("cpu", "gloo")
    assert ranks.run(device_of_rank) == [("cpu:gloo,cuda:gloo", "cpu", False, False)] * 2


@pytest.mark.parametrize(
    ("device", "backend", "message"),
    [
        ("tpu", "gloo", r"device: got 'tpu', want one of 'cpu', 'cuda'"),
        ("cpu", "nccl", r"backend: got 'nccl' for ranks on 'cpu', want 'gloo'"),
        ("cuda", "mpi", r"backend: got 'mpi' for ranks on 'cuda', want 'gloo' or 'nccl'"),
    ],
)
def test_unknown_devices_and_backends_are_refused(device: str, backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerPool(1, device=device, backend=backend)


@pytest.mark.skipif(why_no_gpu() is None, reason="a GPU is here")
def test_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"device: got 'cuda', but no CUDA GPU: torch .*; use device='cpu'"):
        pool(1, device="cuda", backend="nccl")


@dataclass
class Nested:
    x: torch.Tensor
    kept: int = 3


def test_inputs_of_any_shape_and_models_move_to_a_device() -> None:
    x = torch.ones(2)
    given = ((Nested(x),), {"a": [x, None], "b": torch.Size((1, 2)), "c": "text"})
    assert moved(given, "cpu") is given
    (batch,), keywords = moved(given, "meta")
    assert (batch.x.device.type, batch.kept) == ("meta", 3)
    assert keywords["a"][0].device.type == "meta"
    assert (keywords["a"][1], keywords["b"], keywords["c"]) == (None, (1, 2), "text")
    model = torch.nn.Linear(2, 2)
    assert place(model, "cpu").weight.device.type == "cpu"
    assert place(model, "meta").weight.device.type == "meta"
