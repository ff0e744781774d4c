"""`bench.overhead` and `bench.dispatch`: arithmetic and tables, on made-up numbers. Nothing here is timed."""

from __future__ import annotations

import pytest

from bench.dispatch.rows import dispatch_row, flip_row
from bench.dispatch.samples import DispatchTime, FirstFlip
from bench.dispatch.tables import dispatch_table, flip_table
from bench.dispatch.timer import TIMED
from bench.harness.disturbance import disturbed_lines, is_disturbed
from bench.harness.machine import Machine
from bench.harness.tables import claim_table, machine_lines
from bench.overhead.claims import check_agreement
from bench.overhead.rows import agreement_row, step_rows
from bench.overhead.samples import AgreementTime, StepTime
from bench.overhead.tables import step_table


def test_step_rows_are_medians_and_ratios() -> None:
    slow = [StepTime(2e-3, 4e-3), StepTime(3e-3, 5e-3), StepTime(2e-3, 9e-3)]
    reference, row = step_rows("inductor", {"reference": [StepTime(1e-3, 3e-3)] * 3, "slow": slow}, "reference")
    assert (reference.ratio, reference.steps) == (1.0, 3)
    got = (row.forward_us, row.backward_us, row.total_us, row.low_us, row.high_us, row.ratio)
    assert got == pytest.approx((2000, 5000, 8000, 7000, 9500, 2.0))
    assert [line.split()[:2] for line in step_table([reference, row])[1:]] == [
        ["inductor", "reference"],
        ["inductor", "slow"],
    ]


def test_claims_of_agreement_hold_or_not() -> None:
    fast = AgreementTime((1e-3,) * 3, (2e-3, 3e-3, 4e-3), 100, 0)
    row = agreement_row(2, 3, [fast, fast._replace(first_s=(2e-3, 2e-3, 70e-3), operations=1)])
    assert (row.program_ms, row.entry_ms) == (pytest.approx((2, 70)), pytest.approx((3, 4)))
    checked = check_agreement(row)
    assert [claim.holds for claim in checked] == [False, True, False]
    assert [line.split()[-1] for line in claim_table(checked)[1:]] == ["NO", "yes", "NO"]


def test_disturbed_cases_are_said() -> None:
    assert (is_disturbed(10.0, 9.5), is_disturbed(10.0, 5.0)) == (False, True)
    assert disturbed_lines([False]) == []
    assert "1 of 2" in disturbed_lines([False, True])[0]


def test_a_busy_machine_is_said() -> None:
    machine = Machine("2.13.0", "3.11", "Linux x86_64", "a processor", 2, 0.1)
    assert len(machine_lines(machine)) == 1
    assert "no results" in machine_lines(Machine("2.13.0", "3.11", "Linux x86_64", "a processor", 2, 1.0))[1]
    assert Machine.this().cores >= 1


def dispatch_time(scale: float, set_s: float = 0.0) -> DispatchTime:
    return DispatchTime(1e-3, scale * 1e-6, scale * 2e-6, scale * 7e-6, set_s)


def test_dispatch_rows_are_medians_of_sums() -> None:
    row = dispatch_row("defaults", [dispatch_time(scale) for scale in (1, 2, 9)])
    assert (row.bind_us, row.states_us, row.look_up_us, row.chosen_us) == pytest.approx((2, 4, 14, 20))
    assert (row.low_us, row.high_us, row.share, row.steps) == pytest.approx((15, 55, 0.02, 3))
    assert "2.0%" in dispatch_table([row])[1]


def test_functions_that_are_timed_are_there() -> None:
    assert all(callable(getattr(*function)) for functions in TIMED.values() for function in functions)


def test_flip_rows_tell_the_first_time_from_later() -> None:
    first = FirstFlip({"forward": 1, "backward": 2}, 0, 3e-3, 1e-3)
    row = flip_row("a flag", first, [dispatch_time(2, 5e-6)] * 3, [dispatch_time(1)] * 3)
    assert (row.lowered, row.regions) == ("2 backward, 1 forward", 0)
    got = (row.first_ms, row.lowering_ms, row.later_us, row.still_us, row.set_us)
    assert got == pytest.approx((3, 1, 20, 10, 5))
    assert flip_row("a flag", FirstFlip({}, 0, 0.0, 0.0), [dispatch_time(1)], [dispatch_time(1)]).lowered == "none"
    assert "2 backward, 1 forward" in flip_table([row])[1]
