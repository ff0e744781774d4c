"""`bench.overhead` and `bench.dispatch`: arithmetic and tables, on made-up numbers. Nothing here is timed."""

from __future__ import annotations

import pytest

from bench.dispatch.rows import dispatch_row, flip_row
from bench.dispatch.samples import DispatchTime, FirstFlip
from bench.dispatch.tables import dispatch_table, flip_table
from bench.dispatch.timer import TIMED
from bench.harness.machine import Machine
from bench.harness.tables import claim_table, machine_lines
from bench.overhead.claims import check_claims
from bench.overhead.rows import CompileRow, compile_row, growth_rows, step_rows
from bench.overhead.samples import CompileTime, StepTime
from bench.overhead.tables import compile_table, disturbed_lines, growth_table, step_table


def compile_time(first_step_s: float, passes_s: float = 0.0, programs: int = 0, idle_s: float = 0.0) -> CompileTime:
    return CompileTime(first_step_s, first_step_s - idle_s, 0.01, passes_s, 1, programs)


def cases(whole_passes_s: float, unit_first_step_s: float) -> list[CompileRow]:
    """4 and 32 layers; the arguments are those of 32 layers."""
    return [
        compile_row("inductor", "whole", 4, [compile_time(10, 0.1, 2), compile_time(10, 0.2, 2)]),
        compile_row("inductor", "whole", 32, [compile_time(80, whole_passes_s, 2)]),
        compile_row("inductor", "unit", 4, [compile_time(10, 0.1, 10)]),
        compile_row("inductor", "unit", 32, [compile_time(unit_first_step_s, 0.1, 10)]),
        compile_row("inductor", "reference", 4, [compile_time(9)]),
        compile_row("inductor", "reference", 32, [compile_time(72)]),
    ]


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


def test_compile_rows_take_the_rank_with_the_largest_share() -> None:
    whole, *_, reference = cases(1.6, 11)
    assert (whole.num_ranks, whole.passes_s, whole.passes_per_layer_s) == (2, 0.2, 0.05)
    assert whole.share == pytest.approx(0.02)
    assert reference.passes_s is reference.share is None
    assert "2.0%" in compile_table([whole, reference])[1]


def test_growth_rows_compare_neighbouring_depths() -> None:
    whole, unit, reference = growth_rows(cases(1.6, 11))
    assert (whole.from_layers, whole.to_layers) == (4, 32)
    assert (whole.first_step, whole.added_layer_s) == pytest.approx((8.0, 2.5))
    assert (whole.passes_exponent, unit.passes_exponent) == pytest.approx((1.0, 0.0))
    assert reference.passes_exponent is None
    assert "4 -> 32" in growth_table([whole, reference])[1]


@pytest.mark.parametrize(
    ("whole_passes_s", "unit_first_step_s", "holds"),
    [
        (1.6, 11, [True, True, True, True]),
        (12.8, 11, [False, True, False, True]),  # quadratic, 16 %
        (1.6, 80, [True, True, True, False]),
    ],
)
def test_claims_hold_or_not(whole_passes_s: float, unit_first_step_s: float, holds: list[bool]) -> None:
    checked = check_claims(cases(whole_passes_s, unit_first_step_s), "whole", "unit")
    assert [claim.holds for claim in checked] == holds
    assert [line.split()[-1] for line in claim_table(checked)[1:]] == ["yes" if yes else "NO" for yes in holds]


def test_disturbed_cases_are_said() -> None:
    still = compile_row("inductor", "whole", 4, [compile_time(10, 0.1, 2, idle_s=0.5)])
    disturbed = compile_row("inductor", "whole", 4, [compile_time(10, 0.1, 2, idle_s=5.0)])
    assert (still.disturbed, disturbed.disturbed) == (False, True)
    assert disturbed_lines([still]) == []
    assert "1 of 2" in disturbed_lines([still, disturbed])[0]


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
