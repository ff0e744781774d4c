"""`bench.compile`: phases, rows, claims, picture and options on made-up numbers; one traced model; one first step."""

from __future__ import annotations

import html
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bench.compile import __main__ as bench_compile
from bench.compile.claims import check_claims
from bench.compile.fake_cuda import TINY, fake_row
from bench.compile.first_step import measure_first_steps
from bench.compile.options import BLOCKS, FAKE_BLOCKS, QUICK_BLOCKS, parse_options
from bench.compile.phases import ALL_PHASES, PASSES, PLANNER, REST, phase_seconds
from bench.compile.picture import TITLE, bars_of
from bench.compile.rows import CompileRow, check_losses, compile_rows, growth_rows
from bench.compile.samples import FirstStep
from bench.compile.tables import compile_table, fake_table, growth_table
from bench.harness.bars import BAR_CELLS, bar_cells, print_bars, write_svg
from bench.harness.machine import Machine
from bench.harness.processes import Ranks
from bench.harness.systems import System
from graphshard.compat.compile_phases import AOT_AUTOGRAD, DYNAMO, PARTITIONER, PHASES, exclusive_seconds

PEER = System("fsdp2+compile", "inductor")
OURS = System("graphshard", "inductor", "auto")
PER_UNIT = System("graphshard", "inductor", "auto", "unit")
MACHINE = Machine("2.13.0", "3.11", "Linux x86_64", "a processor", 2, 0.1)
# Of a program whose backward is compiled outside of torch's own timers, 20 s in all, 4 s of each of torch's phases but
# 2 s of the partitioner, 1 s of it graphshard's.
TIMED_S = {
    "_compile.compile_inner": 18.0,
    "compile_attempt_0": 17.9,
    "OutputGraph.call_user_compiler": 14.0,
    "create_aot_dispatcher_function": 13.0,
    "_recursive_joint_graph_passes": 1.0,
    "pass.joint_graph_passes.pass_pattern_0": 0.5,
    "Partitioner": 2.0,
    "compile_fx.<locals>.fw_compiler_base": 8.0,
    "backward._backward_impl": 1.5,
    "compile_fx.<locals>.bw_compiler": 0.5,
    "compile_fx_inner": 11.0,
    "fx_codegen_and_compile": 10.9,
    "GraphLowering.codegen": 4.0,
    "Scheduler.__init__": 3.0,
    "PyCodeCache.load_by_key_path": 4.0,
    "compile_file": 3.9,
}


def first_step(step_s: float = 24.0, **changes: Any) -> FirstStep:
    first = FirstStep(
        step_s, step_s, 0.1, 5.0, 2.0, TIMED_S, 3, 7, joint_passes_s=1.0, passes_s=0.5, planner_s=0.5, programs=2
    )
    return first._replace(**changes)


def scaled(scale: float, traces: float = 1.0, **changes: Any) -> FirstStep:
    """`scale` times as long, but for the traces."""
    first = first_step(**changes)
    timed_s = {name: scale * seconds for name, seconds in TIMED_S.items()}
    timed_s["_compile.compile_inner"] += 4 * (traces - scale)
    own = {name: scale * getattr(first, name) for name in ("joint_passes_s", "passes_s", "planner_s")}
    step_s = scale * 24 + 4 * (traces - scale)
    return first._replace(step_s=step_s, cpu_s=step_s, timed_s=timed_s, **own)


def rows(depths: dict[int, float], traces: float = 0.0, warm: float | None = None) -> list[CompileRow]:
    """Of the peer, which takes 24 s at every depth, and of graphshard, by scale."""
    found = []
    for blocks, scale in depths.items():
        ours = scaled(scale, scale + traces * blocks)
        cases = {PEER: {"cold": [first_step(joint_passes_s=0.0)]}, OURS: {"cold": [ours, ours]}}
        if warm is not None:
            cases[OURS]["warm"] = [scaled(warm * scale, warm * scale)]
        found += compile_rows(blocks, cases)
    return found


