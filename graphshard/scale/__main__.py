"""The scale studies as a program of their own.

python -m graphshard.scale plan --model llama3-8b --world 8..512     what `graphshard plan` does
python -m graphshard.scale validate [--cluster NAME] [--write FILE]  predicted and published throughput
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graphshard.scale import command, validate
from graphshard.scale.published import CLUSTERS

BEGIN, END = "<!-- begin: python -m graphshard.scale validate -->\n", "<!-- end -->\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m graphshard.scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    command.add_arguments(commands.add_parser("plan", help="a step on any number of GPUs"))
    checking = commands.add_parser("validate", help="predicted and published throughput, as a Markdown table")
    checking.add_argument("--cluster", choices=tuple(CLUSTERS), action="append", help="this one; all by default")
    checking.add_argument("--write", type=Path, metavar="FILE", help="puts the table into FILE, between its marks")
    args = parser.parse_args(argv)
    if args.command == "plan":
        return command.run(args)
    text = validate.table(validate.compare(args.cluster or tuple(CLUSTERS)))
    sys.stdout.write(text)
    if args.write is not None:
        args.write.write_text(with_table(args.write.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


def with_table(document: str, text: str) -> str:
    """`document` with `text` between its marks.

    Raises:
        ValueError: it has none.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"validate: the file has no lines {BEGIN.strip()!r} and {END.strip()!r}; add them")
    return f"{before}{begin}{text}{end}{after}"


if __name__ == "__main__":
    sys.exit(main())
