"""The command line of `bench.compile`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.harness.systems import BACKENDS, PLANS, REGIONS, System, SystemName, systems

SYSTEMS: tuple[SystemName, ...] = ("fsdp2+compile", "ddp+compile", "graphshard")
BLOCKS = (4, 12, 24, 48, 96)
QUICK_BLOCKS = (2, 4)
QUICK_SYSTEMS: tuple[SystemName, ...] = ("fsdp2+compile", "graphshard")
QUICK_PLANS, QUICK_REGIONS = ("auto",), ("model",)
FAKE_BLOCKS = (8, 32)
DEFAULT_BACKENDS = ("inductor",)


@dataclass(frozen=True)
class CompileOptions:
    """What is asked for.

    Attributes:
        blocks: depths, ascending.
        compared: systems that are measured.
        warm: whether each case runs once more on the cache that it has filled.
        fake_cuda: whether Llama 3 8B is traced and lowered, and nothing is run, instead.
    """

    blocks: tuple[int, ...]
    compared: tuple[System, ...]
    quick: bool
    warm: bool
    fake_cuda: bool
    json: Path | None
    picture: Path | None


def parse_options(argv: Sequence[str] | None = None) -> CompileOptions:
    """Reads the command line; leaves the program, with a line that says why, if it asks for something impossible."""
    parser = argparse.ArgumentParser(prog="bench.compile", description="where the seconds of the first step go")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help=f"depths of the decoder; {BLOCKS}")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, metavar="S", help=f"of {', '.join(SYSTEMS)}; all")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=DEFAULT_BACKENDS, help="of graphshard")
    parser.add_argument("--plans", nargs="+", choices=PLANS, help="of graphshard; both")
    parser.add_argument("--regions", nargs="+", choices=REGIONS, help="of graphshard; both")
    parser.add_argument("--cold-only", action="store_true", help="leaves out the runs on a warm cache")
    parser.add_argument(
        "--fake-cuda", action="store_true", help=f"Llama 3 8B with {FAKE_BLOCKS} blocks, traced and lowered, never run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes versions, machine and rows to this file")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draws the rows into this file; needs rich")
    parser.add_argument("--quick", action="store_true", help="two small depths, two systems: shows that it works")
    args = parser.parse_args(argv)
    blocks = args.blocks or (FAKE_BLOCKS if args.fake_cuda else QUICK_BLOCKS if args.quick else BLOCKS)
    if min(blocks) < 2:
        parser.error(f"--blocks: got {min(blocks)}, want at least 2, for equal blocks")
    for name, path in (("--json", args.json), ("--picture", args.picture)):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{name}: got {path}, want a file in a folder that is there")
    if args.picture is not None and find_spec("rich") is None:
        parser.error("--picture: it is drawn by rich, which is not installed: pip install rich")
    if args.picture is not None and args.fake_cuda:
        parser.error("--picture: got --fake-cuda, too, which measures no first step")
    compared = systems(
        args.systems or (QUICK_SYSTEMS if args.quick else SYSTEMS),
        args.backends,
        args.plans or (QUICK_PLANS if args.quick else PLANS),
        args.regions or (QUICK_REGIONS if args.quick else REGIONS),
    )
    return CompileOptions(
        tuple(sorted(set(blocks))), tuple(compared), args.quick, not args.cold_only, args.fake_cuda, args.json,
        args.picture,
    )  # fmt: skip