def test_phases_of_torch_have_nothing_in_common() -> None:
    phases = exclusive_seconds(TIMED_S, 0.1)
    assert tuple(phases) == PHASES
    want = (4.0, 4.0, 2.0, 4.0, 4.0, 4.0)  # AOTAutograd: 14 - 1 - 2 - 8 of forward, 1.5 - 0.5 of backward
    assert tuple(phases.values()) == pytest.approx(want)
    cached = {
        "OutputGraph.call_user_compiler": 2.0,
        "AOTAutogradCache.inductor_load": 1.5,
        "_compile.compile_inner": 3.0,
    }
    phases = exclusive_seconds({**cached, "PyCodeCache.load_by_key_path": 1.0}, 0.1)
    assert tuple(phases.values()) == pytest.approx((1.0, 0.5, 0.0, 0.5, 0.0, 1.0))
    assert set(exclusive_seconds({}, 0.0).values()) == {0.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_compile.compile_inner": 13.0}, r"Dynamo: got 13\.000 s of _compile\.compile_inner, want at least the 14"),
        (
            {"Partitioner": 8.0},
            r"AOTAutograd: .* what runs inside: _recursive_joint_graph_passes 1\.000 s, Partitioner 8",
        ),
        ({"compile_fx.<locals>.bw_compiler": 2.0}, r"AOTAutograd: got 1\.500 s of backward\._backward_impl"),
        ({"GraphLowering.codegen": 9.0}, r"Inductor lowering: got 11\.000 s of compile_fx_inner and AOTAutogradCache"),
        ({"brand_new_pass": 0.5}, r"torch timed 0\.500 s of 'brand_new_pass', which is not known"),
    ],
)
def test_timers_that_are_not_nested_as_is_known_are_named(changes: dict[str, float], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        exclusive_seconds({**TIMED_S, **changes}, 0.1)


def test_unknown_timers_that_are_too_short_to_matter_are_left_in_their_phase() -> None:
    assert exclusive_seconds({**TIMED_S, "brand_new_pass": 0.05}, 0.1) == exclusive_seconds(TIMED_S, 0.1)


def test_phases_are_the_whole_step() -> None:
    phases = phase_seconds(first_step())
    assert tuple(phases) == ALL_PHASES
    assert tuple(phases.values()) == pytest.approx((4.0, 4.0, 1.0, 1.5, 0.5, 4.0, 4.0, 4.0, 1.0))
    assert sum(phases.values()) == pytest.approx(24.0)


def test_passes_on_joint_graphs_are_taken_from_aot_autograd_where_torch_has_no_timer_of_the_partitioner() -> None:
    untimed = {name: seconds for name, seconds in TIMED_S.items() if name != "Partitioner"}
    phases = phase_seconds(first_step(timed_s=untimed))
    assert (phases["partitioner"], phases[AOT_AUTOGRAD], phases[PASSES]) == pytest.approx((0.0, 4 + 2 - 1, 1.5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_s": 22.0}, r"phases take longer than the step's 22\.000 s: Dynamo 4\.000 s, "),
        ({"planner_s": 2.0}, "phases take longer"),
        ({"joint_passes_s": 3.0}, r"passes on joint graphs took 3\.000 s, want no more than the partitioner"),
    ],
)
def test_phases_that_are_more_than_the_step_are_an_error(changes: dict[str, float], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        phase_seconds(first_step(**changes))


def test_rows_are_of_the_slower_rank_with_ratios_to_the_peer_and_to_cold() -> None:
    slower = first_step(36.0, cpu_s=30.0, kernels=3)
    cases = {
        OURS: {"cold": [first_step(), slower], "warm": [scaled(0.25), scaled(0.25)]},
        PEER: {"cold": [first_step(30.0, joint_passes_s=0.0)]},
    }
    cold, warm, peer = compile_rows(4, cases)
    assert (cold.step_s, cold.kernels, cold.ratio, cold.to_cold) == (36.0, 7, pytest.approx(1.2), None)
    assert cold.phases[REST] == pytest.approx(13.0)
    assert (warm.ratio, warm.to_cold) == (None, pytest.approx((6 + 3) / 36))
    assert (peer.ratio, peer.plan, peer.regions, peer.label) == (1.0, None, None, "fsdp2+compile")
    assert cold.own_share == pytest.approx(2 / 36)
    assert (cold.traces_s, cold.others_s) == pytest.approx((8.0, 28.0))


def test_disturbed_is_what_left_the_processors_idle() -> None:
    still, busy = (
        compile_rows(4, {OURS: {"cold": [first_step(cpu_s=cpu_s)] * 2}})[0].disturbed for cpu_s in (20.0, 9.0)
    )
    assert (still, busy) == (False, True)


def test_growth_is_from_twelve_blocks_or_the_second_smallest_to_the_deepest() -> None:
    depths = {4: 1.0, 12: 1.0, 24: 1.1, 96: 1.2}
    ours = growth_rows(rows(depths, traces=0.01))[1]
    assert (ours.from_blocks, ours.to_blocks) == (12, 96)
    # Traces take 4 more seconds for each unit of `traces` x blocks, and 8 of each 24 s besides.
    assert ours.traces_s_per_block == pytest.approx((8 * 0.2 + 4 * 0.01 * 84) / 84)
    assert ours.others == pytest.approx(1.2)
    assert [row.from_blocks for row in growth_rows(rows({4: 1, 24: 1, 48: 1}))] == [24, 24]
    assert [row.from_blocks for row in growth_rows(rows({4: 1, 24: 1}))] == [4, 4]
    assert growth_rows(rows({4: 1})) == []
    assert "12 -> 96" in growth_table([ours])[1]


@pytest.mark.parametrize(
    ("deep", "traces", "warm", "holds"),
    [
        (1.0, 0.0, 0.2, [True, True, True, True, False, True]),  # 2 of 24 s are passes and planner
        (1.24, 0.0, 0.3, [True, True, True, False, False, True]),
        (1.31, 0.0, 0.2, [False, False, True, True, False, True]),
        (1.0, 0.02, 0.2, [False, True, False, True, False, True]),
        (13.0, 0.0, 0.2, [False, False, False, True, False, False]),  # 13 times the passes of 8 times the blocks
    ],
)
def test_claims_hold_or_not(deep: float, traces: float, warm: float, holds: list[bool]) -> None:
    claims = check_claims(rows({12: 1.0, 96: deep}, traces, warm))
    assert [claim.holds for claim in claims] == holds


def test_claims_of_what_was_not_measured_neither_hold_nor_fail() -> None:
    (row,) = compile_rows(4, {OURS: {"cold": [first_step(planner_s=0.0, passes_s=0.1)]}})
    claims = check_claims([row])
    assert [claim.holds for claim in claims] == [None, None, None, None, True, None]
    assert [claim.got for claim in claims if claim.holds is None] == ["-"] * 5
    shallow = check_claims(rows({4: 1.0, 24: 1.1}))
    assert shallow[1].holds is None and "4 -> 24" in shallow[1].got


def test_regions_of_units_are_to_be_nearly_constant_in_depth() -> None:
    def claimed(deep: float) -> bool | None:
        found = [
            row
            for blocks, scale in ((4, 1.0), (24, deep))
            for row in compile_rows(blocks, {PER_UNIT: {"cold": [scaled(scale, scale)]}})
        ]
        return check_claims(found)[-1].holds

    assert (claimed(1.4), claimed(1.6)) == (True, False)


def test_other_backends_are_compared_with_no_peer() -> None:
    uncompiled = System("graphshard", "aot_eager", "auto")
    _, row = compile_rows(4, {PEER: {"cold": [first_step(joint_passes_s=0.0)]}, uncompiled: {"cold": [first_step()]}})
    assert (row.backend, row.ratio) == ("aot_eager", None)
    share, linear = check_claims([row])
    assert (share.backend, share.holds, linear.holds) == ("aot_eager", False, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"loss": 5.01}, "loss of the first step: got 5.01"), ({"grad_norm": 1.0}, "norm of the gradients of the first")],
)
def test_a_system_that_computes_something_else_is_named(changes: dict[str, float], said: str) -> None:
    cases = {PEER: {"cold": [first_step(), first_step()]}, OURS: {"cold": [first_step(), first_step(loss=5.0001)]}}
    check_losses(4, cases)
    wrong = {**cases, PER_UNIT: {"cold": [first_step(**changes)] * 2}}
    with pytest.raises(RuntimeError, match=f"graphshard, inductor, plan auto, regions unit, cold, 4 blocks: {said}"):
        check_losses(4, wrong)


