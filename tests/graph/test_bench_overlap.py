"""`bench.overlap` and `bench.gpu`: what they read off traces, claim, and do on a tiny decoder."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench.gpu import __main__ as gpu
from bench.networks.loopback import Loopback
from bench.overlap import __main__ as overlap
from bench.overlap import worker as overlap_worker
from bench.overlap.exposed import Occupied, Span, joined, occupied, read_trace
from bench.overlap.rows import (
    OverlapPrediction,
    OverlapRow,
    OverlapRun,
    PretendedNetwork,
    check_losses,
    overlap_claims,
    overlap_table,
)
from bench.overlap.systems import AUTO, PEERS, REFERENCE, SYSTEMS, TINY, make_decoder, prepare
from graphshard.cost import CostModel, GroupShape

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),  # names of torch 2.11 and 2.12
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo's, of FSDP2's parameters
]

NETWORK = PretendedNetwork(8, 32.0, 361.0)
RUN = OverlapRun(100.0, 90.0, 4.0, 50.0, 1000, 1.0, (4.0, 3.0), 7, OverlapPrediction(95.0, 3.0, 90.0, 88.0))


def kernel(name: str, stream: int, start: float, duration: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_exposed_is_what_only_the_network_does() -> None:
    assert joined([Span(3, 4), Span(0, 2), Span(1, 3)]) == [Span(0, 4)]
    assert occupied([Span(0, 2), Span(5, 6)], [Span(1, 4), Span(3, 5.5)]) == Occupied(3, 4.5, 3)
    assert occupied([], [Span(1, 2)]).exposed_us == 1


def test_trace_is_sorted_by_stream_not_by_name() -> None:
    events = [
        kernel("gemm", 7, 0, 10),
        kernel("hold_until", 20, 5, 10),
        kernel("elementwise_copy", 20, 4, 1),  # the network's own copy
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99},
        {"cat": "kernel", "name": "instant", "args": {"stream": 7}},
    ]
    assert read_trace(events, lambda name: name == "hold_until") == Occupied(10, 11, 5)
    with pytest.raises(ValueError, match="no kernel of the network among 3"):
        read_trace(events, lambda name: name == "nothing")


def test_network_is_read_and_refused() -> None:
    assert PretendedNetwork.parse(NETWORK.text) == NETWORK
    for text in ("8:32", "1:32:361", "8:-1:361", "8:32:0", "a:b:c"):
        with pytest.raises(argparse.ArgumentTypeError, match="want RANKS:US:GB/S"):
            PretendedNetwork.parse(text)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planner_expects_the_time_that_the_network_takes(device: str) -> None:
    cost = CostModel(overlap_worker.pretended_hardware(NETWORK, device))
    with Loopback(NETWORK.ranks, NETWORK.alpha_us, NETWORK.gb_s) as loopback:
        own = torch.ones(1000)
        torch.distributed.all_gather_into_tensor(torch.empty(8000), own)
        torch.distributed.reduce_scatter_tensor(torch.empty(125), own)
        torch.distributed.all_reduce(own)
        launches = list(loopback.launches)
    shape = GroupShape(NETWORK.ranks, 1)
    for launch, num_bytes in zip(launches, (32000, 4000, 4000), strict=True):
        assert launch.us == pytest.approx(cost.collective_us(launch.kind, num_bytes, shape))  # type: ignore[arg-type]


def test_claims_are_of_what_was_measured() -> None:
    rows = [OverlapRow(system, NETWORK, replace(RUN, step_us=110.0)) for system in PEERS]
    rows.append(OverlapRow(AUTO, NETWORK, RUN))

    def held(rows: list[OverlapRow], measured: bool = True) -> list[bool | None]:
        return [claim.holds for claim in overlap_claims(rows, PEERS, AUTO, REFERENCE, measured)]

    assert held(rows) == [True, True, True, True]
    assert held(rows, measured=False) == [None] * 4
    assert held([row for row in rows if row.system != AUTO]) == [None] * 4
    blind = replace(RUN, exposed_us=None, communicating_us=None)  # the profiler sees nothing
    assert held([*rows[:-1], OverlapRow(AUTO, NETWORK, blind)]) == [True, None, True, True]
    assert overlap_table([OverlapRow(AUTO, NETWORK, blind)], PEERS)
    slow = replace(RUN, step_us=107.0, exposed_us=20.0, passes_us=80.0, peak_bytes=1001)
    assert held([*rows[:-1], OverlapRow(AUTO, NETWORK, slow)]) == [False] * 4
    tail = replace(RUN, exposed_us=20.0, prediction=OverlapPrediction(95.0, 20.0, 100.0, 75.0))
    assert held([*rows[:-1], OverlapRow(AUTO, NETWORK, tail)])[1] is True  # no schedule hides it
    assert "not measured" not in overlap_table(rows, PEERS)[1]


def test_other_losses_are_told() -> None:
    rows = [OverlapRow("FSDP2", NETWORK, RUN), OverlapRow(AUTO, NETWORK, replace(RUN, losses=(4.0, 3.5)))]
    assert check_losses(rows) == [f"{AUTO}, {NETWORK.name}: loss of step 1: got 3.5, want 3 as FSDP2"]
    assert check_losses([rows[0], OverlapRow(AUTO, NETWORK, None, "it ended")]) == []
    assert check_losses([rows[0], OverlapRow(AUTO, NETWORK, replace(RUN, losses=(4.0, math.nan)))])


def test_run_is_read_back_as_it_was_written() -> None:
    from dataclasses import asdict

    assert OverlapRun.read(json.loads(json.dumps(asdict(RUN)))) == RUN


def test_every_system_trains_the_same_model() -> None:
    network = PretendedNetwork(4, 10.0, 10.0)
    rows = [
        OverlapRow(system, network, overlap_worker.run_on(system, network, 1, 16, 1, "cpu", "aot_eager"))
        for system in SYSTEMS
    ]
    assert check_losses(rows) == []
    for row in rows:
        assert row.run is not None and row.run.launches, row.system
        losses = row.run.losses
        assert len(set(losses)) == len(losses) and abs(losses[0] - math.log(TINY.vocab)) < 0.5, row.system
        assert (row.run.prediction is not None) == row.system.startswith("graphshard"), row.system


def test_per_parameter_baseline_gathers_every_parameter_in_both_directions() -> None:
    with Loopback(4, 10.0, 10.0) as network:
        model = make_decoder(TINY, "cpu")
        count = len(list(model.parameters()))
        mesh = init_device_mesh("cpu", (4,))
        forward = prepare("per parameter + torch.compile", model, mesh, "", "aot_eager")
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        forward(tokens, tokens).backward()
        kinds = [launch.kind for launch in network.launches if launch.sent_bytes]
    assert kinds.count("reduce_scatter") == count
    assert count < kinds.count("all_gather") <= 2 * count  # those that backward does not read are not gathered again


def test_bench_needs_a_gpu_or_quick(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for main in (overlap.main, gpu.main):
        with pytest.raises(SystemExit):
            main([])
        assert "only --quick runs without one" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["--quick", "--minutes", "0"])
        assert "--minutes: got 0.0, want more than 0" in capsys.readouterr().err


def test_what_is_not_done_in_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--quick", "--systems", "FSDP2", "--minutes", "0.001"]) == 1
    assert "not measured: the 0.001 minutes of --minutes were over" in capsys.readouterr().out


def test_gpu_bench_prints_the_claims_of_its_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "PARTS", {"copies": 0.3})
    assert gpu.main(["--quick", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out.partition("=== all claims")[2]
    assert "at least 90% of the bandwidth of copy_" in said and "not measured" in said
    assert {path.name for path in tmp_path.iterdir()} == {"copies.json", "copies.txt"}
    part = gpu.run_part("copies", ["--nonsense"], 1.0, tmp_path)
    assert "unrecognized arguments: --nonsense" in part.failed
