"""The driver: copies, verifies, dumps, and says which invariant a broken pass broke."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.fx import Graph, GraphModule

from graphshard import env, passes
from graphshard.errors import VerifyError
from graphshard.fsdp2.settings import UnitSettings
from graphshard.graph.builder import Builder
from graphshard.graph.ir import WAIT, aten, launches, output_node, reductions, unshards
from graphshard.graph.markers import REDUCE_GRAD, UNSHARD
from graphshard.graph.printer import format_graph
from graphshard.lowering import driver
from graphshard.passes import PROGRAM, Pass
from tests.graph.graphs import F32, Marked, Weight, toy_backward, toy_forward, toy_weights, two_gathers


def forward(blocks: int = 2, **changes: Any) -> Marked:
    return toy_forward(toy_weights(blocks, **changes))


def backward(blocks: int = 2, **changes: Any) -> Marked:
    return toy_backward(toy_weights(blocks, **changes))


def lower(marked: Marked, title: str = "program") -> driver.Lowered:
    return driver.lower(marked.gm, marked.ctx, title)


# -- what goes in and comes out


@pytest.mark.parametrize("make", [forward, backward])
def test_lower_leaves_its_input_as_it_is(make: Callable[[], Marked]) -> None:
    marked = make()
    before = format_graph(marked.graph), [dict(node.meta) for node in marked.graph.nodes], marked.gm.code
    lowered = lower(marked)
    assert (format_graph(marked.graph), [dict(node.meta) for node in marked.graph.nodes], marked.gm.code) == before
    assert lowered.gm is not marked.gm
    assert not any("bucket" in node.meta for node in marked.graph.nodes)


def test_lower_is_repeatable() -> None:
    marked = backward()
    first, second = lower(marked), lower(marked)
    assert first.edits == second.edits
    assert format_graph(first.gm.graph) == format_graph(second.gm.graph)


def test_lower_says_what_each_pass_did() -> None:
    lowered = lower(backward().flagged(unreduced=frozenset({"head_shard"})))
    assert [name for name, _ in lowered.edits] == [
        "apply_flags", "assign_buckets", "insert_collectives", "order_launches"
    ]  # fmt: skip
    assert lowered.passes_s > 0
    assert lowered.gm.code.count("wait_tensor.default(") == 2 + 2


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("all_reduce", [False, True])
def test_lower_knows_what_must_be_reduced_over_copies(world_size: int, all_reduce: bool) -> None:
    marked = backward(1, world_size=world_size, replicas=2).flagged(
        partial=("head_shard",),
        unreduced=frozenset({"blocks_0_bias_shard"}),
        units=(("", UnitSettings(all_reduce=all_reduce)),),
    )
    assert len(launches(lower(marked).gm.graph)) == (world_size > 1) * (1 + 2) + 1 + all_reduce


def test_lower_of_a_graph_without_markers_does_nothing() -> None:
    marked = two_gathers()
    assert lower(marked).edits == ()


# -- dumps


def test_dumps_are_written_for_each_pass_that_did_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DUMP", str(tmp_path / "made" / "on demand"))
    marked = backward().flagged(added=(("head_shard", F32),))
    lowered = lower(marked, "region0.1.backward")
    dumps = {path.name: path.read_text() for path in (tmp_path / "made" / "on demand").iterdir()}
    assert sorted(dumps) == [
        "region0.1.backward.0.captured.ir",
        "region0.1.backward.3.apply_flags.ir",
        "region0.1.backward.5.assign_buckets.ir",
        "region0.1.backward.7.insert_collectives.ir",
        "region0.1.backward.9.order_launches.ir",
    ]
    assert dumps["region0.1.backward.0.captured.ir"] == format_graph(marked.graph)
    last = dumps["region0.1.backward.9.order_launches.ir"]
    assert last == f"# {lowered.edits[-1][1]}\n{format_graph(lowered.gm.graph)}"


def test_dumps_are_not_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHSHARD_DUMP", "")
    lower(forward())
    assert not list(tmp_path.iterdir())


# -- environment


@pytest.mark.parametrize(("name", "collectives"), [("assign_buckets", 5), ("order_launches", 3)])
def test_disabled_passes_are_left_out(name: str, collectives: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DISABLE", f" {name} ,")
    lowered = lower(forward())
    assert name not in [ran for ran, _ in lowered.edits]
    assert len(launches(lowered.gm.graph)) == collectives


def test_disabled_passes_may_be_all_optional_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DISABLE", ",".join(driver.OPTIONAL))
    assert [name for name, _ in lower(forward()).edits] == ["insert_collectives"]


@pytest.mark.parametrize("raw", ["insert_collectives", "order_launches,nonsense", "nonsense"])
def test_disabled_passes_must_be_optional(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_DISABLE", raw)
    wrong = raw.rpartition(",")[2]
    with pytest.raises(ValueError, match=rf"^GRAPHSHARD_DISABLE: got {wrong}, want some of: .*order_launches"):
        lower(forward())


@pytest.mark.parametrize("raw", ["3", "-1", "on", ""])
def test_verify_level_must_be_known(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY", raw)
    with pytest.raises(ValueError, match=rf"^GRAPHSHARD_VERIFY: got '{raw}', want 0, 1 or 2$"):
        lower(forward())


def test_environment_has_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRAPHSHARD_VERIFY", "GRAPHSHARD_DUMP", "GRAPHSHARD_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    assert (env.verify_level(), env.dump_dir(), env.disabled_passes(driver.OPTIONAL)) == (1, None, frozenset())


# -- verification


@dataclass(frozen=True)
class BrokenEdit:
    """An edit that is never falsy."""


def broken(damage: Callable[[Graph], object], **changes: Any) -> Pass:
    return Pass("broken", lambda graph, ctx: BrokenEdit(), lambda graph, edit: damage(graph), **changes)


def run_with(monkeypatch: pytest.MonkeyPatch, step: Pass, before: str | None, marked: Marked) -> None:
    """Lowers with one more pass before `before` (None: at the end)."""
    names = [known.name for known in PROGRAM]
    at = names.index(before) if before else len(names)
    monkeypatch.setattr(driver, "PROGRAM", (*PROGRAM[:at], step, *PROGRAM[at:]))
    lower(marked)


def _first(graph: Graph, target: Any) -> Any:
    return next(iter(graph.find_nodes(op="call_function", target=target)))


def _use_before_definition(graph: Graph) -> None:
    output_node(graph).all_input_nodes[0].append(_first(graph, UNSHARD))


def _forget_fake_value(graph: Graph) -> None:
    del _first(graph, UNSHARD).meta["val"]


def _shorten_results(graph: Graph) -> None:
    output = output_node(graph)
    output.args = (output.args[0][:-1],)  # type: ignore[index]


def _gather_again(graph: Graph) -> None:
    node = _first(graph, UNSHARD)
    Builder(graph, node).call(UNSHARD, *node.args)


def _bucket_all(graph: Graph) -> None:
    for node in [*unshards(graph), *reductions(graph)]:
        node.meta["bucket"] = ("everything", 0)


def _wait_twice(graph: Graph) -> None:
    node = _first(graph, WAIT)
    Builder(graph, node).call(WAIT, *node.args)


def _add_node(graph: Graph) -> None:
    Builder(graph, output_node(graph)).call(aten.neg.default, output_node(graph).all_input_nodes[0])


def _drop_reduction(graph: Graph) -> None:
    node = _first(graph, REDUCE_GRAD)
    node.replace_all_uses_with(node.args[1])
    graph.erase_node(node)


FIRST, LAST = "fold_unshards", None


@pytest.mark.parametrize(
    ("invariant", "damage", "before", "changes"),
    [
        ("G1", _use_before_definition, FIRST, {}),
        ("G2", _forget_fake_value, FIRST, {}),
        ("G4", _shorten_results, FIRST, {}),
        ("C1", _wait_twice, LAST, {}),
        ("C3", _gather_again, "assign_buckets", {}),
        ("C3", _drop_reduction, FIRST, {}),
        ("B1", _bucket_all, FIRST, {}),
        ("S1", _add_node, LAST, {"permutes": True}),
        ("R1", _drop_reduction, FIRST, {"changes_signature": True}),
    ],
)
@pytest.mark.parametrize("level", ["1", "2"])
def test_broken_pass_is_rejected_by_the_invariant(
    invariant: str,
    damage: Callable[[Graph], None],
    before: str | None,
    changes: dict[str, bool],
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY", level)
    step, marked = broken(damage, **changes), backward() if damage in (_drop_reduction, _bucket_all) else forward()
    if level == "2" and invariant == "R1":  # what such a graph computes is looked at before
        invariant = "V1"
    with pytest.raises(VerifyError, match=rf"^\[{invariant}\] ") as caught:
        run_with(monkeypatch, step, before, marked)
    assert caught.value.invariant == invariant
    assert caught.value.step == ("" if invariant == "R1" else "broken")  # R1 is for all passes together


def _stale_fake_value(graph: Graph) -> None:
    node, other = _first(graph, UNSHARD), output_node(graph).all_input_nodes[0]
    node.meta["val"] = other.meta["val"]


def test_broken_fake_value_is_rejected_at_level_2_only(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(broken(_stale_fake_value), name="assign_buckets", optional=True)
    monkeypatch.setattr(driver, "PROGRAM", (harmless,))
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "2")
    with pytest.raises(VerifyError, match=r"^\[G3\] %unshard_default: "):
        lower(forward())
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "1")
    with pytest.raises(VerifyError, match=r"^\[M1\] "):  # only what comes after the passes
        lower(forward())


def test_broken_pass_passes_unseen_at_level_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "0")
    run_with(monkeypatch, broken(_wait_twice), LAST, forward())


def test_marker_left_by_the_passes_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "PROGRAM", passes.JOINT)
    with pytest.raises(VerifyError, match=r"^\[M1\] "):
        lower(forward())


def test_joint_graph_is_checked_before_its_passes() -> None:
    marked = forward()
    _use_before_definition(marked.graph)
    with pytest.raises(VerifyError, match=r"^\[G1\] "):
        driver.run_joint_passes(marked.gm)


def test_partition_that_saves_a_gathered_parameter_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = forward()
    driver.check_partition(marked.gm, 1)
    output_node(marked.graph).args = ((*output_node(marked.graph).args[0], marked.node("t_default")),)  # type: ignore[misc]
    with pytest.raises(VerifyError, match=r"^\[L1\] %unshard_default: "):
        driver.check_partition(marked.gm, 1)
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "0")
    driver.check_partition(marked.gm, 1)


# -- observers


def test_after_lowering_shows_each_program_inside_only() -> None:
    seen: list[tuple[GraphModule, str]] = []
    with driver.after_lowering(lambda gm, direction: seen.append((gm, direction))):
        programs = [lower(forward()).gm, lower(backward()).gm]
    lower(forward())
    assert seen == [(programs[0], "forward"), (programs[1], "backward")]


def test_after_lowering_observers_nest_in_order() -> None:
    calls: list[str] = []
    with driver.after_lowering(lambda gm, direction: calls.append("outer")):
        with driver.after_lowering(lambda gm, direction: calls.append("inner")):
            lower(forward())
        lower(forward())
    assert calls == ["outer", "inner", "outer"]


def test_after_lowering_may_change_the_program() -> None:
    def negate(gm: GraphModule, direction: str) -> None:
        output = output_node(gm.graph)
        first = output.all_input_nodes[0]
        output.replace_input_with(first, Builder(gm.graph, output).call(aten.neg.default, first))

    with driver.after_lowering(negate):
        lowered = lower(forward())
    assert "aten.neg" in lowered.gm.code


# -- cost


def calls(run: Callable[[], object]) -> int:
    """How many Python and C functions `run` calls: a measure of work that does not depend on the machine."""
    count = 0

    def tally(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def lines(run: Callable[[], object]) -> int:
    """How many lines of Python `run` executes, rounds of comprehensions included."""
    count = 0

    def tally(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return tally

    before = sys.gettrace()
    sys.settrace(tally)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def one_bucket(blocks: int) -> Marked:
    return two_gathers(*(Weight(f"unit.p{i}", (4,), i) for i in range(10 * blocks)))


def holding(blocks: int) -> Marked:
    return backward(blocks).flagged(added=tuple((weight.shard_name, F32) for weight in toy_weights(blocks)))


def without_loss(blocks: int) -> Marked:
    return backward(blocks).flagged(undefined=frozenset({"tangents_9"}))


MAKERS = [forward, backward, holding, without_loss, one_bucket]


@pytest.mark.parametrize("make", MAKERS)
def test_lower_takes_work_in_proportion_to_the_graph(
    make: Callable[[int], Marked], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "1")
    small, large = (make(blocks) for blocks in (10, 40))
    lower(small)  # imports and caches
    growth = len(large.graph.nodes) / len(small.graph.nodes)
    assert calls(lambda: lower(large)) < 1.3 * growth * calls(lambda: lower(small))


@pytest.mark.parametrize("make", MAKERS)
def test_decide_takes_work_in_proportion_to_the_graph(make: Callable[[int], Marked]) -> None:
    small, large = (make(blocks) for blocks in (10, 60))
    for step in PROGRAM:
        for measure in (calls, lines):
            few, many = (measure(partial(step.decide, marked.graph, marked.ctx)) for marked in (small, large))
            assert many < 8 * few + 100, step.name
        for marked in (small, large):
            step.apply(marked.graph, step.decide(marked.graph, marked.ctx))