def test_tables_show_every_phase_and_system() -> None:
    table = compile_table(rows({4: 1.0}, warm=0.2))
    assert all(name in table[0] for name in ALL_PHASES)
    assert [line.split()[-3:] for line in table[1:]] == [["3", "7", "-"], ["3", "7", "2"], ["3", "7", "2"]]


def test_picture_has_each_phase_and_a_bar_for_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    drawn = rows({4: 0.5}, warm=0.2)
    write_svg(tmp_path / "bars.svg", TITLE, ALL_PHASES, bars_of(drawn))
    text = html.unescape((tmp_path / "bars.svg").read_text()).replace("\xa0", " ")
    assert text.startswith("<svg") and all(name in text for name in ALL_PHASES)
    assert all(row.label in text and f"{row.step_s:.1f} s" in text for row in drawn)
    print_bars(ALL_PHASES, bars_of(drawn))
    peer, *_, warm = [line for line in capsys.readouterr().out.splitlines() if ", cold" in line or ", warm" in line]
    assert (peer.count("█"), warm.count("█")) == (BAR_CELLS, round(0.1 * BAR_CELLS))


def test_bars_are_as_long_as_the_sum_of_their_parts() -> None:
    assert bar_cells([0.3] * 10, 3.0) == [7, 7, 8, 7, 7, 7, 7, 8, 7, 7]
    assert sum(bar_cells([0.01] * 100, 2.0)) == BAR_CELLS // 2


