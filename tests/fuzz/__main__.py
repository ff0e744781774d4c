"""Random jobs, compared with eager FSDP2 bit for bit: `python -m tests.fuzz [--cases N] [--seed S] [--case JSON]`.

Jobs come in rounds. One that fails ends its round: it is made as small as it goes, and printed as a line that `--case`
runs again. Exit status 1 if any has failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter

import hypothesis

from graphshard.testing import shutdown_pools
from graphshard.testing.failures import RankFailed
from tests.fuzz.cases import Case, cases, smaller
from tests.fuzz.play import test_of

ROUND = 25
# So many smaller ones are tried of a case that fails, and so long: one that hangs takes minutes.
TRIALS, TRIALS_S = 80, 150.0


PLAYED = "cases"


class Failed(Exception):
    """A case that failed, and how."""

    def __init__(self, case: Case, failure: str) -> None:
        super().__init__(failure)
        self.case = case


def failure_of(case: Case, backend: str) -> str | None:
    """What went wrong, in words; None: nothing."""
    try:
        test_of(case)(backend=backend, text=str(case))
    except RankFailed as error:
        return str(error)
    return None


def kind_of(failure: str) -> str:
    """The exception: the same for failures of one cause, most often."""
    found = re.search(r"raised: ([\w.]*\.)?(\w+: .*)", failure)
    line = found.group(2) if found else failure.splitlines()[0]
    return re.sub(r"'[^']*'|%\w+|[0-9]+", "_", line)[:100]


def play_round(count: int, seed: int, backend: str, played: Counter[str]) -> None:
    """Plays up to `count` cases.

    Args:
        count: how many.
        seed: of the round.
        backend: of `graphshard.compile`.
        played: counts cases, and what eager FSDP2 itself refuses.

    Raises:
        Failed: a case of the round.
    """

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate,),
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.seed(seed)
    @hypothesis.given(case=cases())
    def check(case: Case) -> None:
        failure = failure_of(case, backend)
        played[PLAYED] += 1
        if failure is not None and (kind := kind_of(failure)).startswith("EagerRefuses"):
            played[kind] += 1
        elif failure is not None:
            raise Failed(case, failure)

    check()


def shrunk(found: Failed, backend: str) -> Case:
    """A smaller case that fails in the same way."""
    case, kind, trials, start = found.case, kind_of(str(found)), 0, time.monotonic()
    while True:
        for less in smaller(case):
            trials += 1
            if trials > TRIALS or time.monotonic() - start > TRIALS_S:
                return case
            failure = failure_of(less, backend)
            if failure is not None and kind_of(failure) == kind:
                case = less
                break
        else:
            return case


def main() -> int:
    """Plays cases and says what came out."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=ROUND, help=f"how many; {ROUND}")
    parser.add_argument("--seed", type=int, default=0, help="0")
    parser.add_argument("--case", help="one case, as it was printed")
    parser.add_argument("--backend", default="aot_eager", help="aot_eager")
    options = parser.parse_args()
    if options.case:
        failure = failure_of(Case.parse(options.case), options.backend)
        print(failure or "equal")
        return int(failure is not None)
    played, failures, start = Counter[str](), 0, time.monotonic()
    rounds = -(-options.cases // ROUND)
    for number, first in enumerate(range(0, options.cases, ROUND)):
        count = min(ROUND, options.cases - first)
        try:
            play_round(count, options.seed * 1000 + number, options.backend, played)
            print(f"round {number + 1} of {rounds}: equal", flush=True)
        except Failed as error:
            failures += 1
            print(f"round {number + 1} of {rounds}: {kind_of(str(error))}\n  --case '{error.case}'", flush=True)
            print(f"  smaller: --case '{shrunk(error, options.backend)}'", flush=True)
    cases = played.pop(PLAYED, 0)
    print(f"{rounds - failures} of {rounds} rounds equal, {cases} cases, {time.monotonic() - start:.0f} s")
    for kind, times in played.items():
        print(f"  refused by eager FSDP2 {times} times: {kind}")
    return int(failures > 0)


if __name__ == "__main__":
    status = main()
    shutdown_pools()
    sys.exit(status)
