"""A deep model from a shallow trace: equal to a trace of every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import scale_models

from graphshard.cost import CostModel, find_hardware
from graphshard.planner import Problem, check_schedule, fsdp2_schedule, lower_bound_us, simulate
from graphshard.planning.extraction import Scene, extract_problem
from graphshard.scale.blocks import NotRepeated, check_blocks
from graphshard.scale.estimate import Setting, estimate_step
from graphshard.scale.model_size import forward_flops, shard_sizes
from graphshard.scale.repeat import coarsened, repeated
from graphshard.scale.resize import RankLayout, program_on
from graphshard.scale.trace import Traced, TracedProgram

DEEP = 6
LAYOUTS = {1: RankLayout(16), 2: RankLayout(4, copies=2, tensor=2)}


def problem_of(traced: Traced, program: TracedProgram) -> Problem:
    layout = LAYOUTS[traced.tensor_ranks]
    graph, ctx = program_on(program, layout)
    return extract_problem(
        graph, ctx, Scene(CostModel(find_hardware("h100")), layout.group_shapes(8, traced.tensor_group))
    )


def of_a_decoder(layers: int) -> Traced:
    return scale_models.traced_decoder(layers, "selective", tensor=2)


@pytest.mark.parametrize(("traced", "layers"), [(scale_models.traced_mean, 9), (of_a_decoder, 5)])
def test_repeated_equals_a_trace_of_every_block(traced: Callable[[int], Traced], layers: int) -> None:
    shallow, deep = (traced(count) for count in (4, layers))
    work, whole = scale_models.workload(shallow, layers), scale_models.workload(deep, layers)
    layout = LAYOUTS[shallow.tensor_ranks]
    sizes = shard_sizes(shallow, work.repetition, layout)
    assert replace(sizes, block_bytes=0) == replace(shard_sizes(deep, whole.repetition, layout), block_bytes=0)
    assert forward_flops(shallow, work.repetition) == forward_flops(deep, whole.repetition)
    for name in ("forward", "backward"):
        check_blocks(getattr(shallow, name).gm.graph, shallow.forward.params, work.repetition.units)
        found = coarsened(
            repeated(
                problem_of(shallow, getattr(shallow, name)),
                work.repetition.units,
                layers,
                shard_bytes=sizes.block_bytes,
            )
        )
        wanted = coarsened(problem_of(deep, getattr(deep, name)))
        assert [(g.fqn, g.unit, g.transfer, g.wire_bytes) for g in found.gathers] == [
            (g.fqn, g.unit, g.transfer, g.wire_bytes) for g in wanted.gathers
        ]
        assert [(r.fqn, r.unit, r.then, r.wire_bytes) for r in found.reductions] == [
            (r.fqn, r.unit, r.then, r.wire_bytes) for r in wanted.reductions
        ]
        assert [c.us for c in found.own] == [c.us for c in wanted.own]
        assert found.compute_us == pytest.approx(wanted.compute_us)
        assert lower_bound_us(found) == pytest.approx(lower_bound_us(wanted))
        schedules = [fsdp2_schedule(problem) for problem in (found, wanted)]
        check_schedule(found, schedules[0])
        mine, other = (simulate(p, s) for p, s in zip((found, wanted), schedules, strict=True))
        assert mine.step_us == pytest.approx(other.step_us)
        assert mine.exposed_us == pytest.approx(other.exposed_us)
        assert mine.peak_bytes == other.peak_bytes
        reached = [[p.elapsed_us[g.first_use] for g in p.gathers] for p in (found, wanted)]
        assert reached[0] == pytest.approx(reached[1])


def test_repeated_refuses_blocks_that_differ() -> None:
    shallow = scale_models.traced_decoder()
    units = scale_models.workload(shallow, DEEP).repetition.units
    problem = problem_of(shallow, shallow.forward)
    start = next(g.first_use for g in problem.gathers if g.unit == units[2])
    op_us = list(problem.op_us)
    op_us[start] *= 2
    with pytest.raises(NotRepeated, match="takes"):
        repeated(replace(problem, op_us=tuple(op_us)), units, DEEP, 0)
    op_bytes = list(problem.op_bytes)
    op_bytes[start] += 1
    with pytest.raises(NotRepeated, match="memory of two blocks differs"):
        repeated(replace(problem, op_bytes=tuple(op_bytes)), units, DEEP, 0)
    with pytest.raises(NotRepeated, match="gathers 3 of 3 blocks, want at least 4"):
        repeated(problem, units[:3], DEEP, 0)


def test_blocks_whose_work_is_elsewhere_are_refused() -> None:
    masking = scale_models.traced_mean(4, scale_models.Masking)
    units = scale_models.workload(masking, DEEP).repetition.units
    with pytest.raises(NotRepeated, match="is not in the block of relu"):
        check_blocks(masking.forward.gm.graph, masking.forward.params, units)
    check_blocks(masking.backward.gm.graph, masking.backward.params, units)
    with pytest.raises(NotRepeated):
        estimate_step(scale_models.workload(masking, DEEP), Setting(find_hardware("h100"), RankLayout(8), "fsdp2"))


def test_coarsened_keeps_times_and_peaks() -> None:
    shallow = scale_models.traced_decoder()
    problem = problem_of(shallow, shallow.backward)
    # Split every op: joined again, it must be what it was.
    fine = replace(
        problem,
        ops=tuple(f"{name}.{half}" for name in problem.ops for half in range(2)),
        op_us=tuple(us / 2 for us in problem.op_us for _ in range(2)),
        op_bytes=tuple(num_bytes for num_bytes in problem.op_bytes for _ in range(2)),
        gathers=tuple(
            replace(g, first_use=2 * g.first_use, last_use=2 * g.last_use, ready=2 * g.ready) for g in problem.gathers
        ),
        reductions=tuple(replace(r, ready=2 * r.ready) for r in problem.reductions),
    )
    joined = coarsened(fine)
    assert len(joined.ops) < len(fine.ops)
    assert joined.compute_us == pytest.approx(fine.compute_us)
    simulations = [simulate(p, fsdp2_schedule(p)) for p in (joined, fine)]
    assert simulations[0].step_us == pytest.approx(simulations[1].step_us)
    assert simulations[0].peak_bytes == simulations[1].peak_bytes
