"""Copies between tensors and flat buffers: `python -m bench.copies [--quick] [--json FILE] [--max-mib N]`.

Measures graphshard's fused operators on a GPU against torch's operators that do the same, and against the bandwidth of
a plain `Tensor.copy_`. Before a row is timed, all peers must give the same bits. Without CUDA only `--quick` runs: tiny
buckets on the CPU, whose timings are no results. The exit status is 0 whatever the numbers are, 1 if bits differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.copies.cases import CASES, Copy, CopyBucket, CopyCase
from bench.copies.cuda_time import HOST_CALLS, CudaTimer, HostTimer, Timer, host_us
from bench.copies.peers import Peer, peers_of
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
from bench.harness.machine import Gpu, Machine
from bench.harness.printing import say, say_progress
from bench.harness.tables import claim_table, gpu_line, machine_lines
from graphshard.kernels.available import why_unfused

# At least, of the flat buffer; the last: more than 4 GiB, so that bytes and elements are beyond 32 bits.
SIZES = tuple(mib * MIB for mib in (1, 8, 32, 128, 512, 4097))
QUICK_SIZES = (1, MIB // 4)
ROUNDS, QUICK_ROUNDS = 30, 3
# Inductor's code for a bucket takes seconds to make: one size of each case.
COMPILED_SIZES = (32 * MIB, QUICK_SIZES[0])


@dataclass(frozen=True)
class CopyOptions:
    """What is asked for.

    Attributes:
        max_bytes: of a flat buffer; larger ones are left out.
    """

    quick: bool
    max_bytes: int | None
    json: Path | None


@dataclass(frozen=True)
class CopySetup:
    """How rows are measured.

    Attributes:
        compiler: backend of `torch.compile`.
        rounds: samples of each call.
    """

    timer: Timer
    compiler: str
    rounds: int


def parse_options(argv: Sequence[str] | None = None) -> CopyOptions:
    """Reads the command line; leaves the program, with a line that says why, if it asks for something impossible."""
    parser = argparse.ArgumentParser(prog="bench.copies", description="copies against those of torch, on a GPU")
    parser.add_argument("--quick", action="store_true", help="tiny buckets: shows that it works, no results")
    parser.add_argument("--json", type=Path, help="writes machine, rows and claims to this file")
    parser.add_argument("--max-mib", type=int, metavar="N", help="leaves out flat buffers of more")
    args = parser.parse_args(argv)
    if args.max_mib is not None and args.max_mib < 1:
        parser.error(f"--max-mib: got {args.max_mib}, want at least 1")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: got {args.json}, want a file in a folder that is there")
    if not args.quick and not torch.cuda.is_available():
        parser.error("no CUDA device is there: only --quick runs without one")
    return CopyOptions(args.quick, None if args.max_mib is None else args.max_mib * MIB, args.json)


def buckets(options: CopyOptions) -> Iterator[tuple[CopyCase, CopyBucket, bool]]:
    """Every case at every size, and whether its compiled peer is measured."""
    for case in CASES:
        for size in QUICK_SIZES if options.quick else SIZES:
            bucket = case.bucket(size)
            if options.max_bytes is None or case.flat_bytes(bucket) <= options.max_bytes:
                yield case, bucket, size in COMPILED_SIZES


def copy_row(setup: CopySetup, case: CopyCase, bucket: CopyBucket, compiled: bool) -> CopyRow:
    """Compares the bits of one case at one size, then times it.

    Raises:
        torch.OutOfMemoryError: the device is too small for the bucket.
    """
    tensors = case.tensors(bucket, setup.timer.device)
    ours = case.fused(bucket, tensors)
    peers = peers_of(case, bucket, tensors, setup.compiler if compiled else None)
    same, differing, left_out = _compared(ours, peers)
    sizes = (case.name, len(bucket.sizes), case.flat_bytes(bucket), case.moved_bytes(bucket))
    if differing:
        return CopyRow(*sizes, differing=differing, left_out=left_out)
    source = torch.empty(case.moved_bytes(bucket) // 2, dtype=torch.uint8, device=setup.timer.device).random_()
    target = torch.empty_like(source)
    calls = [ours, lambda: target.copy_(source), *(peer.run for peer in same)]
    mine, plain, *theirs = setup.timer.times(calls, setup.rounds)
    return CopyRow(
        *sizes,
        mine.median_us,
        *mine.quartiles_us,
        plain.median_us,
        mine.with_host,
        tuple(
            PeerTime(peer.name, timing.median_us, mine.median_us / timing.median_us, timing.with_host)
            for peer, timing in zip(same, theirs, strict=True)
        ),
        left_out=left_out,
    )


def _compared(ours: Copy, peers: Sequence[Peer]) -> tuple[list[Peer], tuple[str, ...], tuple[str, ...]]:
    """Peers with the same bits; names of those with others; those that fail, and why."""
    want = ours()
    same, differing, left_out = [], [], []
    for peer in peers:
        try:
            if peer.differs_from(want):
                differing.append(peer.name)
            else:
                same.append(peer)
        except RuntimeError as error:  # out of memory, or what this torch or device does not support
            left_out.append(f"{peer.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return same, tuple(differing), tuple(left_out)


def measure_rows(setup: CopySetup, options: CopyOptions) -> list[CopyRow]:
    """Measures and prints copies."""
    rows, too_large = [], []
    for case, bucket, compiled in buckets(options):
        say_progress(f"{case.name}, {case.flat_bytes(bucket) / MIB:,.2f} MiB")
        try:
            rows.append(copy_row(setup, case, bucket, compiled))
        except torch.OutOfMemoryError:
            too_large.append(f"{case.name}, {case.flat_bytes(bucket) / MIB:,.0f} MiB")
        setup.timer.release()
    say(
        "",
        f"Copies of parameters of Llama 3 8B's blocks on 8 ranks; medians of {setup.rounds} calls, all in turn, each",
        "timed by events behind 256 MiB or more that are written: no input is in L2, and L2 is full of lines to write",
        "back; the device gets to a call when all of it is enqueued. moved: bytes read and written at least; of copy_:",
        "share of the bandwidth of a plain Tensor.copy_ of as many; / best: graphshard's time to that of torch's best",
        "",
        *copy_table(rows),
        "",
        *peer_table(rows),
        *note_lines(rows),
        *([f"NOTE: too large for this device's memory: {'; '.join(too_large)}"] if too_large else []),
    )
    return rows


def measure_host_rows(setup: CopySetup, options: CopyOptions) -> list[HostRow]:
    """Measures and prints host time, of the first case of each kind."""
    rows = []
    firsts = {case.kind: case for case in reversed(CASES)}
    calls_of_loop = QUICK_ROUNDS if options.quick else HOST_CALLS
    for case in reversed(firsts.values()):
        bucket = case.bucket((QUICK_SIZES if options.quick else SIZES)[0])
        tensors = case.tensors(bucket, setup.timer.device)
        calls = {"graphshard": case.fused(bucket, tensors)}
        calls |= {peer.name: peer.run for peer in peers_of(case, bucket, tensors, None)}
        times = {name: host_us(setup.timer, call, calls_of_loop) for name, call in calls.items()}
        rows += [
            HostRow(case.name, name, len(bucket.sizes), us, times["graphshard"] / us) for name, us in times.items()
        ]
    say("", "Host time of a call, in a loop that waits for nothing; graphshard's tables of addresses are there", "")
    say(*host_table(rows))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    timer: Timer = CudaTimer() if torch.cuda.is_available() else HostTimer()
    on_gpu, unfused = timer.device.type == "cuda", why_unfused(timer.device)
    if not on_gpu:
        say("NOTE: no CUDA device: these timings are no results")
    machine, gpu = Machine.this(), Gpu.this(timer.device) if on_gpu else None
    say(*machine_lines(machine), *([] if gpu is None else [gpu_line(gpu)]))
    if options.quick:
        say("NOTE: --quick measures too little for results")
    if on_gpu and unfused is not None:
        say(f"NOTE: {unfused}: no claim is measured")
    torch.manual_seed(0)
    compiler = "inductor" if on_gpu else "aot_eager"
    setup = CopySetup(timer, compiler, QUICK_ROUNDS if options.quick else ROUNDS)
    with torch.no_grad():
        rows, host_rows = measure_rows(setup, options), measure_host_rows(setup, options)
    checked = copy_claims(rows, on_gpu and not options.quick and unfused is None)
    say("", *claim_table(checked))
    if options.json is not None:
        written = {
            "machine": asdict(machine),
            "gpu": None if gpu is None else asdict(gpu),
            "quick": options.quick,
            "rows": [asdict(row) for row in rows],
            "host": [asdict(row) for row in host_rows],
            "claims": [asdict(claim) for claim in checked],
        }
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return int(any(row.differing for row in rows))


if __name__ == "__main__":
    sys.exit(main())
