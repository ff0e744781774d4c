"""Graphs before and after a pass are run on the same inputs: what a broken pass changes is found, and named."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from graphshard.errors import PassFailed
from graphshard.graph.builder import Builder
from graphshard.graph.ir import aten, output_args, output_node, unshards
from graphshard.graph.markers import UNSHARD, ShardSpec
from graphshard.graph.sameness import Bitwise, Regrouped
from graphshard.lowering import driver, traced_blocks
from graphshard.passes import CAPTURED, COLLAPSE, EXPAND, JOINT, PROGRAM, Pass
from tests.graph.graphs import F32, GraphBuilder, Marked, Weight, toy_backward, toy_forward, toy_weights, two_gathers
from tests.graph.test_golden import GRAPHS, backward_accumulating, forward_keeping
from tests.graph.test_traced_blocks import BATCH, DIM, Stack, plain
from tests.graph.traced_model import Traced

FAILED = r"^\[V1\] pass {} of \S+ changes what is computed: result \d, %\w+, of rank \d: .*; run \S+run\.py\n"


@pytest.fixture(autouse=True)
def _level_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY", "2")
    monkeypatch.setenv("GRAPHSHARD_FAULTS", str(tmp_path / "faults"))


def swap_results(graph: Graph) -> None:
    """Two results that look alike change places."""
    results = output_args(graph)
    values = [str((v.shape, v.dtype)) if isinstance(v, Tensor) else "" for v in map(_value, results)]
    first, second = next((i, j) for i in range(len(values)) for j in range(i) if values[i] and values[i] == values[j])
    results[first], results[second] = results[second], results[first]
    output_node(graph).args = (tuple(results),)


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def damaged(step: Pass, damage: Callable[[Graph], None]) -> Pass:
    def apply(graph: Graph, edit: object) -> None:
        step.apply(graph, edit)
        damage(graph)

    return replace(step, apply=apply)


def outlining() -> Marked:
    marked = toy_forward(toy_weights(7))
    return Marked(marked.gm, replace(marked.ctx, outlines=True))


def fusing() -> Marked:
    marked = toy_backward(toy_weights())
    return Marked(marked.gm, replace(marked.ctx, fuses=True))


def tied_twice() -> Marked:
    """A parameter that is read twice; two results are alike."""
    build, weight = GraphBuilder(), Weight("w", (4, 4))
    return build.finish(
        build.call(aten.neg.default, build.unshard(weight)), build.call(aten.exp.default, build.unshard(weight))
    )


MAKERS: dict[str, Callable[[], Marked]] = {
    "fold_unshards": tied_twice,
    "apply_residency": forward_keeping,
    "apply_flags": backward_accumulating,
    "outline_blocks": outlining,
    "assign_buckets": lambda: toy_forward(toy_weights()),
    "choose_copies": lambda: toy_backward(toy_weights()).coalescing(),
    "insert_collectives": lambda: toy_backward(toy_weights()),
    "fuse_copies": fusing,
    "order_launches": lambda: toy_forward(toy_weights()),
}


@pytest.mark.parametrize("step", PROGRAM, ids=lambda step: step.name)
def test_a_pass_that_changes_results_is_named(step: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = damaged(step, swap_results)
    monkeypatch.setattr(driver, "PROGRAM", tuple(broken if known is step else known for known in PROGRAM))
    marked = MAKERS[step.name]()
    with pytest.raises(PassFailed, match=FAILED.format(step.name)) as caught:
        driver.lower(marked.gm, marked.ctx, "program")
    assert caught.value.step == step.name


def test_a_pass_without_a_maker_here_would_not_be_tested() -> None:
    assert [step.name for step in PROGRAM] == [*MAKERS]


@pytest.mark.parametrize("make", GRAPHS, ids=lambda make: make.__name__)
def test_right_passes_are_checked_and_nothing_is_said(make: Callable[[], Marked]) -> None:
    marked = make()
    assert driver.lower(marked.gm, marked.ctx, "program").unchecked == ()


# -- what is subtle


def inference() -> Marked:
    return toy_forward(toy_weights(), "inference")


def _sum(graph: Graph) -> None:
    node = next(node for node in graph.nodes if node.name.startswith("reduce_scatter_tensor"))
    node.args = (node.args[0], "sum", *node.args[2:])


def _other_operator(graph: Graph) -> None:
    next(node for node in graph.nodes if node.target is aten.relu.default).target = aten.neg.default


def _forget_held(graph: Graph) -> None:
    held = next(node for node in graph.nodes if node.name.startswith("held_"))
    (total,) = held.users
    total.replace_all_uses_with(next(term for term in total.all_input_nodes if term is not held))
    graph.erase_node(total)


def _write_input(graph: Graph) -> None:
    x = next(node for node in graph.nodes if node.name == "x")
    Builder(graph, output_node(graph)).call(aten.add_.Tensor, x, 1)


@pytest.mark.parametrize(
    ("damage", "name", "make", "says"),
    [
        (_sum, "insert_collectives", lambda: toy_backward(toy_weights()), r"result 4, %wait_tensor_default, of rank 0"),
        (
            _other_operator,
            "order_launches",
            lambda: toy_forward(toy_weights()),
            r"result 0, %mm\w+, .*first in %relu_default;",
        ),
        (_forget_held, "apply_flags", backward_accumulating, r"result \d, %reduce_grad"),
        (
            _write_input,
            "assign_buckets",
            lambda: toy_forward(toy_weights(), "inference"),
            r"input %x in the end, of rank 0",
        ),
    ],
)
def test_what_differs_is_said(
    damage: Callable[[Graph], None],
    name: str,
    make: Callable[[], Marked],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = tuple(damaged(step, damage) if step.name == name else step for step in PROGRAM)
    monkeypatch.setattr(driver, "PROGRAM", broken)
    marked = make()
    with pytest.raises(PassFailed, match=says):
        driver.lower(marked.gm, marked.ctx, "program")


def test_conjugates_that_are_still_to_be_made_are_compared_by_their_bits() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    for lazy, want in ((value.conj(), [1 - 2j, 3 + 4j]), (value.conj().imag, [-2.0, 4.0])):
        assert lazy.is_conj() or lazy.is_neg()
        assert not Bitwise().differ(lazy, torch.tensor(want), 2, F32)
        assert Bitwise().differ(lazy, -torch.tensor(want), 2, F32)


def test_a_gradient_that_is_dropped_is_no_sum_regrouped() -> None:
    terms = torch.randn(64, generator=torch.Generator().manual_seed(0))
    want, sameness = terms + 1, Regrouped("of a test")
    assert not sameness.differ(want + 1e-7, want, 2, F32)
    assert sameness.differ(terms, want, 2, F32)
    assert sameness.differ(want + 1e-4, want, 2, F32)
    assert not sameness.differ(want.bfloat16() * 1.004, want.bfloat16(), 2, torch.bfloat16)
    assert Bitwise().differ(want + 1e-7, want, 2, F32)
    assert Bitwise().differ(torch.zeros(1), -torch.zeros(1), 1, F32)
    assert not Bitwise().differ(torch.tensor([torch.nan]), torch.tensor([torch.nan]), 1, F32)


# -- what is written of it


def test_the_reproducer_runs_by_itself_and_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "insert_collectives"
    broken = tuple(damaged(step, swap_results) if step.name == name else step for step in PROGRAM)
    monkeypatch.setattr(driver, "PROGRAM", broken)
    marked = toy_backward(toy_weights())
    with pytest.raises(PassFailed) as caught:
        driver.lower(marked.gm, marked.ctx, "program")
    script = Path(re.search(r"run (\S+run\.py)", str(caught.value))[1])  # type: ignore[index]
    assert script.is_relative_to(tmp_path)
    assert {f"{path.stat().st_mode & 0o777:o}" for path in script.parent.iterdir()} == {"600"}
    assert f"{script.parent.stat().st_mode & 0o777:o}" == "700"
    whole, small = ((script.parent / file).read_text() for file in ("after.ir", "after.py"))
    assert small.count("reduce_scatter_tensor.default") < whole.count("= reduce_scatter_tensor(")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "before the pass: as wanted" and lines[2].startswith("after the pass: result 0, %")


# -- what is not checked says so


def unchecked(marked: Marked) -> str:
    return " ".join(driver.lower(marked.gm, marked.ctx, "program").unchecked)


def test_large_graphs_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY_MIB", "0")
    assert "more than GRAPHSHARD_VERIFY_MIB=0 allows" in unchecked(toy_forward(toy_weights()))


def test_many_ranks_are_not_run() -> None:
    assert "its groups connect more than 64 ranks" in unchecked(two_gathers(Weight("w", (65, 2), 0, 65)))
    assert unchecked(two_gathers(Weight("w", (64, 2), 0, 64))) == ""


CALLS = itertools.count()


def unlike(x: Tensor) -> Tensor:
    return x + next(CALLS)


@torch.library.custom_op("graphshard_validation_test::communicating", mutates_args=())
def communicating(x: Tensor) -> Tensor:
    raise AssertionError("it is not to be called")


@communicating.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (unlike, "it computes something else each time that it is run"),
        (
            torch.ops.graphshard_validation_test.communicating.default,
            "not torch's own and may do anything",
        ),
    ],
)
def test_what_cannot_be_compared_says_so(target: Any, says: str) -> None:
    build, weight = GraphBuilder(), Weight("w", (4, 4))
    assert says in unchecked(build.finish(build.call(target, build.unshard(weight))))


@pytest.mark.parametrize("raw", ["-1", "many", "1" * 20])
def test_the_limit_is_a_number(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_VERIFY_MIB", raw)
    with pytest.raises(ValueError, match=r"^GRAPHSHARD_VERIFY_MIB: got .*, want a number of MiB$"):
        driver.check_environment()


# -- graphs that are traced


SPEC = str(ShardSpec((4, 2), F32, F32, 0, 2, "0"))


def captured() -> GraphModule:
    """Reads one parameter twice, another once; a value enters a unit by an alias."""
    graph = Graph()
    shards = [graph.placeholder(name) for name in ("a", "b")]
    for node in shards:
        node.meta["example_value"] = torch.zeros(4, requires_grad=True)
    full = [graph.call_function(UNSHARD, (node, SPEC)) for node in (*shards, shards[0])]
    alias = graph.call_function(aten.alias.default, (full[1],))
    graph.output(tuple(graph.call_function(torch.neg, (node,)) for node in (*full[::2], alias)))
    return GraphModule(nn.Module(), graph)


def _other_parameter(graph: Graph) -> None:
    first, *_, last = unshards(graph)
    first.replace_all_uses_with(last, propagate_meta=False)


def _forget_gradient(graph: Graph) -> None:
    node = unshards(graph)[0]
    with graph.inserting_after(node):
        detached = graph.call_function(torch.detach, (node,))
    node.replace_all_uses_with(detached)
    detached.args = (node,)


@pytest.mark.parametrize("damage", [_other_parameter, _forget_gradient])
@pytest.mark.parametrize("step", [step for step in CAPTURED if not step.repairs], ids=lambda step: step.name)
def test_passes_of_captured_graphs_keep_results_and_gradients(
    step: Pass, damage: Callable[[Graph], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    driver.run_captured_passes(captured(), "captured", said.append)
    assert not said
    monkeypatch.setattr(
        driver, "CAPTURED", tuple(damaged(known, damage) if known is step else known for known in CAPTURED)
    )
    with pytest.raises(PassFailed, match=f"pass {step.name} of captured changes what is computed"):
        driver.run_captured_passes(captured(), "captured", said.append)


@pytest.mark.parametrize("step", [*JOINT[:1], EXPAND], ids=lambda step: step.name)
def test_passes_of_blocks_are_named(step: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = damaged(step, swap_results)
    monkeypatch.setattr(driver, "JOINT", tuple(broken if known is step else known for known in JOINT))
    monkeypatch.setattr(driver, "EXPAND", broken if step is EXPAND else EXPAND)
    x = torch.randn(BATCH, DIM, requires_grad=True)
    with pytest.raises(Exception, match=f"pass {step.name} of .* changes what is computed"):
        Traced(Stack(plain)).run(x).sum().backward()


def test_blocks_are_traced_one_by_one_where_their_calls_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(graph: Graph) -> None:
        first = next(node for node in graph.nodes if "call_block" in str(node.target))
        second = next(node for node in graph.nodes if "call_block" in str(node.target) and node is not first)
        second.args = (*second.args[:2], *first.args[2:])

    monkeypatch.setattr(driver, "COLLAPSE", damaged(COLLAPSE, damage))
    monkeypatch.setattr(traced_blocks, "COLLAPSE", driver.COLLAPSE)
    traced = Traced(Stack(plain))
    traced.run(torch.randn(BATCH, DIM, requires_grad=True)).sum().backward()
    assert traced.calls == 0
    (line,) = traced.report.notes
    assert "pass collapse_blocks is left out: [V1] pass collapse_blocks of a.captured changes what is computed" in line
