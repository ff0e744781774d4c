"""The Dynamo backend: a captured graph goes through AOTAutograd and our partitioner, each graph that comes out becomes
a region's.

inductor    Inductor compiles each program          aot_eager    each program runs as it is, operator by operator
eager       the captured graph runs as it is; its markers gather and reduce one parameter at a time
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from graphshard.capture.entry_code import is_entry_point
from graphshard.compat.block_trace import trace_apart
from graphshard.compat.dynamo import ends_in_graph_break, leave_frame
from graphshard.compat.inductor import (
    INDUCTOR_PATCHES,
    compile_region_aot,
    compile_region_inductor,
    source_digest,
)
from graphshard.compat.interpreter import with_room, without_collection
from graphshard.compat.partitioner import CustomPartitionerFn, partition
from graphshard.compat.running_trace import failed_guard, has_read_in_functional_call, traced_code
from graphshard.compat.tensors import is_constant, is_selective
from graphshard.compat.value_sizes import with_sizes_of_values
from graphshard.errors import UnsupportedModel
from graphshard.graph.block_calls import Body
from graphshard.graph.elsewhere import without_marks, written_elsewhere
from graphshard.graph.inner_gradients import asked_of_inputs, asks_for_gradients, read_apart
from graphshard.graph.saved_values import hide_copies, keep_copies, save_before_writes, save_inputs_themselves
from graphshard.lowering import driver
from graphshard.lowering.bodies import Bodies
from graphshard.lowering.traced_blocks import compile_traced_once
from graphshard.lowering.twins import with_arguments, without_twins
from graphshard.runtime import region
from graphshard.runtime.model_runtime import ModelRuntime
from graphshard.runtime.selective import recomputing_all
from graphshard.runtime.symbolic import SymbolicTraceFailed, naming_symbolic_failures
from graphshard.runtime.uncompiled import as_it_is, gathering_one_by_one, is_one_call
from graphshard.state.model_context import ModelContext
from graphshard.state.shards import Shard

log = logging.getLogger(__name__)

BACKENDS = ("inductor", "aot_eager", "eager")


class Partitioner(CustomPartitionerFn):
    """Runs the passes of the joint graph, then AOTAutograd's min-cut.

    Module-level, and pickled without its model: Inductor puts it into its cache keys.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context: Callable[[], ModelContext | None] = weakref.ref(context)
        planning = context.planning
        self.key = f"graphshard-{source_digest()}-{planning.fingerprint if planning else 'fsdp2'}"

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        context = self._context()
        title = "joint" if context is None else f"{context.name}.region{context.report.regions - 1}.joint"
        keep_copies(gm.graph)
        seconds = driver.run_joint_passes(
            gm, title, driver.log.warning if context is None else context.report.note_once
        )
        if context is not None:
            context.report.joint_passes_s += seconds
        forward, backward = partition(gm, joint_inputs, **kwargs)
        save_before_writes(forward, kwargs["num_fwd_outputs"])
        save_inputs_themselves(forward, backward, kwargs["num_fwd_outputs"])
        driver.check_partition(forward, kwargs["num_fwd_outputs"])
        if context is not None and context.planning is not None:
            context.planning.backward = backward
        return forward, backward

    def __getstate__(self) -> dict[str, Any]:
        return {"key": self.key}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.key = state["key"]
        self._context = _no_context

    def uuid(self) -> str:
        """Covers everything that shapes a graph and is not in it."""
        return self.key


def _no_context() -> None:
    """The model of a partitioner that was pickled."""


