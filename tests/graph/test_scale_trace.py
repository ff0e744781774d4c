"""Tracing without data, and programs for other numbers of ranks."""

from __future__ import annotations

import pytest
import scale_models
import torch
import torch.distributed as dist
from torch import nn

from graphshard.compat.fake import fake_process_group
from graphshard.cost import CostModel, find_hardware
from graphshard.graph.ir import reductions, shard_placeholder, spec_of, unshards, val
from graphshard.planner import Problem
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.scale import trace
from graphshard.scale.resize import RankLayout, program_on
from graphshard.scale.trace import Traced, TracedProgram


@pytest.fixture(scope="module")
def traced() -> Traced:
    return scale_models.traced_decoder()


def test_trace_gathers_and_reduces_every_parameter(traced: Traced) -> None:
    everything = {param.fqn for param in traced.params}
    model, _ = scale_models.decoder(4)
    assert everything == {name for name, _ in model.named_parameters()}
    gathered = [traced.forward.params[shard_placeholder(node).name] for node in unshards(traced.forward.gm.graph)]
    reduced = [traced.backward.params[shard_placeholder(node).name] for node in reductions(traced.backward.gm.graph)]
    assert sorted(param.fqn for param in gathered) == sorted(everything)
    assert sorted(param.fqn for param in reduced) == sorted(everything)


def test_trace_keeps_the_root_gathered_as_fsdp2_does(traced: Traced) -> None:
    stays = {traced.forward.params[name].unit for name in traced.forward.stays}
    assert stays == {""}


def test_trace_leaves_no_process_group_behind(traced: Traced) -> None:
    assert not dist.is_initialized()


def test_trace_refuses_a_process_group_that_is_there() -> None:
    with fake_process_group(2), pytest.raises(RuntimeError, match="a process group is there already"):
        trace.trace_step(lambda: scale_models.decoder(2))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("model", "message"),
    [(scale_models.Breaking, "captured as one graph"), (scale_models.Detached, "want one that returns the loss")],
)
def test_trace_says_what_it_cannot_trace(model: type[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace.trace_step(lambda: (model(), (torch.randn(2, 64),)))
    assert not dist.is_initialized()


def problem_of(program: TracedProgram, layout: RankLayout) -> Problem:
    graph, ctx = program_on(program, layout)
    return extract_problem(graph, ctx, Scene(CostModel(find_hardware("h100")), layout.group_shapes(8)))


def test_resized_program_equals_one_traced_for_that_many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    for_two = trace.trace_step(lambda: scale_models.mean(2, 8))
    monkeypatch.setattr(trace, "TRACED_SHARDS", 6)  # 64 rows are padded
    for_six = trace.trace_step(lambda: scale_models.mean(2, 8))
    for name in ("forward", "backward"):
        resized, own = (problem_of(getattr(one, name), RankLayout(6)) for one in (for_two, for_six))
        assert resized == own


def test_resized_program_has_copies_of_its_shards(traced: Traced) -> None:
    graph, _ = program_on(traced.backward, RankLayout(4, copies=16))
    specs = {(spec.world_size, spec.replicas) for spec in map(spec_of, reductions(graph))}
    assert specs == {(4, 16)}
    problem = problem_of(traced.backward, RankLayout(4, copies=16))
    assert all(reduction.then is not None for reduction in problem.reductions)
    assert set(problem.streams) == {"shards", "copies"}


def test_resized_program_leaves_the_traced_one_alone(traced: Traced) -> None:
    before = traced.backward.gm.graph.python_code("self").src
    sizes = [val(node).shape for node in traced.backward.gm.graph.nodes if node.op == "placeholder"]
    program_on(traced.backward, RankLayout(64))
    assert traced.backward.gm.graph.python_code("self").src == before
    assert [val(node).shape for node in traced.backward.gm.graph.nodes if node.op == "placeholder"] == sizes


def test_layout_places_groups_on_nodes() -> None:
    shapes = RankLayout(shards=16, copies=4, tensor=2).group_shapes(8, "tensor")
    assert (shapes("tensor").ranks, shapes("tensor").nodes) == (2, 1)
    assert (shapes("shards").ranks, shapes("shards").nodes) == (16, 4)
    assert (shapes("copies").ranks, shapes("copies").nodes) == (4, 4)


def test_recomputed_attention_is_called_itself() -> None:
    recomputed = scale_models.traced_decoder(4, "full")
    for program in (recomputed.forward, recomputed.backward):
        graph = program.gm.graph
        graph.lint()
        assert not [node for node in graph.nodes if node.op == "call_function" and "rng" in str(node.target)]
        attention = [node for node in graph.nodes if "flash_attention_for_cpu.default" in str(node.target)]
        assert len(attention) == 4
        assert all([value.shape[1] for value in val(node)] == [8, 8] for node in attention)
