"""A rank hangs, dies or differs: the others say which one, and for which parameters they wait."""

from __future__ import annotations

import gc
import io
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faulty_ranks import AHEAD_S, DEADLINE_S, GROUP_TIMEOUT_S, Net, run_ranks, train
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

import graphshard
from graphshard.faults import diagnose
from graphshard.faults.dumps import read_dumps
from graphshard.faults.status import Status
from graphshard.faults.watchdog import EXIT_STATUS, own_status, running
from graphshard.testing import WorkerPool

# From the moment that the fault began.
ENDS_WITHIN_S = DEADLINE_S + 5.0
NAMED = r"for bucket '(gather|reduce):blocks\.\d[^']*' \(blocks\.\d\.(weight|bias)"


def test_rank_that_sleeps_is_named_with_its_line_and_all_ranks_end(tmp_path: Path) -> None:
    waiting, asleep = run_ranks("sleep", tmp_path)
    assert (waiting.status, asleep.status) == (EXIT_STATUS, EXIT_STATUS)
    assert max(waiting.seconds, asleep.seconds) < ENDS_WITHIN_S
    (line,) = waiting.written.splitlines()
    assert re.match(rf"graphshard watchdog: rank 0 has waited \d+ s in the forward of region 0 of Net\d+ {NAMED}", line)
    assert re.search(r"; rank 1 is not in it: it is in faulty_ranks\.py:\d+ \(call 6, rank 0 at 7\) \(dump: ", line)
    assert "rank 1 ends, as rank 0 waited too long" in asleep.written
    out = io.StringIO()
    diagnose(tmp_path / "faults", out)
    told = re.search(r"rank 0 has waited .* rank 0 at 7\)", line)
    assert told is not None
    assert told[0] in out.getvalue()
    slow, fast = sorted(dump.written for dump in read_dumps(tmp_path / "faults")[0])
    assert abs(fast - slow - AHEAD_S) < 60  # no rank minds the clocks of others
    stacks = "".join(file.read_text() for file in (tmp_path / "faults").iterdir())
    assert "in misbehave" in stacks
    assert "in wait_for_others" in stacks


def test_rank_that_is_killed_is_named_in_the_error_of_the_backward_of_the_others(tmp_path: Path) -> None:
    failed, _ = run_ranks("kill", tmp_path)
    assert failed.status == 3
    assert failed.seconds < ENDS_WITHIN_S
    assert "raised CommunicationFailed" in failed.written
    assert re.search(
        rf"CommunicationFailed: graphshard: rank 0 could not go on in the backward of region 0 of Net\d+ {NAMED}.*"
        r"; rank 1 does not answer: it is dead or stopped .*; the error: .*(Connection|closed|reset)",
        failed.written,
    )
    assert "The above exception was the direct cause" in failed.written


def test_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    waiting, stopped = run_ranks("stop", tmp_path)
    assert (waiting.status, stopped.status) == (EXIT_STATUS, None)
    assert waiting.seconds < ENDS_WITHIN_S
    assert re.search(rf"{NAMED}.*; rank 1 does not answer: it is dead or stopped", waiting.written)


def test_rank_that_is_stopped_with_the_store_leaves_nobody_waiting(tmp_path: Path) -> None:
    waiting, stopped = run_ranks("stop_store", tmp_path)
    assert (waiting.status, stopped.status) == (EXIT_STATUS, None)
    assert waiting.seconds < ENDS_WITHIN_S
    assert re.search(rf"{NAMED}.*; what the other ranks do is not known: the store does not answer", waiting.written)


def test_rank_that_compiles_for_longer_than_the_deadline_is_waited_for(tmp_path: Path) -> None:
    for rank in run_ranks("compile", tmp_path):
        assert (rank.status, rank.written) == (0, "")
        assert rank.seconds > 2 * DEADLINE_S
    assert not list((tmp_path / "faults").iterdir())


def test_rank_with_other_flags_is_told_what_it_alone_wants(tmp_path: Path) -> None:
    waiting, differs = run_ranks("flags", tmp_path)
    assert (waiting.status, differs.status) == (3, 3)
    assert waiting.seconds < ENDS_WITHIN_S
    assert re.search(rf"CommunicationFailed: .*in the backward of region 0 of Net\d+ {NAMED}", waiting.written)
    assert re.search(
        r"RanksDiffer: contract: rank 1 waited .* for rank 0 to come to backward of blocks.0, .*unreduced.*"
        r"\(faulty_ranks\.py:\d+\); rank 0 is not in it: "
        r"it is in the backward of region 0 of Net\d+, at bucket 'reduce:",
        differs.written,
    )


