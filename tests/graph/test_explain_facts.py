"""What is said about a planned program: numbers that add up, and reasons in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.explain.contents import time_parts
from graphshard.explain.memory_steps import memory_steps
from graphshard.explain.quantities import format_bytes, format_fqns, format_ratio, format_share, format_us
from graphshard.explain.waits import Wait, waits_of
from graphshard.planner import (
    Bucket,
    OwnCollective,
    Schedule,
    ScheduledStep,
    StepKind,
    fixed_size_schedule,
    fsdp2_schedule,
    live_by_category,
    per_parameter_schedule,
    simulate,
)
from tests.graph.planned_programs import (
    MIB,
    REPLICAS,
    deep_program,
    explanation,
    gather,
    one_bucket,
    planned,
    problem,
    random_problem,
    reduction,
    small_program,
)

SEEDS = st.integers(0, 2**32)


def steps_of(*steps: tuple[int, StepKind, int]) -> tuple[ScheduledStep, ...]:
    return tuple(ScheduledStep(*step) for step in steps)


@given(SEEDS)
def test_memory_categories_sum_to_what_the_simulator_counts(seed: int) -> None:
    of = random_problem(seed)
    for schedule in (fsdp2_schedule(of), per_parameter_schedule(of), fixed_size_schedule(of, 12 * MIB)):
        found = live_by_category(of, schedule)
        assert tuple(sum(live) for live in found) == simulate(of, schedule).live_bytes
        assert min(min(live) for live in found) >= 0


def test_memory_categories_follow_a_parameter_and_its_gradient() -> None:
    of = problem((50.0,) * 4, (gather("a.w", 1), gather("a.v", 1)), (reduction("a.w", 3), reduction("a.v", 3)))
    found = live_by_category(of, fsdp2_schedule(of))
    assert [live.parameter_bytes // MIB for live in found] == [0, 2, 0, 0, 0]
    assert [live.gradient_bytes // MIB for live in found] == [0, 0, 2, 2, 0]
    assert [live.reduced_bytes // MIB for live in found] == [0, 0, 0, 2, 2]
    # Gathered from the start: 2 MiB and shards of 1; reduced in 4 MiB of the wider reduce_dtype.
    assert [live.buffer_bytes // MIB for live in found] == [3, 3, 0, 4, 0]


@given(SEEDS)
def test_parts_of_a_step_add_up_to_it(seed: int) -> None:
    program = planned(random_problem(seed))
    parts = time_parts(program)
    assert sum(us for _, us in parts) == pytest.approx(program.simulation.step_us)
    assert dict(parts)["waiting for collectives (exposed)"] == pytest.approx(program.simulation.exposed_us)


@given(SEEDS)
def test_waits_add_up_to_what_is_exposed(seed: int) -> None:
    program = planned(random_problem(seed))
    waits = waits_of(program)
    assert sum(wait.exposed_us for wait in waits) == pytest.approx(program.simulation.exposed_us)
    assert [wait.exposed_us for wait in waits] == sorted((wait.exposed_us for wait in waits), reverse=True)
    of_buckets = sum(row.exposed_us for row in program.buckets)
    assert of_buckets == pytest.approx(sum(wait.exposed_us for wait in waits if wait.bucket >= 0))
    assert all("None" not in wait.why and wait.why.endswith(".") for wait in waits)


@given(SEEDS)
def test_memory_against_the_clock_has_the_same_peak(seed: int) -> None:
    program = planned(random_problem(seed))
    steps = memory_steps(program)
    starts = [start for start, _ in steps]
    assert starts == sorted(set(starts))
    assert max(sum(live) for _, live in steps) == program.simulation.peak_bytes


def only_wait(program: object) -> Wait:
    (wait,) = waits_of(program)  # type: ignore[arg-type]
    return wait


def test_reason_head_says_that_nothing_is_computed_before() -> None:
    wait = only_wait(one_bucket(problem((50.0, 50.0), (gather("a.w", 0),)), 0, 0))
    assert (wait.reason, wait.cause) == ("head", "nothing before it")
    assert wait.why == (
        "The program begins with `op0`, which needs it: nothing is computed yet that could hide it; its 1.0 MiB take "
        "110.0 us, of which 10.0 us are latency."
    )


def test_reason_head_names_what_is_sent_before_it() -> None:
    of = problem((50.0, 50.0), (gather("a.w", 0), gather("b.w", 1)))
    buckets = (Bucket("gather", (1,)), Bucket("gather", (0,)))
    steps = steps_of((0, "launch", 0), (0, "launch", 1), (0, "wait", 1), (1, "wait", 0))
    wait = only_wait(planned(of, Schedule(buckets, steps)))
    assert wait.why.endswith("latency, sent behind gather:0, which ends at 110.0 us.")


def test_reason_tail_says_that_nothing_is_computed_behind() -> None:
    wait = only_wait(one_bucket(problem((50.0,), (), (reduction("a.w", 1),)), 1, 1))
    assert (wait.reason, wait.cause) == ("tail", "nothing behind it")
    assert wait.why.startswith("Its last gradient is only computed at the very end: nothing is left to hide it")
    early = only_wait(one_bucket(problem((50.0, 50.0), (), (reduction("a.w", 1),)), 2, 2))
    assert early.why.startswith("It could start before `op1`, but is launched behind the last computation")


def test_reason_of_an_all_reduce_that_follows() -> None:
    of = problem((50.0, 500.0), (), (reduction("a.w", 1, then=REPLICAS),))
    wait = only_wait(one_bucket(of, 1, 2))
    assert (wait.name, wait.kind, wait.reason) == ("reduce:0 (all-reduce)", "all-reduce", "tail")
    assert wait.why.startswith("It follows a reduce-scatter that is awaited behind the last computation")
    bucket = Schedule((Bucket("reduce", (0,)),), steps_of((1, "launch", 0), (2, "wait", 0), (2, "finish", 0)))
    late = only_wait(planned(problem((50.0, 500.0, 50.0), (), of.reductions), bucket))
    assert (late.reason, late.cause) == ("late", "launched late")
    assert late.why.endswith("It follows a reduce-scatter, and is launched as soon as that is awaited.")


def test_reason_queue_names_the_bucket_ahead() -> None:
    of = problem((50.0, 80.0, 80.0), (gather("a.w", 1, 2), gather("b.w", 2)))
    buckets = (Bucket("gather", (0,)), Bucket("gather", (1,)))
    steps = steps_of((0, "launch", 0), (0, "launch", 1), (1, "wait", 0), (2, "wait", 1))
    _, wait = waits_of(planned(of, Schedule(buckets, steps)))
    assert (wait.name, wait.reason, wait.cause) == ("gather:1", "queue", "queued")
    assert wait.why == (
        "Launched before `op0`, it could start only at 210.0 us, when gather:0 was done on group shard; its 1.0 MiB "
        "take 110.0 us, but `op2` was due at 290.0 us."
    )


def test_reason_queue_names_a_collective_of_the_model() -> None:
    own = OwnCollective("all_reduce_tp", 0, 200.0, 0, 2)
    of = problem((20.0, 500.0), (gather("a.w", 1, ready=1),), own=(own,))
    wait = only_wait(one_bucket(of, 1, 1))
    assert wait.reason == "queue"
    assert "when all_reduce_tp was done" in wait.why


def test_reason_queue_of_a_reduction_says_what_its_wait_is_for() -> None:
    program = deep_program(3)
    awaited = [wait for wait in waits_of(program) if wait.kind == "reduction" and wait.reason == "queue"]
    assert awaited
    assert all("which frees its buffers" in wait.why or "the computation ended" in wait.why for wait in awaited)


@pytest.mark.parametrize(
    ("plan", "budget_mib", "cause", "ends"),
    [
        ("auto", None, "launched late", "The search found no place for its launch that makes the program faster."),
        ("fsdp2", None, "launched late", "FSDP2 gathers one unit ahead, no earlier."),
        ("my.json", 40, "launched late", "The plan places its launch there."),
        (
            "auto", 10, "no memory earlier",
            "A launch before `op1` would hold 2.0 MiB beside 9.0 MiB in use, more than the budget of 10.0 MiB.",
        ),
    ],
)  # fmt: skip
def test_reason_late_says_why_no_earlier(plan: str, budget_mib: int | None, cause: str, ends: str) -> None:
    of = problem((100.0, 200.0, 30.0, 50.0), (gather("a.w", 3, 2),))
    budget = None if budget_mib is None else budget_mib * MIB
    wait = only_wait(one_bucket(of, 2, 3, plan=plan, budget_bytes=budget))
    assert (wait.reason, wait.cause) == ("late", cause)
    assert wait.why == (
        "Its 2.0 MiB take 210.0 us, but there are only 30.0 us of computation between its launch, before `op2`, and "
        f"its wait, before `op3`. {ends}"
    )


def test_reason_late_says_when_nothing_earlier_is_possible() -> None:
    of = problem((100.0, 30.0, 50.0), (gather("a.w", 2, ready=1),))
    assert only_wait(one_bucket(of, 1, 2)).cause == "not ready earlier"
    first = only_wait(one_bucket(replace(of, gathers=(gather("a.w", 1, 2),)), 0, 1))
    assert (first.reason, first.cause) == ("late", "nothing before it")
    assert first.why.endswith("No computation comes before its launch.")


def test_reason_late_of_a_reduction() -> None:
    of = problem((100.0, 30.0, 50.0), (), (reduction("a.w", 1),))
    early = only_wait(one_bucket(of, 1, 2))
    assert (early.reason, early.cause) == ("late", "awaited early")
    assert early.why.endswith("A later wait would hold the 2.0 MiB that it frees longer.")
    assert only_wait(one_bucket(of, 1, 3)).why.endswith("Its last gradient is not ready before that launch.")
    assert only_wait(one_bucket(of, 2, 3)).why.endswith("It could be launched before `op1`.")


def test_reason_own_says_whose_it_is() -> None:
    of = problem((100.0, 30.0), own=(OwnCollective("all_reduce_tp", 1, 70.0, 1, 2),))
    wait = only_wait(planned(of))
    assert (wait.name, wait.bucket, wait.reason) == ("all_reduce_tp", -1, "own")
    assert "launches it before `op1` and needs it before the end" in wait.why


def test_bucket_rows_say_where_all_waits_are() -> None:
    program = small_program()
    rows = {row.name: row for row in program.buckets}
    assert program.awaited_before(rows["reduce:2"]) == "the end"
    assert rows["reduce:2"].kind == "reduction + all-reduce"
    assert rows["gather:0"].fqns == ("layers.1.wq", "layers.1.wo")


def test_names_of_buckets_are_counted() -> None:
    with pytest.raises(ValueError, match="bucket_names of 'region 0 backward': got 1, want 4, one for each bucket"):
        replace(small_program(), bucket_names=("gather:0",))


def test_json_is_canonical_and_has_every_number() -> None:
    text = explanation(notes=("one",)).to_json()
    assert text == explanation(notes=("one",)).to_json()
    facts = json.loads(text)
    assert json.dumps(facts, sort_keys=True, indent=1) + "\n" == text
    (program,) = facts["programs"]
    simulation = small_program().simulation
    assert program["step_us"] == round(simulation.step_us, 3)
    assert program["peak_bytes"] == simulation.peak_bytes == sum(program["peak_parts_bytes"].values())
    assert [bucket["name"] for bucket in program["buckets"]] == list(small_program().bucket_names)
    assert {wait["reason"] for wait in program["waits"]} <= {"head", "tail", "queue", "late", "own"}


def test_quantities_have_a_unit_that_fits() -> None:
    assert [format_us(us) for us in (0.0, 12.34, 999.94, 999.96, 1250.0, 81_240.0, 999_960.0, 2.5e6)] == [
        "0.0 us", "12.3 us", "999.9 us", "1.000 ms", "1.250 ms", "81.24 ms", "1.000 s", "2.500 s",
    ]  # fmt: skip
    assert [format_bytes(size) for size in (0, 1023, 1536, 2**20 - 1, 64 * 2**20, 2**30 - 1, 2**34)] == [
        "0 B", "1023 B", "1.5 KiB", "1.0 MiB", "64.0 MiB", "1.00 GiB", "16.00 GiB",
    ]  # fmt: skip
    assert (format_share(1.0, 8.0), format_share(1.0, 0.0)) == ("12.5 %", "-")
    assert (format_ratio(104.0, 100.0), format_ratio(150.0, 100.0), format_ratio(1.0, 0.0)) == ("1.040x", "1.50x", "-")


def test_fqns_share_what_they_have_in_common() -> None:
    assert format_fqns(["a.b.w"]) == "a.b.w"
    assert format_fqns(["a.b.w", "a.b.v"]) == "a.b.{w, v}"
    assert format_fqns(["a.b.w", "a.c.w", "a.c.d.v"]) == "a.{b.w ... c.d.v}"
    assert format_fqns(["w", "v", "u"]) == "w ... u"
