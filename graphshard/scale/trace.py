"""Traces one step of a model on tensors without data: the marked forward and backward graphs, and their parameters.

The way is that of `graphshard.compile`: FSDP2 shards the model, Dynamo and Inductor's front end capture it, the passes
of the joint graph and the partitioner split it. Nothing is allocated, run or generated. Shards are traced for a few
ranks, whatever the number of ranks to study: see `resize`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.fx import GraphModule

from graphshard.capture import marked_classes
from graphshard.capture.entry_code import entry_point
from graphshard.capture.units import resolve_units
from graphshard.compat.fake import fake_process_group
from graphshard.compat.inductor import compile_region_inductor
from graphshard.compat.tensors import fake_tensors
from graphshard.graph.ir import Direction, ParamRef
from graphshard.graph.saved_values import hide_copies
from graphshard.lowering import driver
from graphshard.lowering.twins import without_twins
from graphshard.runtime.backend import Partitioner
from graphshard.runtime.engine import Engine
from graphshard.runtime.entry_points import Options
from graphshard.scale.parallel import parallelize
from graphshard.state.shard_table import ShardTable
from graphshard.state.shards import Shard

# The mesh that is traced: at least two shards, so that every parameter is sharded.
TRACED_SHARDS = 2


@dataclass(frozen=True)
class TracedProgram:
    """One marked graph.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        gm: the graph.
        params: its sharded parameters by placeholder.
        stays: placeholders of shards whose gathered value stays from forward to backward.
    """

    direction: Direction
    gm: GraphModule
    params: dict[str, ParamRef]
    stays: frozenset[str]


@dataclass(frozen=True)
class Traced:
    """One step of a model.

    Attributes:
        forward, backward: its programs.
        params: every sharded parameter.
        tensor_ranks: ranks of the tensor-parallel axis.
        tensor_group: name of its process group, ``""`` without.
    """

    forward: TracedProgram
    backward: TracedProgram
    params: tuple[ParamRef, ...]
    tensor_ranks: int = 1
    tensor_group: str = ""


Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def trace_step(
    build: Build, tensor_ranks: int = 1, tensor_plan: str = "", state_dtype: torch.dtype = torch.float32
) -> Traced:
    """Traces forward and backward of the loss that a model's forward returns.

    Args:
        build: makes the model and its inputs; called where tensors have no data.
        tensor_ranks: ranks of the tensor-parallel axis; 1: there is none.
        tensor_plan: name of its plan (see `parallel`).
        state_dtype: of the sharded parameters; they are gathered in bf16 and reduced in fp32.

    Raises:
        RuntimeError: a process group is there already.
        ValueError: the model cannot be captured as one graph, or has no parameter or no loss.
    """
    with fake_process_group(TRACED_SHARDS * tensor_ranks):
        mesh = init_device_mesh("cpu", (TRACED_SHARDS, tensor_ranks), mesh_dim_names=("shard", "tensor"))
        over_shards, over_tensors = mesh["shard"], mesh["tensor"]
        with fake_tensors():
            model, inputs = build()
            _hold(model, state_dtype)
        # Meshes are tensors of their own, with data.
        if tensor_ranks > 1:
            parallelize(model, over_tensors, tensor_plan)
        _shard(model, over_shards)
        group = over_tensors.get_group().group_name if tensor_ranks > 1 else ""
        return _Recorder(model, Options(fullgraph=True)).trace(inputs, tensor_ranks, group)


def _hold(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes parameters of `dtype` of those there are: `nn.Module.to` fails for tensors without data."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.is_floating_point() and param.dtype != dtype:
                new = made.setdefault(param, nn.Parameter(param.detach().to(dtype), param.requires_grad))
                module.register_parameter(name, new)


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*resolve_units(model, None), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


class _Split(Exception):
    """The graphs are there: ends a capture."""


class _RecordingPartitioner(Partitioner):
    """Keeps what it split, and ends the capture."""

    graphs: tuple[GraphModule, GraphModule] | None = None

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        self.graphs = super().__call__(gm, joint_inputs, **kwargs)
        raise _Split


class _FakeShards(ShardTable):
    """Fake tensors have no addresses: shards are found by what a capture reads alone."""

    def _addresses(self) -> dict[int, Shard]:
        return {}


class _Recorder(Engine):
    """An engine whose model is captured and never run."""

    table_class = _FakeShards

    def trace(self, inputs: Sequence[Any], tensor_ranks: int, tensor_group: str) -> Traced:
        self._prepare()
        if extended := [shard.fqn for shard in self.shards if shard.extension is not None]:
            raise ValueError(f"model: {extended[0]} has all-gather extensions, whose communication is not known here")
        if not list(self.shards):
            raise ValueError("model: got no parameter to shard")
        partitioner = _RecordingPartitioner(self.context)
        captured: list[dict[int, Any]] = []
        unsplit: list[GraphModule] = []

        def without_loss(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
            unsplit.append(gm)
            raise _Split

        def record(gm: GraphModule, values: Sequence[Any]) -> Any:
            if (expanded := without_twins(gm, values, self.twins, self.context.report)) is not None:
                gm, values = expanded.module, expanded.inputs
            driver.run_captured_passes(gm, f"{self.context.name}.captured")
            leaves = {id(shard.leaf): shard for shard in self.shards}
            captured.append({i: leaves[id(value)] for i, value in enumerate(values) if id(value) in leaves})
            return compile_region_inductor(gm, values, without_loss, partitioner, before=hide_copies)

        entry = entry_point(type(self.model), marked_classes.own_call)
        compiled = torch.compile(entry, backend=record, fullgraph=True, dynamic=False)
        try:
            with marked_classes.tracing(), _without_advice():
                compiled(self.model, tuple(inputs), {})
        except Exception as error:  # Dynamo wraps what ends the capture
            if partitioner.graphs is None and not unsplit:
                raise ValueError(f"model: it could not be captured as one graph: {error}") from error
        if partitioner.graphs is None:
            raise ValueError("model: got a forward without a loss to differentiate, want one that returns the loss")
        forward, backward = partitioner.graphs
        names = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
        by_name = {names[position]: shard for position, shard in captured[0].items()}
        params = {name: shard.ref() for name, shard in by_name.items()}
        stays = frozenset(name for name, shard in by_name.items() if not shard.unit.reshard_after_forward)
        return Traced(
            TracedProgram("forward", forward, params, stays),
            TracedProgram("backward", backward, params, stays),
            tuple(shard.ref() for shard in self.shards),
            tensor_ranks,
            tensor_group,
        )


@contextmanager
def _without_advice() -> Iterator[None]:
    """Leaves out torch's advice on selective checkpoints: there is nothing in place in what presets checkpoint."""
    log = logging.getLogger("torch._higher_order_ops.wrap")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled
