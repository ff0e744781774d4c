"""`bench.copies`: what a copy moves at least, rows and claims on made-up numbers, and the whole path on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.copies import __main__ as copies
from bench.copies import cuda_time
from bench.copies.cases import BLOCK, CASES, GATHER_IN, GATHER_OUT, REDUCE_IN, WORLD_SIZE, CopyBucket, CopyCase
from bench.copies.cuda_time import CallTiming, CudaTimer, HostTimer
from bench.copies.peers import FSDP2, Peer, peers_of, same_bits
from bench.copies.rows import (
    MIB,
    CopyRow,
    HostRow,
    PeerTime,
    copy_claims,
    copy_table,
    host_table,
    note_lines,
    peer_table,
)
from bench.harness.machine import Gpu
from bench.harness.tables import claim_table, gpu_line

FP32, BF16 = torch.float32, torch.bfloat16
BLOCK_NUMEL = 218_112_000
EVEN = CopyBucket(((16, 3), (8,)), (0, 0))
UNEVEN = CopyBucket(((13, 3), (7,)), (0, 0))  # padded: 16 x 3 and 8


def row(share: float, **changes: Any) -> CopyRow:
    """40 us for 64 MiB moved, 32 MiB of them in the buffer."""
    peers = (PeerTime("slow", 80.0, 0.5), PeerTime("fast", 40.0, 1.0), PeerTime("late", 20.0, 2.0, with_host=True))
    made = CopyRow("gather copy-in", 9, 32 * MIB, 64 * MIB, 40.0, 39.0, 41.0, 40.0 * share, peers=peers)
    return replace(made, **changes)


# -- what is copied


@pytest.mark.parametrize(
    ("case", "even", "uneven"),
    [
        (CopyCase(GATHER_IN, FP32, BF16), 7 * 6, 7 * 6),  # of a local element: 4 read, 2 written
        (CopyCase(GATHER_IN, BF16, BF16), 7 * 4, 7 * 4),
        (CopyCase(REDUCE_IN, BF16, FP32), 56 * 6, 46 * 2 + 56 * 4),  # zeros are written, not read
        (CopyCase(REDUCE_IN, BF16, BF16, divisor=8.0), 56 * 4, 46 * 2 + 56 * 2),
        (CopyCase(GATHER_OUT, BF16, BF16), 56 * 4, 46 * 4),
    ],
)
def test_least_bytes_are_what_is_read_and_written_once(case: CopyCase, even: int, uneven: int) -> None:
    assert (case.moved_bytes(EVEN), case.moved_bytes(UNEVEN)) == (even, uneven)


def test_flat_bytes_are_of_one_rank_only_before_a_gather() -> None:
    flat = [CopyCase(kind, FP32, BF16).flat_bytes(UNEVEN) for kind in (GATHER_IN, GATHER_OUT, REDUCE_IN)]
    assert flat == [7 * 2, 56 * 2, 56 * 2]


def test_buckets_are_slices_of_a_block_or_several_blocks() -> None:
    case = CopyCase(GATHER_OUT, BF16, BF16)
    assert case.bucket(416 * MIB) == CopyBucket(BLOCK, (0,) * len(BLOCK))
    assert case.bucket(416 * MIB).numel == BLOCK_NUMEL
    half, smallest, several = case.bucket(200 * MIB), case.bucket(1), case.bucket(4097 * MIB)
    assert half.sizes[0] == (2048, 4096)
    assert smallest.sizes[1] == (16, 64)
    assert len(several.sizes) == 10 * len(BLOCK)
    assert several.numel > 2**31


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_size_is_reached_and_no_more_than_twice_over(case: CopyCase) -> None:
    for size in copies.SIZES:
        bucket = case.bucket(size)
        assert size <= case.flat_bytes(bucket) < 2 * size
        evenly = all(size[dim] % WORLD_SIZE == 0 for size, dim in zip(bucket.sizes, bucket.dims, strict=True))
        assert evenly != case.uneven
        assert all(chunk % 2 for chunk in bucket.chunks) == case.uneven


def test_dim_1_is_for_matrices() -> None:
    assert CopyCase(REDUCE_IN, BF16, FP32, dim=1).bucket(1).dims == (1, 1, 1, 1, 1, 1, 1, 0, 0)


# -- peers


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert CASES[2].name == "gather copy-in fp32 to bf16, uneven"


def test_peers_that_write_nothing_or_other_bits_are_found() -> None:
    case = CopyCase(GATHER_IN, FP32, BF16)
    bucket = case.bucket(1)
    tensors = case.tensors(bucket, torch.device("cpu"))
    want = case.fused(bucket, tensors)()
    peers = peers_of(case, bucket, tensors, None)
    assert [peer.name for peer in peers if peer.name.startswith(FSDP2)] == [peers[0].name]
    assert not any(peer.differs_from(want) for peer in peers)
    right = want[0].clone()
    assert Peer("writes nothing", lambda: [right], (right,)).differs_from(want)
    assert not same_bits([torch.tensor([0.0])], [torch.tensor([-0.0])])
    assert not same_bits(want, [want[0].view(2, -1)])

    def broken() -> list[Tensor]:
        raise NotImplementedError("not here\nreally")

    named = [Peer("wrong", lambda: [want[0] + 1]), Peer("right", lambda: want), Peer("broken", broken)]
    same, differing, left_out = copies._compared(lambda: want, named)
    assert ([peer.name for peer in same], differing) == (["right"], ("wrong",))
    assert left_out == ("broken: NotImplementedError: not here",)


# -- rows


def test_row_tells_bandwidth_share_and_the_best_peer() -> None:
    found = row(0.95)
    assert found.gb_per_s == pytest.approx(64 * MIB / 40e-6 / 1e9)
    assert found.share == pytest.approx(0.95)
    assert found.best is not None and found.best.name == "fast"
    (line,) = copy_table([found])[1:]
    assert line.split() == (
        ["gather", "copy-in", "fast", "32.00", "9", "64.00", "40.0", "39.0", "-", "41.0", "1,678", "95.0%", "1.000"]
    )
    assert [line.split()[-3:] for line in peer_table([found])[1:]] == [
        ["32.00", "80.0", "0.500"],
        ["32.00", "40.0", "1.000"],
        ["32.00", "20.0*", "2.000"],
    ]
    assert "graphshard / it" in host_table([HostRow("case", "peer", 9, 10.0, 2.0)])[0]


def test_row_of_other_bits_is_not_timed() -> None:
    failed = CopyRow("gather copy-in", 9, 32 * MIB, 64 * MIB, differing=("cat",), left_out=("x: no",))
    assert "OTHER BITS: cat" in copy_table([failed])[1]
    assert peer_table([failed])[1:] == []
    assert note_lines([failed]) == ["NOTE: left out: gather copy-in, 32.00 MiB: x: no"]
    assert [claim.holds for claim in copy_claims([failed], True)] == [False, None, None]


@pytest.mark.parametrize(
    ("rows", "holds"),
    [
        ([row(0.95)], [True, True, True]),
        ([row(0.95), row(0.89)], [True, False, True]),
        ([row(0.95, peers=(PeerTime("fast", 39.0, 1.026),))], [True, True, False]),
        ([row(0.95, peers=(PeerTime("fast", 39.5, 1.013),))], [True, True, True]),
        ([row(0.1, flat_bytes=MIB)], [True, None, None]),
        ([row(0.95, peers=())], [True, True, None]),
    ],
)
def test_claims_are_of_large_copies(rows: list[CopyRow], holds: list[bool | None]) -> None:
    checked = copy_claims(rows, True)
    assert [claim.holds for claim in checked] == holds
    words = {True: "yes", False: "NO", None: "-"}
    assert [line.split()[-1] for line in claim_table(checked)[1:]] == [words[held] for held in holds]


def test_claims_name_the_worst_row() -> None:
    assert copy_claims([row(0.95), row(0.8)], True)[1].got == "1 of 2, worst 80.0% (gather copy-in, 32.00 MiB)"


def test_claims_without_a_gpu_are_not_measured() -> None:
    bits, *others = copy_claims([row(0.95)], False)
    assert bits.holds
    assert [(claim.got, claim.holds) for claim in others] == [("not measured", None)] * 2


# -- times


class FakeEvent:
    """A device that is where the host is after so many flushes."""

    flushes = 0
    needed = 3

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return FakeEvent.flushes < FakeEvent.needed

    def synchronize(self) -> None:
        FakeEvent.flushes = 0

    def elapsed_time(self, end: FakeEvent) -> float:
        return 0.002


class FakeFlushed:
    def zero_(self) -> None:
        FakeEvent.flushes += 1


@pytest.mark.parametrize(("needed", "with_host"), [(3, False), (10**6, True)])
def test_gpu_is_busy_until_a_call_is_enqueued(needed: int, with_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: FakeFlushed())
    monkeypatch.setattr(FakeEvent, "needed", needed)
    calls = []
    (timing,) = CudaTimer().times([lambda: calls.append(0)], 5)
    assert timing == CallTiming((2.0,) * 5, with_host)
    assert len(calls) >= 1 + cuda_time.WARM_ROUNDS + 5


def test_samples_that_waited_for_the_host_are_dropped_if_few() -> None:
    assert cuda_time._timing([(1.0, False), (2.0, False), (9.0, True)]) == CallTiming((1.0, 2.0))
    assert cuda_time._timing([(1.0, False), (9.0, True)]).with_host
    assert CallTiming((1.0, 2.0, 4.0)).quartiles_us == (1.5, 3.0)
    assert CallTiming((1.0,)).quartiles_us == (1.0, 1.0)


def test_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="a GPU", total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert gpu_line(Gpu.this(torch.device("cuda", 0))).startswith("a GPU, 1 GiB, driver unknown, CUDA")


# -- the whole path


def test_options_name_what_is_impossible(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv, message in {
        (): "only --quick runs",
        ("--quick", "--max-mib", "0"): "--max-mib: got 0",
        ("--quick", "--json", "/none/x.json"): "want a file in a folder that is there",
    }.items():
        with pytest.raises(SystemExit):
            copies.parse_options(argv)
        assert message in capsys.readouterr().err


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda *argv: copies.main(["--quick", *argv])


def test_quick_compares_all_peers_on_the_cpu(
    on_cpu: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    assert on_cpu("--json", str(file)) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "NOTE: no CUDA device: these timings are no results"
    assert out.count("not measured") == 2
    written = json.loads(file.read_text())
    assert [claim["holds"] for claim in written["claims"]] == [True, None, None]
    rows = written["rows"]
    assert len(rows) == 2 * len(CASES)
    assert not any(found["differing"] or found["left_out"] for found in rows), rows
    assert {len(found["peers"]) for found in rows} == {3, 4, 5}
    assert len({found["case"] for found in written["host"]}) == 3


def test_too_large_for_memory_is_said_once(
    on_cpu: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> CopyRow:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(copies, "copy_row", refuse)
    monkeypatch.setattr(copies, "CASES", CASES[:2])
    assert on_cpu() == 0
    assert capsys.readouterr().out.count("NOTE: too large for this device's memory: gather copy-in fp32") == 1


def test_other_bits_are_an_error(on_cpu: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: CopyCase, bucket: CopyBucket, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.cat([tensor.to(self.flat) for tensor in tensors]) + 1]

    monkeypatch.setattr(CopyCase, "fused", wrong)
    monkeypatch.setattr(copies, "CASES", CASES[:1])
    monkeypatch.setattr(HostTimer, "times", lambda *args: pytest.fail("timed"))
    assert on_cpu() == 1