def said_at_compile(deadline_s: float | None, folder: str) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    mesh = init_device_mesh("cpu", (2,)) if deadline_s is None else dist.DeviceMesh.from_group(group, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAPHSHARD_FAULTS", folder)
        model = graphshard.compile(Net(), mesh, backend="aot_eager", deadline_s=deadline_s)
    return graphshard.report(model).fallbacks


def test_deadline_beyond_the_time_out_is_said_at_compile(two_ranks: WorkerPool, tmp_path: Path) -> None:
    for said in two_ranks.run(said_at_compile, 60.0, str(tmp_path)):
        assert said == [
            "deadline_s: got 60 s, but the process group gives up after 40 s, before it; want less, or give "
            "init_process_group a longer timeout"
        ]
    assert two_ranks.run(said_at_compile, 39.0, str(tmp_path)) == [[], []]


def test_folder_that_cannot_be_written_is_said_at_compile(two_ranks: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for (said,) in two_ranks.run(said_at_compile, None, str(tmp_path / "file" / "faults")):
        assert "GRAPHSHARD_FAULTS: ranks that hang or die cannot leave dumps in" in said


def life_of_the_watchdog() -> tuple[int, bool, int]:
    """Threads while a model lives, whether it died in time, threads after."""

    def threads() -> int:
        return sum(thread.name == "graphshard watchdog" for thread in threading.enumerate())

    model = graphshard.compile(Net(), init_device_mesh("cpu", (2,)), backend="aot_eager")
    train(model, 1)
    alive = threads()
    del model
    gc.collect()
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive, running() is None, threads()


def test_watchdog_ends_with_the_last_model() -> None:
    fresh = WorkerPool(2)  # no model of another test may be alive
    try:
        assert fresh.run(life_of_the_watchdog) == [(2, True, 0)] * 2
    finally:
        fresh.shutdown()


def seen_while_the_other_rank_sleeps(backend: str) -> tuple[Status | None, tuple[tuple[str, str], ...]]:
    """What rank 0 says of itself meanwhile, and the order of its backward."""
    model = graphshard.compile(Net(), init_device_mesh("cpu", (2,)), backend=backend)
    train(model, 2)
    seen: list[Status] = []
    loss = model(torch.ones(2, 6)).sum()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1.5)
    else:
        look = threading.Timer(0.7, lambda: seen.append(own_status(0, 0.0, None, "", failed=False)))
        look.start()
    loss.backward()
    (backward,) = (record for record in graphshard.report(model).programs if record.direction == "backward")
    if dist.get_rank() == 0:
        look.join()
    return (seen[0] if seen else None), backward.order


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_place_of_a_rank_that_waits_is_read_off_generated_code(two_ranks: WorkerPool, backend: str) -> None:
    (seen, order), (none, _) = two_ranks.run(seen_while_the_other_rank_sleeps, backend)
    assert none is None
    assert seen is not None
    first_wait = next(i for i, (what, _) in enumerate(order) if what == "wait")
    assert (seen.doing, seen.index, seen.what, seen.bucket) == ("collective", first_wait, *order[first_wait])
    assert seen.fqns
    assert seen.ranks == (0, 1)
    assert re.fullmatch(r"test_faults\.py:\d+", seen.where)


def names_in_a_trace(regions: str) -> list[str]:
    model = graphshard.compile(Net(), init_device_mesh("cpu", (2,)), backend="aot_eager", regions=regions)
    train(model, 2)
    with profile() as profiler:
        model(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
    return [event.name.removeprefix("graphshard: ") for event in profiler.events() if "graphshard: " in event.name]


@pytest.mark.parametrize("regions", ["model", "unit"])
def test_traces_name_every_launch_and_wait_with_its_parameters(two_ranks: WorkerPool, regions: str) -> None:
    for names in two_ranks.run(names_in_a_trace, regions):
        for what in ("launch gather", "wait gather", "launch reduce", "wait reduce"):
            carried = [name for name in names if name.startswith(f"{what}:blocks.")]
            found = set(re.findall(r"blocks\.\d\.(?:weight|bias)", " ".join(carried)))
            assert found == {f"blocks.{i}.{name}" for i in range(3) for name in ("weight", "bias")}, (what, names)
