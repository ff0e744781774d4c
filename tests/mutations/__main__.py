"""Makes each break in a copy of the repository and runs the tests that have to notice: `python -m tests.mutations`.

    python -m tests.mutations [TEXT ...]     # only breaks whose file or property has one of the texts

Exit status 1 if a break goes unnoticed, or if the tests fail without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.breaks import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("graphshard", "passes", "tests", "bench", "docs", "examples")
FILES = ("pyproject.toml", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff")
TIMEOUT_S = 300
FAILED = 1  # pytest's exit status when tests have failed


def copied(folder: Path) -> Path:
    """A copy of the working tree."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Exit status and last lines of pytest in a copy; a run that hangs has failed."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end after {TIMEOUT_S} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-15:])


def is_caught(folder: Path, mutation: Mutation) -> tuple[bool, str]:
    """Whether the tests of a break fail with it, and what they said."""
    path = folder / mutation.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutation.broken(source), encoding="utf-8")
    try:
        status, said = run(folder, mutation.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    return status == FAILED, said


def main(texts: Sequence[str]) -> int:
    """Runs the breaks; prints a line for each."""
    chosen = [m for m in MUTATIONS if not texts or any(text in f"{m.file} {m.says}" for text in texts)]
    with tempfile.TemporaryDirectory(prefix="graphshard-mutations-") as name:
        folder = copied(Path(name))
        for mutation in chosen:
            mutation.broken((folder / mutation.file).read_text(encoding="utf-8"))
        selections = list(dict.fromkeys(mutation.tests for mutation in chosen))
        for tests in selections:
            status, said = run(folder, tests)
            if status != 0:
                print(f"without any break, pytest {' '.join(tests)} ends with status {status}:\n{said}")
                return 1
        caught = 0
        for mutation in chosen:
            start = time.monotonic()
            noticed, said = is_caught(folder, mutation)
            caught += noticed
            mark = "caught" if noticed else "NOT CAUGHT"
            print(f"{mark:10}  {time.monotonic() - start:4.0f} s  {mutation.room}: {mutation.says}", flush=True)
            if not noticed:
                print(said)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