def test_json_has_rows_growth_and_claims() -> None:
    found = rows({12: 1.0, 96: 1.0}, warm=0.2)
    claims = check_claims(found)
    written = json.loads(
        bench_compile.json_text(MACHINE, parse_options(["--quick"]), found, growth_rows(found), claims, [])
    )
    assert list(written)[:3] == ["versions", "machine", "rows"]
    assert [list(row) for row in written["rows"]] == [[field.name for field in fields(CompileRow)]] * 6
    assert [list(row["phases"]) for row in written["rows"]] == [list(ALL_PHASES)] * 6
    assert (len(written["growth"]), len(written["claims"]), written["quick"]) == (2, 6, True)


def test_options_say_what_is_measured(tmp_path: Path) -> None:
    everything = parse_options([])
    assert everything.blocks == BLOCKS and everything.warm and not everything.fake_cuda
    shown = {(system.name, system.plan, system.regions) for system in everything.compared if system.plan is not None}
    assert len(everything.compared) == 6
    assert shown == {("graphshard", plan, regions) for plan in ("fsdp2", "auto") for regions in ("model", "unit")}
    quick = parse_options(["--quick", "--cold-only"])
    assert (quick.blocks, quick.compared, quick.warm) == (QUICK_BLOCKS, (PEER, OURS), False)
    assert parse_options(["--fake-cuda"]).blocks == FAKE_BLOCKS
    chosen = parse_options(
        ["--blocks", "8", "2", "8", "--regions", "unit", "--plans", "auto", "--systems", "graphshard"]
    )
    assert (chosen.blocks, chosen.compared) == ((2, 8), (PER_UNIT,))
    assert parse_options(["--picture", str(tmp_path / "bars.svg")]).picture == tmp_path / "bars.svg"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--blocks", "1"], "--blocks: got 1, want at least 2"),
        (["--systems", "fsdp1"], "argument --systems: invalid choice: 'fsdp1'"),
        (["--json", "nowhere/at/all.json"], "--json: got nowhere/at/all.json, want a file in a folder"),
        (["--picture", "nowhere/at/all.svg"], "--picture: got nowhere/at/all.svg, want a file in a folder"),
        (["--picture", "bars.svg", "--fake-cuda"], "--picture: got --fake-cuda, too"),
    ],
)
def test_options_that_are_impossible_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_options(argv)
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


def test_a_model_is_traced_and_lowered_without_a_gpu() -> None:
    row = fake_row(2, TINY)
    assert 0 < row.different <= row.stretches < row.nodes
    assert min(row.traces_s, row.partitioner_s, row.passes_s, row.planner_s) > 0.0
    assert str(row.stretches) in fake_table([row])[1]


def test_first_steps_are_measured_on_ranks() -> None:
    uncompiled = System("graphshard", "aot_eager", "auto")  # Inductor's timers: tests/graph/test_compat.py
    cases = {uncompiled: measure_first_steps(uncompiled, 2, 2, warm=False)}
    check_losses(2, cases)
    (row,) = compile_rows(2, cases)
    assert (row.kernels, row.graphs, row.programs) == (0, 0, 2)
    assert sum(row.phases.values()) == pytest.approx(row.step_s)
    taken = {name for name, seconds in row.phases.items() if seconds > 0.0}
    assert taken == {DYNAMO, AOT_AUTOGRAD, PARTITIONER, PASSES, PLANNER, REST}
    assert 0.0 < row.second_step_s < row.step_s / 2


def test_ranks_leave_the_cache_that_they_are_given(tmp_path: Path) -> None:
    def caches(given: Path | None) -> list[str]:
        with Ranks("cache", 2, os.getenv, "TORCHINDUCTOR_CACHE_DIR", timeout_s=60, cache=given) as ranks:
            return ranks.call("strip")  # of a string

    given, own = caches(tmp_path), caches(None)
    assert given == [str(tmp_path)] * 2 and tmp_path.is_dir()
    assert own[0] == own[1] != str(tmp_path) and not Path(own[0]).parent.exists()
