"""Seams of equal blocks: found in marked graphs, kept by problems, and no matter to plan files."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest
from torch.fx import Graph, Node

from graphshard.cost import HARDWARE, CostModel, GroupShape
from graphshard.graph.ir import Flags, aten, is_marker
from graphshard.lowering.driver import lower, mark_seams
from graphshard.passes import outline_blocks
from graphshard.planner import Problem
from graphshard.planning.extraction import Scene, extract_problem
from tests.graph.graphs import BATCH, WIDTH, GraphBuilder, Marked, Weight, toy_backward, toy_forward, toy_weights

SCENE = Scene(CostModel(HARDWARE["h100"]), lambda group: GroupShape(2, 1))
BLOCKS = 7


def outlined(which: str) -> Marked:
    marked = (toy_forward if which == "forward" else toy_backward)(toy_weights(BLOCKS))
    edit = outline_blocks.decide(marked.graph, replace(marked.ctx, outlines=True))
    assert edit
    outline_blocks.apply(marked.graph, edit)
    assert not outline_blocks.decide(marked.graph, replace(marked.ctx, outlines=True))
    return marked


def computed(marked: Marked) -> list[Node]:
    return [node for node in marked.graph.nodes if node.op == "call_function" and not is_marker(node)]


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_seams_come_at_the_same_place_of_each_block(which: str) -> None:
    nodes = computed(outlined(which))
    inside = [place for place, node in enumerate(nodes) if "seam" in node.meta]
    assert inside == list(range(inside[0], inside[-1] + 1))
    kinds = [[str(node.target) for node in nodes[a:b]] for a, b in pairwise(p for p in inside if nodes[p].meta["seam"])]
    assert len(kinds) >= BLOCKS - 2
    assert len({*map(tuple, kinds)}) <= 2


def gradients(blocks: int) -> Marked:
    """In each block the gradient of a weight comes before what reads the weight, and what is normed comes in parts;
    something else follows the last block.
    """
    build = GraphBuilder("backward")
    weights = [Weight(f"layers.{i}.weight", (WIDTH, WIDTH)) for i in range(blocks)]
    grad = build.input("tangents_1", [BATCH, WIDTH])
    saved = [build.input(f"hidden_{i}", [BATCH, WIDTH]) for i in range(blocks)]
    reduced = []
    for weight, hidden in zip(weights, saved, strict=True):
        turned = build.call(aten.permute.default, grad, [1, 0])
        reduced.append(build.reduce(build.call(aten.mm.default, turned, hidden), weight))
        product = build.call(aten.mm.default, grad, build.unshard(weight))
        normed = build.call(aten.native_layer_norm.default, product, [WIDTH], None, None, 1e-5)
        grad = build.call(aten.add.Tensor, grad, build.call(operator.getitem, normed, 0))
    return build.finish(build.call(aten.sin.default, grad), *reduced)


def test_blocks_that_begin_with_what_reads_no_parameter_are_equal_to_the_last() -> None:
    marked = gradients(BLOCKS)
    outline_blocks.apply(marked.graph, outline_blocks.decide(marked.graph, replace(marked.ctx, outlines=True)))
    nodes = computed(marked)
    seams = [number for number, node in enumerate(nodes) if node.meta.get("seam")]
    assert [node.target for node in nodes if node.meta.get("seam")].count(aten.permute.default) == BLOCKS
    assert nodes[seams[-1]].target is aten.sin.default
    stretches = {tuple(str(node.target) for node in nodes[a:b]) for a, b in pairwise(seams)}
    assert len(stretches) <= 2


def test_what_takes_results_apart_begins_no_stretch() -> None:
    marked = gradients(BLOCKS)
    outline_blocks.apply(marked.graph, outline_blocks.decide(marked.graph, replace(marked.ctx, outlines=True)))
    assert not any(node.meta.get("seam") for node in computed(marked) if node.target is operator.getitem)


def test_programs_have_the_seams_of_their_marked_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def seams(graph: Graph) -> list[str]:
        return [node.name for node in graph.nodes if node.meta.get("seam")]

    marked = toy_forward(toy_weights(BLOCKS))
    ctx = replace(marked.ctx, outlines=True)
    monkeypatch.setenv("GRAPHSHARD_DISABLE", "outline_blocks")
    mark_seams(marked.gm, ctx, "test")
    assert not seams(marked.graph)
    monkeypatch.delenv("GRAPHSHARD_DISABLE")
    mark_seams(marked.gm, ctx, "test")
    assert seams(marked.graph) == seams(outlined("forward").graph)
    program = lower(marked.gm, replace(ctx, flags=Flags(resident=tuple(ctx.params))), "test")
    assert seams(program.gm.graph) == seams(marked.graph)


POINTWISE = {"a": aten.relu.default, "b": aten.sin.default, "c": aten.cos.default, "d": aten.tanh.default}
PART = "m" + "abcabdcabd" * 2 + "m" + "dabcdcbadb" * 2 + "m"  # beside multiplications nothing is fused


def stretches_of(letters: str) -> list[str]:
    """A chain of such operators in parts from one seam to the next; "m" multiplies, "M" by a weight of its own unit, a
    digit adds what came so many operators before.
    """
    build = GraphBuilder("forward")
    chain = [build.input("x", [BATCH, WIDTH])]
    for number, letter in enumerate(letters):
        if letter.isdigit():
            chain.append(build.call(aten.add.Tensor, chain[-1], chain[-1 - int(letter)]))
            continue
        unit = f"unit_{number}." if letter == "M" else ""
        more = [build.unshard(Weight(f"{unit}weight_{number}", (WIDTH, WIDTH)))] if letter in "mM" else []
        chain.append(build.call(POINTWISE.get(letter, aten.mm.default), chain[-1], *more))
    marked = build.finish(chain[-1])
    outline_blocks.apply(marked.graph, outline_blocks.decide(marked.graph, replace(marked.ctx, outlines=True)))
    seams = [number for number, node in enumerate(computed(marked)) if node.meta.get("seam")]
    return [letters[a:b] for a, b in pairwise([0, *seams, len(letters)])]


def test_what_recurs_far_away_begins_and_ends_at_seams() -> None:
    assert stretches_of("ab" + PART + "cab" + PART + "d") == ["ab", PART, "cab", PART, "d"]
    short = PART[:30]
    assert stretches_of("ab" + short + "cab" + short + "d") == ["ab" + short + "cab" + short + "d"]


def test_what_recurs_is_cut_beside_multiplications() -> None:
    more = "abc" + PART + "ddc"
    assert stretches_of("bb" + more + "cab" + more + "b") == ["bbabc", PART, "ddccababc", PART, "ddcb"]


def test_what_reads_otherwise_does_not_recur() -> None:
    one, other = (PART[:25] + digit + PART[25:] for digit in "23")
    assert stretches_of("ab" + one + "cab" + one + "d") == ["ab", one, "cab", one, "d"]
    assert stretches_of("ab" + one + "cab" + other + "d") == ["ab" + one + "cab" + other + "d"]


def test_what_is_read_behind_in_one_place_alone_does_not_recur() -> None:
    assert stretches_of("ab" + PART + "c9d" + "cab" + PART + "ca") == ["ab" + PART + "c9d" + "cab" + PART + "ca"]
    assert stretches_of("ab" + PART + "c9d" + "cab" + PART + "c9a").count(PART) == 2


def test_long_parts_that_recur_have_seams_inside() -> None:
    long = "".join(Random(1).choices("abcdm", k=150))
    assert max(map(len, stretches_of(long + "cab" + long))) < 80


def test_what_recurs_has_a_seam_where_each_unit_begins() -> None:
    units = ["M" + one * 3 for one in ("abcd", "acbd", "adcb", "bacd", "bcda", "cabd")]
    tower = "".join(units)
    found = stretches_of(tower + "dab" + tower + "c")
    assert [found.count(unit) for unit in units[:-1]] == [2] * 5


def seams_of_parts(letters: str) -> list[list[int]]:
    """Seams in each place that `PART` has in such a chain, and at its ends."""
    seams = [*accumulate(map(len, stretches_of(letters)))]
    places = [place for place in range(len(letters)) if letters.startswith(PART, place)]
    return [[seam - place for seam in seams if place <= seam <= place + len(PART)] for place in places]


def test_part_of_what_recurs_that_recurs_once_more_has_seams_in_all() -> None:
    longer = PART + "abdcbacddmadbmccdbadcaabmcbdacbbdm"
    found = seams_of_parts(longer + "cab" + longer + "db" + PART + "a")
    assert len(found) == 3 and found[0] == found[1] == found[2]
    assert {0, len(PART)} <= {*found[0]}


def test_part_of_equal_blocks_that_recurs_elsewhere_has_seams_in_all() -> None:
    block = PART + "abdcmcddab"
    found = seams_of_parts("d" + block * 4 + "cdb" + PART + "a")
    assert len(found) == 5 and all(seams == found[0] for seams in found)
    assert {0, len(PART)} <= {*found[0]}


def test_part_of_many_blocks_that_recurs_once_is_not_worth_its_calls() -> None:
    block = PART + "abdcmcddab"
    assert stretches_of("d" + block * 12 + "cdb" + PART + "a")[-1].endswith("cdb" + PART + "a")


def test_nothing_is_outlined_unless_it_is_asked_for() -> None:
    marked = toy_forward(toy_weights(BLOCKS))
    assert not outline_blocks.decide(marked.graph, marked.ctx)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_ops_of_a_problem_begin_at_seams_in_blocks(which: str) -> None:
    marked = outlined(which)
    seam = {node.name: node.meta["seam"] for node in computed(marked) if "seam" in node.meta}
    assert all(seam.get(name, True) for name in extract_problem(marked.graph, marked.ctx, SCENE).ops)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_stored_ops_are_read_again_with_seams_and_without(which: str) -> None:
    seamed = outlined(which)
    without = (toy_forward if which == "forward" else toy_backward)(toy_weights(BLOCKS))

    def problem(marked: Marked, stored: Problem | None = None) -> Problem:
        cuts = None if stored is None else frozenset(stored.ops)
        return extract_problem(marked.graph, marked.ctx, SCENE, cuts, exact=stored is not None)

    for stored, other in ((seamed, without), (without, seamed)):
        want = problem(stored)
        assert problem(other, want) == want
