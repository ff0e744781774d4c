"""`bench.step` without its processes: options, rows, checks, what is written and printed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import graphshard
from bench.harness.machine import Machine
from bench.harness.systems import BACKENDS, PLANS, System, refusal, systems
from bench.step import __main__ as step
from bench.step.models import TRAINED, trained_decoder
from bench.step.resident import peak_bytes, reset_peak, resident_bytes
from bench.step.rows import TARGETS, CheckRow, TrainingRow, check_row, check_training, training_rows
from bench.step.samples import FirstSteps, TrainingTurn
from bench.step.tables import HEADER, checks_line, noise_lines, training_table

EAGER = System("fsdp2", "eager")
BLOCKS = System("fsdp2+compile", "inductor")
DDP = System("ddp+compile", "inductor")
OURS = System("graphshard", "inductor", "fsdp2")
SHARDED = {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 0}
MACHINE = Machine("2.13.0", "3.11", "Linux x86_64", "a processor", 2, 0.1)
ROW_KEYS = ["model", "system", "backend", "plan", "step_ms", "peak_rss_bytes", "compile_s", "runs"]


def turn(*steps_ms: float, peak_rss_bytes: int = 2, is_of_turn: bool = True, loss: float = 4.0) -> TrainingTurn:
    return TrainingTurn([1e-3 * ms for ms in steps_ms], 1, peak_rss_bytes, is_of_turn, loss)


def first(first_step_s: float = 1.0, loss: float = 5.0) -> FirstSteps:
    return FirstSteps(first_step_s, loss, {"a.weight": 1.0, "b.weight": 2.0}, SHARDED)


def rows_of(steps_ms: dict[System, float], model: str = "demo") -> list[TrainingRow]:
    return training_rows(
        model,
        {system: [first(), first()] for system in steps_ms},
        {system: [[turn(ms, ms), turn(ms, ms)]] for system, ms in steps_ms.items()},
    )


def checked(system: System, **changes: float) -> CheckRow:
    row = check_row("demo", system, [first(), first()], [[turn(1), turn(1)]], first().grad_norms)
    counts = {"all_gathers": 0, "reduce_scatters": 0, "all_reduces": 2} if system == DDP else {}
    return replace(row, **{**counts, **changes})  # type: ignore[arg-type]


def test_training_rows_are_of_the_slower_rank_in_each_step() -> None:
    turns = [[turn(10, 30), turn(20, 10)], [turn(40, 50, peak_rss_bytes=7), turn(1, 1)]]
    (row,) = training_rows("demo", {EAGER: [first(3.0), first(4.0)]}, {EAGER: turns})
    assert (row.step_ms, row.low_ms, row.high_ms) == pytest.approx((35, 27.5, 42.5))
    assert (row.runs, row.compile_s, row.peak_rss_bytes, row.ratio) == (4, 4.0, 7, 1.0)


def test_ratios_are_to_the_faster_peer() -> None:
    rows = rows_of({EAGER: 50, BLOCKS: 40, DDP: 10, OURS: 30})
    assert [row.ratio for row in rows] == pytest.approx([1.25, 1.0, 0.25, 0.75])
    (alone,) = rows_of({OURS: 30})
    assert (alone.ratio, alone.met) == (None, None)
    assert training_table([alone], [checked(OURS)])[1].split()[7:9] == ["-", "0.90"]


@pytest.mark.parametrize(
    ("first_s", "ms", "ahead_from"),
    [(1.0, 30, 1), (1.0, 50, None), (2.0, 30, 101), (2.009, 30, 102), (2.0, 40, None), (1.0, 40, 1)],
)
def test_the_step_from_which_on_the_first_one_is_made_up_for(first_s: float, ms: float, ahead_from: int | None) -> None:
    firsts = {EAGER: [first(0.5), first(1.0)], BLOCKS: [first(1.0), first(0.1)], OURS: [first(first_s), first(0.1)]}
    turns = {system: [[turn(time, time), turn(1, 1)]] for system, time in ((EAGER, 60), (BLOCKS, 40), (OURS, ms))}
    *_, row = training_rows("demo", firsts, turns)
    assert row.ahead_from == ahead_from
    steps = ahead_from or 1000
    assert (first_s + (steps - 1) * ms / 1e3 <= 1 + (steps - 1) * 0.04) == (ahead_from is not None)


@pytest.mark.parametrize(("ms", "met"), [(35.9, True), (36.1, False)])
def test_targets_are_those_of_graphshard_with_inductor(ms: float, met: bool) -> None:
    other = System("graphshard", "aot_eager", "fsdp2")
    eager, ours, uncompiled = rows_of({EAGER: 40, OURS: ms, other: ms})
    assert (ours.target, ours.met) == (0.90, met)
    assert (eager.target, uncompiled.target, uncompiled.met) == (None, None, None)
    table = training_table([eager, ours], [checked(EAGER), checked(OURS)])
    assert ("0.90 yes" in table[2], "0.90 NO" in table[2]) == (met, not met)


def test_targets_are_there_for_every_model_and_plan() -> None:
    assert {plan: set(models) for plan, models in TARGETS.items()} == {plan: set(TRAINED) for plan in PLANS}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first_loss": 5.001}, "first_loss: got 5.001, want that of fsdp2, 5.0"),
        ({"grad_difference": 1e-3}, "gradient of a.weight: its norm is off by 1.0e-03"),
        ({"later_loss": 4.1}, "later_loss"),
        ({"later_loss": float("nan")}, "later_loss"),
        ({"all_gathers": 0}, "got 0 all-gathers and 2 reduce-scatters"),
        ({"reduce_scatters": 0}, "got 3 all-gathers and 0 reduce-scatters"),
    ],
)
def test_a_system_that_trains_otherwise_is_named(changes: dict[str, float], named: str) -> None:
    check_training([checked(EAGER), checked(DDP), checked(OURS, first_loss=5.0 + 1e-6)])
    with pytest.raises(RuntimeError, match=f"demo, graphshard, inductor, plan fsdp2: {named}"):
        check_training([checked(EAGER), checked(OURS, **changes)])


def test_ddp_that_reduces_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"ddp\+compile.*no all-reduce"):
        check_training([checked(EAGER), checked(DDP, all_reduces=0)])


@pytest.mark.parametrize(
    ("norms", "difference"),
    [
        ({"a.weight": 1.0, "b.weight": 1.0}, 0.5),
        ({"a.weight": 1.0, "b.weight": 0.0}, 1.0),
        ({"a.weight": 1.0}, float("inf")),
        ({"a.weight": 1.0, "b.weight": float("nan")}, float("inf")),
    ],
)
def test_gradients_are_compared_by_parameter(norms: dict[str, float], difference: float) -> None:
    ours = FirstSteps(1.0, 5.0, norms, SHARDED)
    row = check_row("demo", OURS, [ours, ours], [[turn(1), turn(1)]], first().grad_norms)
    assert (row.worst_grad, row.grad_difference) == ("b.weight", difference)
    with pytest.raises(RuntimeError, match=r"graphshard.*gradient of b\.weight"):
        check_training([checked(EAGER), row])


def test_losses_are_means_over_ranks() -> None:
    ranks = [first(loss=4.0), first(loss=6.0)]
    row = check_row(
        "demo", EAGER, ranks, [[turn(1, loss=1.0), turn(1, loss=2.0)], [turn(1), turn(1)]], first().grad_norms
    )
    assert (row.first_loss, row.later_loss, row.all_gathers) == (5.0, 1.5, 3)


def test_systems_multiply_for_graphshard_alone() -> None:
    found = systems(["fsdp2", "graphshard", "fsdp2"], ["inductor", "aot_eager"], ["fsdp2", "auto"])
    assert found[0] == EAGER
    assert [(system.backend, system.plan) for system in found[1:]] == [
        ("inductor", "fsdp2"),
        ("inductor", "auto"),
        ("aot_eager", "fsdp2"),
        ("aot_eager", "auto"),
    ]


def test_a_plan_without_its_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def plans_nothing(model: nn.Module, *, plan: str = "fsdp2") -> nn.Module:
        return model

    def plans(model: nn.Module, *, plan: str = "auto", memory_budget: int | None = None) -> nn.Module:
        return model

    monkeypatch.setattr(graphshard, "compile", plans_nothing)
    assert refusal("fsdp2") is None
    assert "plan auto: skipped" in (refusal("auto") or "")
    options = step.parse_options(["--systems", "fsdp2", "graphshard"])
    assert len(options.skipped) == 1
    assert {system.plan for system in options.compared} == {None, "fsdp2"}
    assert step.parse_options(["--systems", "fsdp2"]).skipped == ()
    with pytest.raises(SystemExit):
        step.parse_options(["--systems", "graphshard", "--plans", "auto"])
    monkeypatch.setattr(graphshard, "compile", plans)
    assert refusal("auto") is None
    assert {system.plan for system in step.parse_options([]).compared} == {None, *PLANS}


def test_options_say_what_is_measured(tmp_path: Path) -> None:
    everything = step.parse_options([])
    assert everything.models == tuple(TRAINED)
    assert {system.backend for system in everything.compared if system.name == "graphshard"} == set(BACKENDS)
    quick = step.parse_options(["--quick"])
    assert (quick.models, quick.runs, quick.rounds) == (("d128_L12",), 3, 2)
    chosen = step.parse_options(
        ["--quick", "--models", "demo", "demo", "--runs", "4", "--json", str(tmp_path / "rows.json")]
    )
    assert (chosen.models, chosen.runs, chosen.rounds, chosen.quick) == (("demo",), 4, 2, True)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--models", "d1_L1"], "argument --models: invalid choice: 'd1_L1'"),
        (["--systems", "fsdp1"], "argument --systems: invalid choice: 'fsdp1'"),
        (["--backends", "eager"], "argument --backends: invalid choice: 'eager'"),
        (["--plans", "best"], "argument --plans: invalid choice: 'best'"),
        (["--runs", "many"], "argument --runs: invalid int value: 'many'"),
        (["--runs", "0"], "--runs: got 0, want at least 1"),
        (["--rounds", "-1"], "--rounds: got -1, want at least 1"),
        (["--runs", "1", "--rounds", "1"], "got 1 step of each system, want at least 2"),
        (["--json", "nowhere/at/all.json"], "--json: got nowhere/at/all.json, want a file in a folder"),
    ],
)
def test_options_that_are_impossible_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        step.parse_options(argv)
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


def test_json_has_versions_machine_and_rows() -> None:
    rows = rows_of({EAGER: 40, OURS: 30})
    options = step.parse_options(["--quick"])
    written = json.loads(step.json_text(MACHINE, options, rows, [checked(EAGER), checked(OURS)], 2.5))
    assert list(written)[:3] == ["versions", "machine", "rows"]
    assert written["versions"]["torch"] == torch.__version__
    assert (written["machine"]["load"], written["machine"]["load_after"]) == (0.1, 2.5)
    assert [list(row) for row in written["rows"]] == [[*ROW_KEYS, "low_ms", "high_ms", "ratio", "ahead_from"]] * 2
    assert [row["plan"] for row in written["rows"]] == [None, "fsdp2"]
    assert [list(row) for row in written["checks"]] == [[f.name for f in fields(CheckRow)]] * 2


def test_tables_show_every_system() -> None:
    rows = rows_of({EAGER: 40, DDP: 10, OURS: 30})
    checks = [checked(EAGER), checked(DDP), checked(OURS, later_loss=4.004)]
    table = training_table(rows, checks)
    assert all(name in table[0] for name in HEADER)
    assert [line.split()[-3:] for line in table[1:]] == [["3", "2", "0"], ["0", "0", "2"], ["3", "2", "0"]]
    assert "loss 5.0000 -> 4.0000" in checks_line(checks)
    assert "loss of the first turn 1e-03" in checks_line(checks)


def test_what_disturbs_is_said() -> None:
    rows, checks = rows_of({EAGER: 40, OURS: 30}), [checked(EAGER), checked(OURS)]
    assert len(noise_lines(rows, checks, MACHINE, 2.0, 2)) == 1
    assert "other programs ran" in noise_lines(rows, checks, MACHINE, 3.0, 2)[1]
    wide = replace(rows[1], low_ms=28.0, high_ms=32.0)
    assert "in 1 of 2 rows" in noise_lines([rows[0], wide], checks, MACHINE, 2.0, 2)[1]
    unreset = check_row("demo", OURS, [first()], [[turn(1)], [turn(1, is_of_turn=False)]], {})
    assert "does not reset peaks" in noise_lines(rows, [checks[0], unreset], MACHINE, 2.0, 2)[1]


def test_models_have_the_sizes_of_their_names() -> None:
    for name, sizes in TRAINED.items():
        model = trained_decoder(name) if name != "d512_L6" else None
        if name != "demo":
            assert name == f"d{sizes.config.dim}_L{sizes.config.n_layers}"
        if model is not None:
            assert len(model.blocks) == sizes.config.n_layers
    assert [(s.batch_size, s.config.max_seq_len) for s in TRAINED.values()] == [(4, 64), (4, 128), (2, 128), (8, 128)]


def test_peak_is_that_since_its_reset() -> None:
    size_bytes = 64 * 2**20
    block = b"x" * size_bytes
    with_block = resident_bytes()
    assert peak_bytes() >= with_block > size_bytes
    del block
    if not reset_peak():
        pytest.skip("this kernel does not reset peaks")
    assert peak_bytes() < with_block - size_bytes // 2