def make_backend(
    runtime: ModelRuntime, name: str, fullgraph: bool = False
) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    """The Dynamo backend of one compiled model. Dynamo keeps it for good, so it must not keep the model alive."""
    runtime_of = weakref.ref(runtime)
    partitioner = Partitioner(runtime.context)
    inductor = name == "inductor"
    bodies = Bodies() if inductor else None

    @without_collection()
    def graphshard(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        runtime = runtime_of()
        if runtime is None:
            raise AssertionError("a graph was captured for a model that was deleted")
        _check_other_values(runtime, fullgraph)
        _check_collectives(runtime, gm, fullgraph)
        _check_gradients(runtime, gm, inputs, fullgraph)
        _check_writes(runtime, gm, inputs, fullgraph)
        if is_one_call(gm):
            return as_it_is(runtime, gm)
        broken = ends_in_graph_break(gm)
        arguments = None
        if (expanded := without_twins(gm, inputs, runtime.twins, runtime.context.report, broken)) is not None:
            gm, inputs = expanded.module, expanded.inputs
            arguments = runtime.twins.kept(expanded.arguments)
        number = runtime.context.report.regions
        runtime.context.report.regions += 1
        title, note = f"{runtime.context.name}.region{number}", runtime.context.report.note_once
        log.info("graphshard: %s: captured, %d nodes%s", title, len(gm.graph.nodes), ", up to a graph break" * broken)
        if guard := failed_guard():
            runtime.context.report.captured_again[number] = guard
            log.info("graphshard: %s: captured again: a guard failed: %s", title, guard)
        driver.run_captured_passes(gm, f"{title}.captured", note)
        if name == "eager":
            return with_arguments(gathering_one_by_one(runtime, number, gm), arguments)
        positions = _shard_positions(runtime, inputs)
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        captured = region.Region(
            runtime,
            number,
            positions,
            broken or not is_entry_point(traced_code()),
            _input_grads(runtime, inputs),
            bodies,
            {**INDUCTOR_PATCHES, "custom_partitioner_fn": partitioner} if inductor else {},
        )
        report = runtime.context.report
        compile_region = partial(compile_region_inductor, before=hide_copies) if inductor else compile_region_aot

        def compile_it(bodies: Sequence[Body]) -> Callable[..., Any]:
            captured.traced_once(bodies)
            return compile_region(gm, inputs, captured.compile, partitioner)

        compile_all = partial(
            with_room,
            compile_traced_once,
            gm,
            lambda part, values: trace_apart(part, values, compile_region),
            compile_it,
            report,
            title,
            {names[place]: shard.ref() for place, shard in positions.items()},
            runtime.context.strict,
        )
        try:
            with naming_symbolic_failures(inputs):
                compiled = with_sizes_of_values(compile_all)
        except SymbolicTraceFailed as error:
            if fullgraph or is_entry_point(traced_code()):  # which is captured once more
                raise
            report.say_once(f"{title}: {error}: this part of forward runs as it is; want dynamic=False")
            leave_frame(str(error))

        def run(*args: Any) -> Any:
            if is_selective():
                with recomputing_all(report):
                    return run(*args)
            results = compiled(*args)
            if torch.is_grad_enabled():
                captured.calls.watch(results)
            return results

        return with_arguments(run, arguments)

    return graphshard


def _check_other_values(runtime: ModelRuntime, fullgraph: bool) -> None:
    """Has a frame run as it is that calls a module with values in the place of its parameters: a trace reads these. So
    is one that runs while a parametrization that forward has registered is there: it would be captured in each call, as
    that makes a new class.
    """
    shards = runtime.holdings.shards
    if not has_read_in_functional_call() and (is_entry_point(traced_code()) or not shards.some_taken_out()):
        return
    said = "forward calls a module with other values than its parameters"
    if fullgraph:
        raise UnsupportedModel(f"{runtime.context.name}: {said}; got fullgraph=True, want fullgraph=False")
    shards.say_other_values()
    leave_frame(said)


def _check_collectives(runtime: ModelRuntime, gm: GraphModule, fullgraph: bool) -> None:
    """Has a frame run as it is whose collective torch has run while it was captured, which ranks do at other times."""
    nodes = (node for part in gm.modules() if isinstance(part, GraphModule) for node in part.graph.nodes)
    sent = (node for node in nodes if "c10d_functional." in str(node.target) and node.op == "call_function")
    if (node := next((node for node in sent if is_constant(node.meta.get("example_value"))), None)) is None:
        return
    said = f"forward has {node.target} of a tensor that it makes of a number, which torch runs when it captures it, too"
    if fullgraph:
        raise UnsupportedModel(
            f"{runtime.context.name}: {said}; got fullgraph=True, want torch.full((), number) or fullgraph=False"
        )
    runtime.context.report.say_once(
        f"{said}: the code around it runs as it is; modules that it calls are compiled; want torch.full((), number)"
    )
    leave_frame(said)


def _check_gradients(runtime: ModelRuntime, gm: GraphModule, inputs: Sequence[Any], fullgraph: bool) -> None:
    """Has a frame run as it is that puts gradients on parameters (`backward` in forward): no program accumulates them.

    Raises:
        UnsupportedModel: the gradient of a parameter is asked for that is read elsewhere, too.
    """
    if not asks_for_gradients(gm):
        return
    shards = _shards_by_id(runtime)
    place = {node: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    if asked := [shards[id(inputs[place[node]])].fqn for node in read_apart(gm) if node in place]:
        raise UnsupportedModel(
            f"{runtime.context.name}: forward asks for the gradient of {asked[0]} (torch.autograd.grad), and reads it "
            "elsewhere, too: each read is a tensor of its own; want one read (weight = self.weight) for both, or calls "
            "in graphshard.eager(model)"
        )
    if any(id(inputs[at]) in shards for at in asked_of_inputs(gm)):
        said = "forward calls backward, which reaches parameters"
        if fullgraph:
            raise UnsupportedModel(f"{runtime.context.name}: {said}; got fullgraph=True, want fullgraph=False")
        runtime.context.report.say_once(f"{said}: the code around it runs as it is; modules that it calls are compiled")
        leave_frame(said)


def _check_writes(runtime: ModelRuntime, gm: GraphModule, inputs: Sequence[Any], fullgraph: bool) -> None:
    """Takes the marks of reads elsewhere out of a captured graph. Has a frame that writes what it read so run as it is:
    FSDP2 has shards there, which graphs do not.
    """
    shards = _shards_by_id(runtime)
    registered = {id(shard.param.parameter) for shard in runtime.holdings.shards}
    if written := written_elsewhere(gm, inputs, lambda value: id(value) in registered):
        fqns = {shards[id(inputs[at])].fqn for at in written if id(inputs[at]) in shards}
        names = ", ".join([*sorted(fqns)[:3], *(["..."] if len(fqns) > 3 else [])]) or "parameters"
        said = f"forward writes {names}, of units whose own forward does not run then"
        if fullgraph:
            raise UnsupportedModel(
                f"{runtime.context.name}: {said}: FSDP2 has shards of them there, which no graph covers; got "
                "fullgraph=True, want fullgraph=False, or the write outside forward"
            )
        runtime.context.report.say_once(
            f"{said}: the code around it runs as it is, on shards, as in FSDP2; modules that it calls are compiled"
        )
        leave_frame(said)
    without_marks(gm)


def _shards_by_id(runtime: ModelRuntime) -> dict[int, Shard]:
    """By what stands for them among the inputs of a captured graph."""
    return {id(held): shard for shard in runtime.holdings.shards for held in (shard.leaf, shard.param.parameter)}


def _shard_positions(runtime: ModelRuntime, inputs: Sequence[Any]) -> dict[int, Shard]:
    leaves = {id(shard.leaf): shard for shard in runtime.holdings.shards}
    return {i: leaves[id(value)] for i, value in enumerate(inputs) if id(value) in leaves}


def _input_grads(runtime: ModelRuntime, inputs: Sequence[Any]) -> int:
    """How many inputs besides shards need a gradient."""
    leaves = {id(shard.leaf) for shard in runtime.holdings.shards}
    return sum(isinstance(value, Tensor) and value.requires_grad and id(value) not in leaves for value in inputs)
