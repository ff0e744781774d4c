"""Everything that is claimed of one GPU, in one table: `python -m bench.gpu [--minutes M] [--folder DIR] [--quick]`.

Runs `bench.copies` and `bench.overlap`, each in a process of its own and within its part of the minutes, then prints
what they found beside what is claimed. What a part printed and its JSON are kept in DIR. The exit status is 0 whatever
the numbers are, 1 if a part failed or was not done in time. Without CUDA only `--quick` runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.harness.claims import Claim
from bench.harness.printing import say, say_progress
from bench.harness.tables import claim_table

MINUTES = 9.0
# Of the minutes; the rest is for the start of processes.
PARTS = {"copies": 0.3, "overlap": 0.65}
_LAST_CHARS = 2000


@dataclass(frozen=True)
class PartResult:
    """What one bench said.

    Attributes:
        name: of the bench.
        claims: that it checked, none if it failed.
        failed: why; ``""``: it did not.
    """

    name: str
    claims: tuple[Claim, ...]
    failed: str


def run_part(name: str, arguments: Sequence[str], minutes: float, folder: Path) -> PartResult:
    """Runs one bench to its end, or for so many minutes."""
    results, log = folder / f"{name}.json", folder / f"{name}.txt"
    command = [sys.executable, "-m", f"bench.{name}", "--json", str(results), *arguments]
    failed = ""
    with log.open("w") as output:
        try:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=60 * minutes)
            if ended.returncode:
                failed = f"ended with {ended.returncode}: {log.read_text()[-_LAST_CHARS:]}"
        except subprocess.TimeoutExpired:
            failed = f"was not done in {minutes:.1f} minutes"
    claims = json.loads(results.read_text())["claims"] if results.exists() else []
    return PartResult(name, tuple(Claim(**claim) for claim in claims), failed)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description="all claims about one GPU, in one table")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all; {MINUTES:g}")
    parser.add_argument("--folder", type=Path, help="keeps what the benches print and write; a temporary one")
    parser.add_argument("--quick", action="store_true", help="shows that it works, on the CPU: no results")
    args = parser.parse_args(argv)
    if not args.minutes > 0.0:
        parser.error(f"--minutes: got {args.minutes}, want more than 0")
    if args.folder is not None and not args.folder.is_dir():
        parser.error(f"--folder: got {args.folder}, want a folder that is there")
    if not args.quick and not torch.cuda.is_available():
        parser.error("no CUDA device is there: only --quick runs without one")
    quick = ["--quick"] if args.quick else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        parts = []
        for name, share in PARTS.items():
            say_progress(f"bench.{name}")
            minutes = args.minutes * share
            own = ["--minutes", str(minutes), *(["--backend", "aot_eager"] if quick else [])]
            parts.append(run_part(name, [*quick, *(own if name == "overlap" else [])], minutes + 0.2, folder))
            say("", f"=== bench.{name}", (folder / f"{name}.txt").read_text().rstrip())
    say("", "=== all claims", *claim_table([claim for part in parts for claim in part.claims]))
    failed = [part for part in parts if part.failed]
    say(*(f"FAILED: bench.{part.name} {part.failed}" for part in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
