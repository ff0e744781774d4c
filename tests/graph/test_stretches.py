"""A program that is cut into stretches computes what it did, and equal stretches are known to be equal."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.compat.body_strides import StridesUnknown
from graphshard.compat.dynamo import boxed_graph
from graphshard.graph.ir import PassContext
from graphshard.graph.stretches import Stretch, cut, looks_up_seed, undivided
from graphshard.lowering.bodies import Bodies
from graphshard.lowering.flat_program import Body, FlatProgram
from graphshard.passes import outline_blocks

X, WEIGHTS = torch.randn(4, 6), [torch.randn(6, 6) for _ in range(5)]


def blocks(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    saved = []
    for weight in weights:
        hidden = (x @ weight).relu()
        saved.append(hidden)
        mean, values = hidden.mean(), hidden.max(dim=1)
        x = x + hidden * mean + values[0].unsqueeze(1)
    return [x, *saved]


def outlined(function: Callable[..., Any] = blocks, *args: Any) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*args or (X, WEIGHTS))
    outline_blocks.apply(gm.graph, outline_blocks.decide(gm.graph, PassContext("forward", outlines=True)))
    return gm


def flat(gm: GraphModule) -> tuple[FlatProgram, int]:
    """A flat program whose bodies run as they are, and their number."""
    steps, bodies = cut(gm.graph), dict[object, Body]()
    of = {
        step: bodies.setdefault(step.key(), Body(boxed_graph(step.module(gm)), None))
        for step in steps
        if isinstance(step, Stretch)
    }
    return FlatProgram(gm, steps, of), len(bodies)


def test_outlined_blocks_compute_what_they_did() -> None:
    gm = outlined()
    program, _ = flat(gm)
    for got, want in zip(program([X, *WEIGHTS]), gm(X, WEIGHTS), strict=True):
        assert torch.equal(got, want)


def test_seam_between_an_operator_and_one_of_its_results_parts_nothing() -> None:
    gm = outlined()
    parts = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    for part in parts:
        if not part.users:
            continue
        user = next(iter(part.users))
        part.args[0].next.next.meta["seam"] = True
        user.prepend(part)
        user.prev.prev.meta["seam"] = True
    program, _ = flat(gm)
    inside = [node for step in cut(gm.graph) if isinstance(step, Stretch) for node in step.nodes]
    assert parts and len(inside) == len(set(inside))
    for got, want in zip(program([X, *WEIGHTS]), gm(X, WEIGHTS), strict=True):
        assert torch.equal(got, want)


def test_equal_blocks_share_their_bodies_whatever_their_number() -> None:
    counts = []
    for number in (6, 12):
        weights = [torch.randn(6, 6) for _ in range(number)]
        counts.append(flat(outlined(blocks, X, weights))[1])
    assert counts[0] == counts[1]


def test_block_that_differs_has_a_body_of_its_own() -> None:
    def changed(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
        first = blocks(x, weights[:6])
        return [*first, *blocks(torch.tanh(first[0]) * 3.0, weights[6:])]

    weights = [torch.randn(6, 6) / 6 for _ in range(12)]  # of larger ones the last block's results may be NaN
    gm = outlined(changed, X, weights)
    program, count = flat(gm)
    assert count > flat(outlined(blocks, X, weights))[1]
    for got, want in zip(program([X, *weights]), gm(X, weights), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x.double(),
        lambda x: x[:, :3],
        lambda x: torch.ones(37)[1:].view(6, 6),  # begins where no vector may
    ],
)
def test_keys_tell_other_inputs_apart(change: Callable[[Tensor], Tensor]) -> None:
    keys = {
        tuple(step.key() for step in cut(make_fx(lambda x: (x * 2).exp(), tracing_mode="fake")(x).graph))  # type: ignore[union-attr]
        for x in (torch.ones(6, 6), change(torch.ones(6, 6)))
    }
    assert len(keys) == 2


def test_stretches_with_other_constants_have_other_keys() -> None:
    constants = [torch.ones(6), torch.zeros(6)]

    def keys(number: int) -> list[tuple[object, ...]]:
        gm = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(6))
        (add,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        gm.register_buffer("constant", constants[number])
        with gm.graph.inserting_before(add):
            attribute = gm.graph.get_attr("constant")
        add.update_arg(1, attribute)
        return [step.key() for step in cut(gm.graph) if isinstance(step, Stretch)]

    assert keys(0) == keys(0)
    assert hash(keys(0)[0]) != hash(keys(1)[0])


def test_values_are_dropped_before_the_last_body_that_reads_them_runs() -> None:
    gm = outlined()
    steps = cut(gm.graph)
    seen: list[bool] = []
    given = torch.randn(4, 6)
    argument = weakref.ref(given)

    def looking(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def look(args: list[Any]) -> Any:
            results = run(args)
            seen.append(argument() is None)
            return results

        return look

    bodies = {s: Body(looking(boxed_graph(s.module(gm))), None) for s in steps if isinstance(s, Stretch)}
    args = [given, *WEIGHTS]
    del given
    FlatProgram(gm, steps, bodies)(args)
    assert args == []
    assert seen[1:] == [True] * len(seen[1:])


def test_program_with_many_sizes_that_depend_on_values_is_not_divided() -> None:
    def placed(times: int) -> GraphModule:
        def found(x: Tensor) -> Tensor:
            rows = x.nonzero()
            for _ in range(times):
                rows = rows * 2
            return x.exp() + rows.sum()

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            return make_fx(found, tracing_mode="symbolic")(torch.ones(3))

    assert "depend on values" in undivided(placed(20).graph)
    few = placed(2)
    assert undivided(few.graph) == ""
    alone = [str(step.target) for step in cut(few.graph) if not isinstance(step, Stretch)]
    assert alone.count("aten.mul.Tensor") == 2 and "aten.sum.default" in alone


def compiled(bodies: Bodies, *graphs: GraphModule, is_backward: bool = False) -> list[str]:
    """What is compiled for programs, one after the other: the last operator of each stretch."""
    asked: list[str] = []

    def compile_body(gm: GraphModule, inputs: object, kwargs: object) -> Callable[[list[Any]], Any]:
        asked.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"][-1])
        return boxed_graph(gm)

    with mock.patch("graphshard.lowering.bodies.compile_body", compile_body):
        for gm in graphs:
            bodies.compile_program(gm, (), {"is_backward": is_backward}, lambda line: pytest.fail(line))
    return asked


def traced(mode: str) -> GraphModule:
    return make_fx(lambda x: (x * 2).exp(), tracing_mode=mode)(torch.ones(6, 6))


def test_bodies_are_shared_between_programs_but_for_symbols_of_other_captures() -> None:
    assert len(compiled(Bodies(), traced("fake"), traced("fake"))) == 1
    assert len(compiled(Bodies(), traced("symbolic"), traced("symbolic"))) == 2
    bodies = Bodies()
    assert len(compiled(bodies, traced("fake"))) == len(compiled(bodies, traced("fake"), is_backward=True)) == 1


def test_program_with_strides_that_depend_on_sizes_is_compiled_whole_and_said() -> None:
    gm, said = traced("fake"), list[str]()
    with (
        mock.patch("graphshard.lowering.bodies.compile_body", side_effect=StridesUnknown),
        mock.patch("graphshard.lowering.bodies.compile_graph_inductor") as whole,
    ):
        run = Bodies().compile_program(gm, (), {}, said.append)
    assert run is whole.return_value
    assert ["strides that depend on dynamic sizes" in line for line in said] == [True]


def test_program_whose_arguments_come_in_other_strides_is_compiled_whole_and_said() -> None:
    gm, said = traced("fake"), list[str]()
    with mock.patch("graphshard.lowering.bodies.compile_graph_inductor") as whole:
        run = Bodies().compile_program(gm, (torch.ones(6, 6).t(),), {}, said.append)
    assert run is whole.return_value
    assert ["has changed the strides of x_1" in line for line in said] == [True]


def sharing_a_constant(x: Tensor, weights: list[Tensor]) -> Tensor:
    """As after equal constants were made one."""
    zeros = torch.full((4, 6), 0.5)
    for weight in weights:
        x = torch.where((x @ weight) > zeros, x, zeros) + 1
    return x.tanh()


def constants(gm: GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if str(node.target) == "aten.full.default"]


def test_constant_that_equal_blocks_read_is_made_anew_in_each() -> None:
    gm = outlined(sharing_a_constant)
    assert len(constants(gm)) == 1
    program, count = flat(gm)
    assert torch.equal(program([X, *WEIGHTS])[0], gm(X, WEIGHTS))
    steps = cut(gm.graph)
    assert not any(constants(gm)[0] in step.inputs for step in steps if isinstance(step, Stretch))
    assert flat(outlined(sharing_a_constant, X, [*WEIGHTS, *WEIGHTS]))[1] == count


def test_results_that_share_the_memory_of_a_constant_go_on_sharing_it() -> None:
    def function(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        ones = torch.full((4, 6), 1.0)
        for weight in weights:
            x = (x @ weight).relu() + ones
        return x, ones, ones.view(-1)[:5]

    program, _ = flat(outlined(function))
    _, ones, part = program([X, *WEIGHTS])
    ones.add_(1)
    assert torch.equal(part, torch.full((5,), 2.0))


def test_attribute_and_constant_that_change_places_are_told_apart() -> None:
    gm = GraphModule(torch.nn.Module(), Graph())
    gm.register_buffer("kept", torch.arange(4.0))
    x = gm.graph.placeholder("x")
    results = []
    for attribute_first in (True, False):
        kept = gm.graph.get_attr("kept")
        one = gm.graph.call_function(torch.ops.aten.full.default, ([4], 1.0))
        read = (kept, one) if attribute_first else (one, kept)
        result = gm.graph.call_function(torch.ops.aten.sub.Tensor, read)
        results.append(gm.graph.call_function(torch.ops.aten.mul.Tensor, (result, x)))
        result.meta["seam"] = True
    gm.graph.output(tuple(results))
    for node in gm.graph.nodes:
        node.meta["val"] = torch.ones(4)
    gm.recompile()
    for got, want in zip(flat(gm)[0]([torch.ones(4)]), gm(torch.ones(4)), strict=True):
        assert torch.equal(got, want)


def test_last_block_that_ends_otherwise_shares_what_is_equal() -> None:
    def function(x: Tensor, weights: list[Tensor]) -> Tensor:
        for number, weight in enumerate(weights):
            hidden = ((x @ weight).relu() + 1).tanh()
            x = x * (hidden.sin() if number == len(weights) - 1 else hidden.cos()) - 1
        return x

    gm = outlined(function)
    seams = [node.meta["seam"] for node in gm.graph.nodes if "seam" in node.meta]
    period = sum(node.op == "call_function" for node in gm.graph.nodes) // len(WEIGHTS)
    assert len(seams) >= (len(WEIGHTS) - 1) * period + 4  # up to what is other
    assert seams[-period:] == [seams[place % period] for place in range(len(seams) - period, len(seams))]


def test_stretch_ends_at_a_seam_wherever_it_falls() -> None:
    def function(x: Tensor, seeds: Tensor) -> Tensor:
        kept = torch.ops.prims.inductor_random([6, 6], torch.ops.prims.inductor_lookup_seed(seeds, 0), "rand")
        return x.sin().cos() * kept + 1

    gm = make_fx(function, tracing_mode="fake")(X[:, :6].new_ones(6, 6), torch.zeros(2, dtype=torch.int64))
    (seed,) = (node for node in gm.graph.nodes if looks_up_seed(node))
    next(node for node in gm.graph.nodes if "cos" in str(node.target)).append(seed)
    assert sum(isinstance(step, Stretch) for step in cut(gm.graph)) == 1
    seed.meta["seam"] = True
    assert sum(isinstance(step, Stretch) for step in cut(gm.graph)) == 2


def test_operator_with_which_nothing_is_fused_runs_as_it_is() -> None:
    gm = make_fx(lambda x: x @ x, tracing_mode="fake")(torch.ones(6, 6))
    (step,) = cut(gm.graph)
    assert not isinstance(step, Stretch)
    seeded = make_fx(lambda s: torch.ops.prims.inductor_random([4], s, "rand"), tracing_mode="fake")(torch.tensor(7))
    (step,) = cut(seeded.graph)
    assert isinstance(step, Stretch)  # eager's would not read its seed
